"""The attention kernel on tiny models, over K and V of each type that it reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.errors import OptionError
from kvcellar.runtime.context import Context
from kvcellar.testing.golden import nmse
from kvcellar.types import Float32Array
from tests.runtime.archs import PLAIN, WINDOWED, opened, text

pytest.importorskip("llvmlite", reason="llvmlite is not installed: no kernel can be compiled")

TYPES = [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f16", "q8_0")]
FLASH = 2e-4
"""Against ggml's flash attention, which rounds queries to 8 bits where K is quantised."""
ORACLE = {"f16": 1e-6, "q8_0": 2e-6, "q4_0": 5e-5}
"""Against NumPy, by the type of V: a stored value may be rounded to its neighbour."""


def logits(context: Context) -> Float32Array:
    """Two sequences that share a start and take turns, some of it behind every window."""
    context.decode(Batch.of(text(1, 40)))
    context.cache.seq_cp(0, 1)
    rows = []
    for a, b in zip(text(2, 8), text(3, 8), strict=True):
        batch = Batch.of([a], logits="all")
        batch.add(b, seq_ids=1, logits=True)
        rows.append(context.decode(batch))
    return np.concatenate(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("type_k", "type_v"), TYPES)
@pytest.mark.parametrize("arch", [arch for arch in (*PLAIN, *WINDOWED) if arch != "deepseek2-moe"])
def test_the_kernel_gives_the_logits_of_others(
    shared: Path, arch: str, type_k: str, type_v: str
) -> None:
    types = {"type_k": type_k, "type_v": type_v}
    with opened(shared, arch, kernel=True, **types) as context:
        got = logits(context)
    with opened(shared, arch, kernel=False, flash_attn=True, **types) as context:
        assert nmse(got, logits(context)) < FLASH
    with opened(shared, arch, "numpy", **types) as context:
        assert nmse(got, logits(context)) < ORACLE[type_v]


@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
def test_a_latent_cache_is_refused_by_name(shared: Path, type_k: str) -> None:
    with (
        pytest.raises(OptionError, match="kernel=True: V is part of K"),
        opened(shared, "deepseek2-moe", kernel=True, type_k=type_k),
    ):
        pass
