"""K and V rows in NumPy arrays: each verb of the store in the plainest way there is.

Buffers are bytes. K of a layer is ``[size, row_bytes]``; V is too with flash attention, else it is
transposed, ``[n_embd_v, size, value_bytes]``. Every verb works on views with cells first.

f32, f16 and bf16 are converted here, blocks by the library ``gguf``, which cannot make ``iq4_nl``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvcellar.backends.base import Part
from kvcellar.backends.checks import check_rows, check_types
from kvcellar.backends.hadamard import transform
from kvcellar.backends.memory import check_available
from kvcellar.backends.numpy.gguf import quants
from kvcellar.backends.numpy.ops import rotated
from kvcellar.errors import AllocationError, ClosedError, OptionError, not_copied
from kvcellar.types import (
    AnyArray,
    ByteArray,
    CacheSpec,
    Float32Array,
    Int32Array,
    Int64Array,
    KVType,
)

NOT_MADE = frozenset({KVType.IQ4_NL})
"""Types that rows cannot be converted to."""
_BUFFER = "the K/V buffer"


class _Held(NamedTuple):
    """What changes with the size: one value, so that it changes at once or not at all."""

    spec: CacheSpec
    buffers: dict[Part, list[ByteArray]] | None  # None: closed


class NumpyStore:
    """A :class:`~kvcellar.backends.base.KVStore` that is all NumPy.

    Raises:
        OptionError: a type that does not fit, or that this backend cannot make.
        LibraryError: a quantised type, and the library for it is not installed.
        AllocationError: the buffers cannot be had; nothing is left behind.
    """

    __reduce_ex__ = not_copied(
        "a NumpyStore", "make another, and move rows with their read and write methods"
    )

    can_copy = True
    can_shift = True

    def __init__(self, spec: CacheSpec) -> None:
        check_types(spec)
        check_made("type_k", spec.type_k)
        check_made("type_v", spec.type_v)
        check_available(_BUFFER, spec.n_bytes)
        try:
            self._held = _Held(spec, _allocate(spec))
        except (MemoryError, ValueError):
            raise AllocationError(_BUFFER, spec.n_bytes) from None

    @property
    def spec(self) -> CacheSpec:
        """The shape of the cache."""
        return self._held.spec

    @property
    def _buffers(self) -> dict[Part, list[ByteArray]]:
        buffers = self._held.buffers
        if buffers is None:
            raise ClosedError(f"{_BUFFER} is closed with its context")
        return buffers

    def write(self, layer: int, cells: Int64Array, k: Float32Array, v: Float32Array) -> None:
        """Store f32 rows, converted to the store's types; ComputeError unless all are finite."""
        rows_k = self._converted(layer, "k", k)
        rows_v = self._converted(layer, "v", v)
        self.write_raw(layer, "k", cells, rows_k)
        self.write_raw(layer, "v", cells, rows_v)

    def read(self, layer: int, part: Part, cells: Int64Array) -> Float32Array:
        """The rows of cells as f32."""
        rows = from_rows(self.read_raw(layer, part, cells), self._kind(part))
        return transform(rows, self._hadamard(layer, part))

    def read_raw(self, layer: int, part: Part, cells: Int64Array) -> ByteArray:
        """The rows of cells as stored, ``[n, row_bytes]``; a copy."""
        rows = self._rows(layer, part)
        return rows[cells].reshape(len(cells), rows[0].size)

    def write_raw(self, layer: int, part: Part, cells: Int64Array, rows: ByteArray) -> None:
        """Store rows that :meth:`read_raw` returned, bit for bit."""
        target = self._rows(layer, part)
        target[cells] = rows.reshape(len(cells), *target.shape[1:])

    def copy(self, src: Int64Array, dst: Int64Array) -> None:
        """Copy K and V rows in every layer, bit for bit."""
        for rows in self._all_rows():
            rows[dst] = rows[src]

    def rotate(self, cells: Int64Array, shifts: Int32Array) -> None:
        """Rotate each K row of cells by its shift, in every layer with RoPE.

        A pure rotation: the magnitude that a key got when it was computed is not applied again.
        What would overflow becomes the largest value of the type, as in ggml's store.
        """
        for i, layer in enumerate(self.spec.layers):
            if layer.rope is not None:
                self.write_raw(i, "k", cells, self.rotated(i, "k", cells, shifts))

    def rotated(self, layer: int, part: Part, cells: Int64Array, shifts: Int32Array) -> ByteArray:
        """What :meth:`read_raw` would return after :meth:`rotate`; nothing changes."""
        rows, shape, moved = self.read_raw(layer, part, cells), self.spec.layers[layer], shifts != 0
        if part == "k" and shape.rope is not None:
            keys = self.read(layer, "k", cells[moved])
            heads = keys.reshape(-1, shape.n_head_kv, shape.head_dim_k)
            turned = rotated(heads, shifts[moved], shape.rope).reshape(keys.shape)
            mixed, kind = transform(turned, self._hadamard(layer, "k")), self.spec.type_k
            rows[moved] = to_rows(mixed.clip(-kind.largest, kind.largest), kind)
        return rows

    def wipe(self, cells: Int64Array) -> None:
        """Zero the K and V rows of cells in every layer."""
        for rows in self._all_rows():
            rows[cells] = 0

    def zero(self) -> None:
        """Set every byte to zero."""
        for rows in self._all_rows():
            rows.fill(0)

    def resize(self, size: int, src: Int64Array, dst: Int64Array) -> None:
        """Move to new buffers of ``size`` cells: rows of cells src go to dst, others are zero.

        Raises:
            AllocationError: they cannot be had beside the old ones; the store is as it was.
        """
        new = NumpyStore(replace(self.spec, size=size))
        for part in self._buffers:
            for i in range(len(self.spec.layers)):
                new.write_raw(i, part, dst, self.read_raw(i, part, src))
        self._held = new._held

    def close(self) -> None:
        """Free the buffers; closing twice is fine."""
        self._held = self._held._replace(buffers=None)

    def _converted(self, layer: int, part: Part, values: Float32Array) -> ByteArray:
        mixed = transform(values, self._hadamard(layer, part))
        rows = to_rows(mixed, self._kind(part))
        check_rows(self.spec, layer, part, values, rows)
        return rows

    def _kind(self, part: Part) -> KVType:
        return self.spec.type_k if part == "k" else self.spec.type_v

    def _hadamard(self, layer: int, part: Part) -> int:
        return self.spec.hadamard_k(layer) if part == "k" else self.spec.hadamard_v(layer)

    def _rows(self, layer: int, part: Part) -> ByteArray:
        """A view ``[size, row_bytes]`` or ``[size, n_embd_v, value_bytes]`` of a buffer."""
        buffer = self._buffers[part][layer]
        return buffer.swapaxes(0, 1) if part == "v" and self.spec.v_trans else buffer

    def _all_rows(self) -> list[ByteArray]:
        layers = range(len(self.spec.layers))
        return [self._rows(i, part) for part in self._buffers for i in layers]


