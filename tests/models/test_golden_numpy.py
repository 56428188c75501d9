"""Tiny models of each architecture against logits recorded from llama.cpp, on the NumPy backend."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.testing.golden import nmse
from kvcellar.testing.uncached import uncached_logits
from kvcellar.types import KVType
from tests.models.driver import Grouped

TOLERANCE = 2e-5
ROUNDING = 1e-9  # f32 K and V
NAMES = [
    "deepseek2-moe",
    "gemma2-dense",
    "gemma3-dense",
    "gpt-oss-moe",
    "gpt2-dense",
    "llama-dense",
    "llama-moe",
    "phi3-dense",
    "qwen2-dense",
    "qwen3-dense",
]
TEXT = np.random.default_rng(5).integers(0, 128, 40).tolist()  # longer than the windows of 32


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_references(shared: Path, name: str) -> None:
    golden = json.loads((shared / "golden" / "archs" / f"{name}.json").read_text())
    context = Grouped(shared / "models" / golden["model"])
    n_compared = 0
    for number, step in enumerate(golden["steps"]):
        errors = context.play(step)
        assert all(error < TOLERANCE for error in errors.values()), (number, errors)
        n_compared += len(errors)
    assert n_compared == 11


@pytest.mark.parametrize("name", NAMES)
def test_cached_equals_uncached(shared: Path, name: str) -> None:
    """In microbatches, with an edit of another sequence on the way."""
    context = Grouped(shared / "models" / f"{name}.gguf", KVType.F32)
    expected = uncached_logits(context.model, TEXT)
    got = [context.decode(Batch.of(TEXT[:30], logits="all"), n_ubatch=16)]
    context.decode(Batch.of(TEXT[5:12], seq_id=1))
    for cache in context.caches:
        cache.seq_cp(0, 2)
        cache.seq_rm(1)
    context.decode(Batch.of([1, 2, 3], seq_id=0))
    got += [context.decode(Batch.of([token], seq_id=2)) for token in TEXT[30:]]
    assert nmse(np.concatenate(got), expected) < ROUNDING
