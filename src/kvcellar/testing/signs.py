"""K and V rows that tell where they came from, for tests that move real bytes.

Every content is a number and has a key and a value of its own in each layer; a key is rotated to a
position by the oracle's RoPE. Tests call :func:`fill` where a backend would compute a plan, and
:func:`check_rows` to prove that cells hold the rows of their contents within the rounding of the
type. :class:`SignedStore` keeps the record of a :class:`SignatureStore` beside the bytes of a real
store, so that the bytes of every cell follow from the record:

1. K is the content's key rotated to the recorded position (invariant 6).
2. V is the content's value, bit for bit (invariant 7).
3. What was wiped is zero (invariant 9).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvcellar.backends.base import KVStore, Part
from kvcellar.testing.rotation import rotated_rows
from kvcellar.testing.stores import NullStore, SignatureStore
from kvcellar.types import (
    ByteArray,
    CacheSpec,
    Float32Array,
    Int32Array,
    Int64Array,
    KVType,
    LayerSpec,
    RopeSpec,
)

_PARTS: tuple[Part, ...] = ("k", "v")

SIGNED_LAYERS = (
    LayerSpec(1, 4, 4, RopeSpec("normal", 2)),
    LayerSpec(1, 4, 4, RopeSpec("neox", 4, 100.0, 0.25, 1.0, n_ctx_orig=64)),
)
"""Two small layers: one that rotates half of a head, one with YaRN."""


def signed_spec(size: int, n_seq_max: int, padding: int, flash_attn: bool = True) -> CacheSpec:
    """A cache of those layers, in f32."""
    kinds = (KVType.F32, KVType.F32)
    return CacheSpec(size, n_seq_max, SIGNED_LAYERS, *kinds, flash_attn, padding)


class SignedStore(SignatureStore):
    """The record of a :class:`SignatureStore`, kept beside the bytes of a real store.

    Args:
        inner: the store, for which f32 is the type to choose: rounding adds up.
        tolerance: by how much a key may be off.
    """

    def __init__(self, inner: KVStore, *, tolerance: float = 1e-4) -> None:
        super().__init__(inner.spec, can_shift=inner.can_shift, can_copy=inner.can_copy)
        self.inner = inner
        self._tolerance = tolerance
        self._values: dict[tuple[int, int], bytes] = {}  # of layer and content, as stored

    def fill(self, cells: Int64Array, content: Int64Array, positions: Int32Array) -> None:
        """Write fresh rows, as a backend would."""
        super().fill(cells, content, positions)
        fill(self.inner, cells, content, positions)
        for i in range(len(self.spec.layers)):
            for number, row in zip(content, self.inner.read_raw(i, "v", cells), strict=True):
                self._values[i, int(number)] = row.tobytes()

    def check_rows(self) -> None:
        """Raise AssertionError unless every cell's bytes are what the record says."""
        filled = np.flatnonzero(self.content >= 0)
        wiped = np.flatnonzero(self.content < 0)
        content = self.content[filled]
        for i, layer in enumerate(self.spec.layers):
            expected = keys(layer, i, content, self.rotation[filled])
            error = np.abs(self.inner.read(i, "k", filled) - expected).max(axis=1, initial=0)
            assert (error <= self._tolerance).all(), f"K of cells {filled[error > self._tolerance]}"
            for cell, row in zip(filled, self.inner.read_raw(i, "v", filled), strict=True):
                wanted = self._values[i, int(self.content[cell])]
                assert row.tobytes() == wanted, f"V of cell {cell} in layer {i}"
            for part in _PARTS:
                assert not self.inner.read_raw(i, part, wiped).any(), f"{part} of wiped cells"

    def read(self, layer: int, part: Part, cells: Int64Array) -> Float32Array:
        """The rows of cells as f32."""
        return self.inner.read(layer, part, cells)

    def read_raw(self, layer: int, part: Part, cells: Int64Array) -> ByteArray:
        """The record of cells, then their rows as stored."""
        record = super().read_raw(layer, part, cells)
        return np.concatenate((record, self.inner.read_raw(layer, part, cells)), axis=1)

    def write_raw(self, layer: int, part: Part, cells: Int64Array, rows: ByteArray) -> None:
        """Store what was read, record and all."""
        width = super().read_raw(layer, part, cells).shape[1]
        super().write_raw(layer, part, cells, rows[:, :width])
        self.inner.write_raw(layer, part, cells, np.ascontiguousarray(rows[:, width:]))

    def copy(self, src: Int64Array, dst: Int64Array) -> None:
        """Copy rows and record."""
        super().copy(src, dst)
        self.inner.copy(src, dst)

    def rotate(self, cells: Int64Array, shifts: Int32Array) -> None:
        """Rotate K rows and note it."""
        super().rotate(cells, shifts)
        self.inner.rotate(cells, shifts)

    def wipe(self, cells: Int64Array) -> None:
        """Zero rows and forget them."""
        super().wipe(cells)
        self.inner.wipe(cells)

    def zero(self) -> None:
        """Zero and forget everything."""
        super().zero()
        self.inner.zero()

    def resize(self, size: int, src: Int64Array, dst: Int64Array) -> None:
        """Move rows and record."""
        self.inner.resize(size, src, dst)
        super().resize(size, src, dst)

    def close(self) -> None:
        """Close the real store."""
        self.inner.close()


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
        """The shape of a cache of ``size`` cells."""
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
        contents: their contents.
        positions: the positions that their K rows are rotated to.
        turns: how often they were rotated since they were written; every time adds rounding.
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