def _allocate(spec: CacheSpec) -> dict[Part, list[ByteArray]]:
    k, v = spec.type_k, spec.type_v
    return {
        "k": [np.zeros((spec.size, k.row_bytes(s.n_embd_k)), np.uint8) for s in spec.layers],
        "v": [
            np.zeros((s.n_embd_v, spec.size, v.block_bytes), np.uint8)
            if spec.v_trans
            else np.zeros((spec.size, v.row_bytes(s.n_embd_v)), np.uint8)
            for s in spec.layers
        ],
    }


def check_made(option: str, kind: KVType) -> None:
    """Check that rows can be stored as that type.

    Raises:
        OptionError: they cannot.
        LibraryError: they could, if the library were installed.
    """
    if kind in NOT_MADE:
        raise OptionError(f"{option}={kind.label}: the NumPy backend cannot make it; use q4_0")
    if kind.is_quantized:
        quants()


def to_rows(rows: Float32Array, kind: KVType) -> ByteArray:
    """Rows ``[n, width]`` of f32 as ``[n, row_bytes]`` of that type."""
    n, width = rows.shape
    source = np.ascontiguousarray(rows, dtype=np.float32)
    if source.size == 0:
        return np.empty((n, kind.row_bytes(width)), np.uint8)
    with np.errstate(all="ignore"):  # what is too large becomes infinite, as in ggml
        stored: AnyArray = source
        if kind is KVType.F16:
            stored = source.astype(np.float16)
        elif kind is KVType.BF16:
            stored = _upper_half(source)
        elif kind.is_quantized:
            stored = quants().quantize(source, kind)
    return np.array(stored.view(np.uint8))


def from_rows(rows: ByteArray, kind: KVType) -> Float32Array:
    """Rows ``[n, row_bytes]`` of that type as ``[n, width]`` of f32."""
    n, n_bytes = rows.shape
    source = np.ascontiguousarray(rows)
    if source.size == 0:
        return np.empty((n, n_bytes // kind.block_bytes * kind.block_size), np.float32)
    if kind is KVType.F32:
        return np.array(source.view(np.float32))
    if kind is KVType.F16:
        return source.view(np.float16).astype(np.float32)
    if kind is KVType.BF16:
        return (source.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return quants().dequantize(source, kind)


def _upper_half(rows: Float32Array) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """The upper 16 bits of each f32, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = rows.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(rows), (bits >> 16) | 0x40, rounded).astype(np.uint16)
