"""A sequence whose K, V or state is not finite fails, and no other sequence notices.

ggml's attention adds a mask to the scores of all cells and multiplies V of all of them, so one NaN
in a cell of anybody would be everybody's (invariants 8 and 9).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.errors import ComputeError
from kvcellar.runtime.context import Context
from kvcellar.types import Float32Array, KVType
from tests.runtime.spoiled import (
    ATTENTION,
    FIRST,
    LARGE,
    N_TOKENS,
    NAN,
    RECURRENT,
    spoiled,
)

PATHS: dict[str, dict[str, Any]] = {
    "kernel": {"kernel": True},
    "flash": {"kernel": False, "flash_attn": True},
    "products": {"kernel": False, "flash_attn": False},
    "numpy": {"backend": "numpy"},
    "numpy, transposed": {"backend": "numpy", "flash_attn": False},
}
TEXT = np.random.default_rng(5).integers(FIRST, N_TOKENS, 120).tolist()


def batches(bad: int) -> list[Batch]:
    """Batches with a bad token: alone, among others, beside another sequence, in a later piece."""
    good = TEXT[:3]
    both = Batch.of(TEXT[100:103], 0, logits="none")
    for token in (*good, bad):
        both.add(token, seq_ids=1)
    return [
        Batch.of([bad], 1, logits="none"),
        Batch.of([*good, bad, *good], 1, logits="none"),
        Batch.of([*good, bad], 1),
        both,
        Batch.of([*good * 6, bad], 1, logits="none"),
    ]


def stored(context: Context) -> list[bytes]:
    """Every byte of K and V; those of free rows of states do not matter."""
    found = []
    for part in context.cache.parts:
        if not part.has_states:
            store: Any = part.store  # type: ignore[attr-defined]
            cells = np.arange(store.spec.size)
            for i in range(len(store.spec.layers)):
                found += [store.read_raw(i, name, cells).tobytes() for name in ("k", "v")]
    return found


def rest(context: Context) -> Float32Array:
    """Logits of a long and of a short batch of another sequence."""
    long = context.decode(Batch.of(TEXT[20:100], 0, logits="all"))
    short = context.decode(Batch.of(TEXT[100:101], 0))
    return np.concatenate((long, short))


def check_shielded(folder: Path, arch: str, bad: int, match: str, options: dict[str, Any]) -> None:
    """See that every batch with that token fails and leaves nothing that others notice."""
    with spoiled(folder, arch, **options) as context:
        context.decode(Batch.of(TEXT[:20], 0))
        wanted = rest(context)
    with spoiled(folder, arch, **options) as context:
        context.decode(Batch.of(TEXT[:20], 0))
        before, used = stored(context), context.cache.used
        context.n_ubatch = 8
        for batch in batches(bad):
            with pytest.raises(ComputeError, match=match):
                context.decode(batch)
            context.cache.check()
            assert (context.cache.used, context.cache.seq_pos_max(1)) == (used, -1)
            assert context.cache.seq_pos_max(0) == 19
            assert stored(context) == before
        context.n_ubatch = 512
        assert np.array_equal(rest(context), wanted)


QUANTISED = [kind.label for kind in KVType if kind.is_quantized]
LISTS = [
    *(("kernel", kind) for kind in ("f16", "q8_0", "q4_0")),
    *(("flash", kind) for kind in ("f16", *QUANTISED)),
    *(("numpy", kind) for kind in ("f16", *QUANTISED) if kind != "iq4_nl"),  # it cannot make those
]


@pytest.mark.parametrize("path", ["flash", "products", "numpy", "numpy, transposed"])
@pytest.mark.parametrize("arch", [a for a in ATTENTION if a != "gpt2"])  # its norm takes means away
def test_values_that_overflow_f16(tmp_path: Path, arch: str, path: str) -> None:
    match = r"overflows f16: use type_[kv]='bf16' or 'f32'"
    check_shielded(tmp_path, arch, LARGE, match, PATHS[path])


@pytest.mark.parametrize(("path", "kind"), LISTS)
def test_values_that_overflow_a_type(tmp_path: Path, path: str, kind: str) -> None:
    if path == "kernel":
        pytest.importorskip("llvmlite")
    options = {**PATHS[path], "type_k": kind, "type_v": kind}
    match = rf"overflows {kind}: use type_[kv]='bf16' or 'f32'"
    check_shielded(tmp_path, "wide", LARGE, match, options)


@pytest.mark.parametrize("kind", ["bf16", "f32"])
@pytest.mark.parametrize("path", ["flash", "products", "numpy"])
def test_the_types_that_are_named_hold_them(tmp_path: Path, path: str, kind: str) -> None:
    options = {**PATHS[path], "type_k": kind, "type_v": kind}
    with spoiled(tmp_path, "wide", **options) as context:
        context.decode(Batch.of(TEXT[:20], 0))
        wanted = rest(context)
    with spoiled(tmp_path, "wide", **options) as context:
        context.decode(Batch.of(TEXT[:20], 0))
        assert np.isfinite(context.decode(Batch.of([LARGE], 1))).all()
        np.testing.assert_allclose(rest(context), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("arch", "path", "kind"),
    [
        (arch, path, ("f32", "f16", "bf16")[(i + j) % 3])
        for i, arch in enumerate((*ATTENTION, *RECURRENT))
        for j, path in enumerate(("flash", "products", "numpy"))
    ],
)
def test_a_token_that_is_nan(tmp_path: Path, arch: str, path: str, kind: str) -> None:
    options = {**PATHS[path], "type_k": kind, "type_v": kind}
    check_shielded(tmp_path, arch, NAN, "not finite", options)


@pytest.mark.parametrize(("path", "kind"), LISTS)
def test_nan_that_blocks_would_hide(tmp_path: Path, path: str, kind: str) -> None:
    if path == "kernel":
        pytest.importorskip("llvmlite")
    options = {**PATHS[path], "type_k": kind, "type_v": kind}
    # Blocks with a minimum look for it from the largest f32 on.
    check_shielded(tmp_path, "wide", NAN, "not finite|overflows q[45]_1", options)


@pytest.mark.parametrize("path", ["flash", "numpy"])
@pytest.mark.parametrize("arch", [arch for arch in RECURRENT if arch != "lfm2"])  # has no decay
def test_a_state_that_grows_without_end(tmp_path: Path, arch: str, path: str) -> None:
    """Each token multiplies it; all that tokens are computed from is finite until it is not."""

    def grow(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith("ssm_a"):
                tensors[name] = np.full_like(tensors[name], 2.0 if arch == "mamba" else 20.0)

    with spoiled(tmp_path, arch, change=grow, **PATHS[path]) as context:
        context.decode(Batch.of(TEXT[:1], 0))
        for _ in range(2):
            with pytest.raises(ComputeError, match=r"state.* not finite"):
                context.decode(Batch.of(TEXT[:60], 1, logits="none"))
            assert context.cache.seq_pos_max(1) == -1
        assert context.cache.seq_pos_max(0) == 0


@pytest.mark.parametrize("path", ["flash", "numpy"])
def test_inputs_of_a_convolution_that_overflow(tmp_path: Path, path: str) -> None:
    def widen(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if "shortconv.in_proj" in name:
                tensors[name] = tensors[name] * np.float32(1e30)

    with (
        spoiled(tmp_path, "lfm2", change=widen, **PATHS[path]) as context,
        pytest.raises(ComputeError, match=r"state.* not finite"),
    ):
        context.decode(Batch.of(TEXT[:4], 1, logits="none"))
