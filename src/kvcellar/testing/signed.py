"""A store whose rows tell what they are: real K and V bytes next to the record of what they hold.

Every content is a number, and has a key and a value of its own in each layer. Where a backend would
compute a plan, tests call ``fill``. After that the bytes of every cell follow from the record:

1. K is the content's key rotated to the recorded position (invariant 6).
2. V is the content's value, bit for bit (invariant 7).
3. What was wiped is zero (invariant 9).
"""

from __future__ import annotations

import numpy as np

from kvcellar.backends.base import KVStore, Part
from kvcellar.testing.rotation import rotated_rows
from kvcellar.testing.stores import SignatureStore
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
        for i, layer in enumerate(self.spec.layers):
            keys = rotated_rows(_signatures(i, "k", content, layer), positions, layer)
            values = _signatures(i, "v", content, layer)
            self.inner.write(i, cells, keys.astype(np.float32), values)
            for number, row in zip(content, self.inner.read_raw(i, "v", cells), strict=True):
                self._values[i, int(number)] = row.tobytes()

    def check_rows(self) -> None:
        """Prove that every cell's bytes are what the record says."""
        filled = np.flatnonzero(self.content >= 0)
        wiped = np.flatnonzero(self.content < 0)
        content = self.content[filled]
        for i, layer in enumerate(self.spec.layers):
            expected = rotated_rows(
                _signatures(i, "k", content, layer), self.rotation[filled], layer
            )
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


def _signatures(i: int, part: Part, content: Int64Array, layer: LayerSpec) -> Float32Array:
    """The rows that stand for contents, ``[n, width]``."""
    width = layer.n_embd_k if part == "k" else layer.n_embd_v
    rows = [
        np.random.default_rng([i, part == "k", int(number)]).uniform(-1, 1, width)
        for number in content
    ]
    return np.array(rows, np.float32).reshape(len(rows), width)
