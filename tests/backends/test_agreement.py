"""Both backends compute the same: logits of every step, K and V rows, rotations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.base import KVStore, Part
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.backends.numpy.store import NOT_MADE, NumpyStore
from kvcellar.batch import Batch
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.testing.conformance import ROPES, tolerance
from kvcellar.testing.gguf_writer import Tensor, Value, write_gguf
from kvcellar.testing.golden import nmse
from kvcellar.testing.rotation import random_rows
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.types import CacheSpec, Float32Array, KVType, LayerSpec, RopeSpec
from tests.runtime.helpers import attention

PARTS: tuple[Part, ...] = ("k", "v")
TOLERANCE = {"f32": 1e-10, "f16": 2e-5, "bf16": 4e-4, "q8_0": 2e-3}
"""Of logits: ggml's kernels round Q to the type of K. NMSE."""

YARN: dict[str, Value] = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 64,
}
VARIANTS: dict[str, tuple[TinyLlama, dict[str, Value], dict[str, Tensor]]] = {
    "dense": (TinyLlama(), {}, {}),
    "experts": (TinyLlama(n_expert=5), {}, {}),
    "groups": (TinyLlama(n_embd=128, n_head=4, n_head_kv=2), {}, {}),
    "partial": (TinyLlama(), {"llama.rope.dimension_count": 12}, {}),
    "linear": (TinyLlama(), {"llama.rope.scaling.factor": 8.0}, {}),
    "yarn": (TinyLlama(), YARN, {}),
    "factors": (TinyLlama(), {}, {"rope_freqs.weight": np.linspace(1, 9, 16, dtype=np.float32)}),
    "biases": (
        TinyLlama(),
        {},
        {
            "blk.0.attn_q.bias": np.linspace(-1, 1, 64, dtype=np.float32),
            "blk.1.ffn_down.bias": np.linspace(-1, 1, 64, dtype=np.float32),
            "blk.0.attn_v.scale": np.array([0.5], np.float32),
            "blk.1.ffn_gate.scale": np.array([1.5], np.float32),
        },
    ),
    "half": (TinyLlama(), {}, {}),
}

Step = Callable[[Context], "Float32Array | None"]


def _decode(tokens: list[int], seq_id: int, logits: Any = "all") -> Step:
    return lambda context: context.decode(Batch.of(tokens, seq_id, logits=logits))


def _verb(name: str, *args: int) -> Step:
    def call(context: Context) -> None:
        getattr(context.cache, name)(*args)

    return call


STEPS: list[Step] = [
    _decode([3, 1, 4, 1, 5, 9, 2, 6], 0),
    _decode([5], 0),
    _verb("seq_cp", 0, 1, -1, -1),
    _decode([7, 7, 30], 1, "last"),
    _decode(list(range(40)), 2),  # more tokens than ggml takes products for
    _verb("seq_rm", 0, 2, 5),
    _verb("seq_add", 0, 5, -1, -3),
    _decode([11, 12], 0),
    _verb("seq_div", 2, 8, -1, 4),
    _decode([13], 2),
    _verb("seq_keep", 2),
    _verb("defrag"),
    _verb("update"),
    _decode([14, 15], 2),
]


def _write(folder: Path, name: str) -> Path:
    tiny, metadata, tensors = VARIANTS[name]
    weights = {**tiny.tensors(), **tensors}
    if name == "half":
        weights = {
            key: value.astype(np.float16)
            if isinstance(value, np.ndarray) and value.ndim > 1
            else value
            for key, value in weights.items()
        }
    return write_gguf(folder / "tiny.gguf", {**tiny.metadata(), **metadata}, weights)


def _compare(ours: Context, theirs: Context, tolerance: float) -> None:
    for step in STEPS:
        got, wanted = step(ours), step(theirs)
        if got is not None and wanted is not None:
            assert nmse(got, wanted) < tolerance
    assert ours.cache.used == theirs.cache.used
    cells = np.flatnonzero(attention(ours).table.positions >= 0)
    for layer in range(2):
        for part in PARTS:
            a, b = (attention(c).store.read(layer, part, cells) for c in (ours, theirs))
            assert nmse(a, b) < tolerance, (layer, part)


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_rows_agree_in_every_step(tmp_path: Path, name: str, flash_attn: bool) -> None:
    path = _write(tmp_path, name)
    options: dict[str, Any] = {"n_ctx": 96, "n_seq_max": 4, "flash_attn": flash_attn}
    with (
        Model.from_gguf(path, backend="numpy") as plain,
        Model.from_gguf(path, backend="ggml", n_threads=1) as fast,
        plain.context(type_k="f32", type_v="f32", **options) as ours,
        fast.context(type_k="f32", type_v="f32", **options) as theirs,
    ):
        _compare(ours, theirs, TOLERANCE["f16" if name == "half" else "f32"])


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_smaller_types_agree_in_every_step(tmp_path: Path, kind: str) -> None:
    path = _write(tmp_path, "dense")
    with (
        Model.from_gguf(path, backend="numpy") as plain,
        Model.from_gguf(path, backend="ggml", n_threads=1) as fast,
        plain.context(n_ctx=96, n_seq_max=4, type_k=kind, type_v=kind) as ours,
        fast.context(n_ctx=96, n_seq_max=4, type_k=kind, type_v=kind) as theirs,
    ):
        _compare(ours, theirs, TOLERANCE[kind])


@pytest.fixture(scope="module")
def backend() -> Iterator[GgmlBackend]:
    made = GgmlBackend(1)
    yield made
    made.close()


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("kind", [k for k in KVType if k not in NOT_MADE], ids=lambda k: k.label)
def test_rotations_agree(backend: GgmlBackend, kind: KVType, rope: RopeSpec) -> None:
    spec = CacheSpec(32, 1, (LayerSpec(2, 64, 32, rope),), kind)
    rows, cells = random_rows(32, 128), np.arange(32)
    shifts = np.arange(-16, 16, dtype=np.int32)
    stores: list[KVStore] = [NumpyStore(spec), GgmlStore(spec, backend)]
    for store in stores:
        store.write(0, cells, rows, random_rows(32, 64))
        store.rotate(cells, shifts)
    a, b = (store.read(0, "k", cells) for store in stores)
    assert np.abs(a - b).max() <= tolerance(kind, rows) + 1e-5
    for store in stores:
        store.close()
