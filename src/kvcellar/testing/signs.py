"""K and V rows that tell where they came from, for tests that move real bytes.

Each content (a number) has rows of its own; K is rotated to a position by the oracle's RoPE. A
store is right about a cell if it holds the rows of the cell's content, K rotated to where it should
stand, within the rounding of its type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvcellar.backends.base import KVStore
from kvcellar.testing.rotation import rotated_rows
from kvcellar.testing.stores import NullStore, SignatureStore
from kvcellar.types import (
    CacheSpec,
    Float32Array,
    Int32Array,
    Int64Array,
    KVType,
    LayerSpec,
    RopeSpec,
)

ROUNDING = {"f32": 1e-5, "f16": 2**-10, "bf16": 2**-7, "q8_0": 0.02, "q5_1": 0.15, "q5_0": 0.2}
"""Largest error of a value that is stored once, as a share of its row's largest; else 0.35."""

TINY = (LayerSpec(1, 2, 2, RopeSpec("normal", 2)),)
MIXED = (
    LayerSpec(2, 8, 4, RopeSpec("normal", 4, freq_base=100.0)),
    LayerSpec(1, 8, 8, RopeSpec("neox", 8, 500.0, 0.25, 1.0, n_ctx_orig=64)),
    LayerSpec(1, 4, 8),
)
"""Partial rotary, YaRN, and a layer without RoPE."""

WIDE = (LayerSpec(1, 64, 32, RopeSpec("neox", 32)), LayerSpec(2, 32, 32, RopeSpec("normal", 32)))
"""Heads that quantised types take; the first layer's K then lies under a transform."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a cache is tested over.

    Attributes:
        store: makes the store of a spec; the caller closes it.
        layers: of the spec; likewise the rest.
    """

    store: Callable[[CacheSpec], KVStore] = SignatureStore
    layers: tuple[LayerSpec, ...] = TINY
    type_k: KVType = KVType.F16
    type_v: KVType = KVType.F16
    flash_attn: bool = True

    def spec(self, size: int, padding: int = 1, n_seq_max: int = 4) -> CacheSpec:
        """A cache of so many cells."""
        return CacheSpec(
            size, n_seq_max, self.layers, self.type_k, self.type_v, self.flash_attn, padding
        )


def fill(store: KVStore, cells: Int64Array, contents: Int64Array, positions: Int32Array) -> None:
    """Write the rows of these contents, K rotated to these positions, as a decode would."""
    if isinstance(store, SignatureStore):
        store.fill(cells, contents, positions)
    elif not isinstance(store, NullStore):
        for i, layer in enumerate(store.spec.layers):
            k = keys(layer, i, contents, positions)
            store.write(i, cells, k, values(layer, i, contents))


def check_rows(
    store: KVStore,
    cells: Int64Array,
    contents: Int64Array,
    positions: Int64Array,
    turns: Int64Array,
) -> None:
    """Raise AssertionError unless cells hold the rows of these contents.

    Args:
        store: what is asked.
        cells: which cells.
        contents: of each cell.
        positions: what the K row of each is rotated to.
        turns: how often each has been rotated since it was written; each adds rounding.
    """
    if isinstance(store, SignatureStore):
        assert store.content[cells].tolist() == contents.tolist()
        assert store.rotation[cells].tolist() == positions.tolist()
        return
    if isinstance(store, NullStore):
        return
    spec = store.spec
    for i, layer in enumerate(spec.layers):
        k, v = store.read(i, "k", cells), store.read(i, "v", cells)
        _check_close(k, keys(layer, i, contents, positions), spec.type_k, turns, f"K, layer {i}")
        _check_close(v, values(layer, i, contents), spec.type_v, 0 * turns, f"V, layer {i}")


def keys(
    layer: LayerSpec, number: int, contents: Int64Array, positions: Int32Array | Int64Array
) -> Float32Array:
    """K rows ``[n, n_embd_k]`` of contents at positions."""
    rows = _signs(contents, layer.n_embd_k, number)
    return rotated_rows(rows, positions, layer).astype(np.float32)


def values(layer: LayerSpec, number: int, contents: Int64Array) -> Float32Array:
    """V rows ``[n, n_embd_v]`` of contents."""
    return _signs(contents, layer.n_embd_v, number + 0.5)


def _signs(contents: Int64Array, width: int, salt: float) -> Float32Array:
    rows = np.sin(np.multiply.outer(contents + 1.37 + salt, 1.618 + np.arange(width)))
    return np.asarray(rows, np.float32)


def _check_close(
    got: Float32Array, wanted: Float32Array, kind: KVType, turns: Int64Array, what: str
) -> None:
    if not len(got):
        return
    allowed = (1 + turns) * ROUNDING.get(kind.label, 0.35) * 1.5 * np.abs(wanted).max(axis=1)
    errors = np.abs(got - wanted).max(axis=1)
    assert (errors <= allowed).all(), f"{what}: errors {errors}, allowed {allowed}"
