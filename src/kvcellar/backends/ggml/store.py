"""K and V rows in ggml buffers, read and written through NumPy views.

K of layer i is ``[size, n_embd_k]``, a row a cell; V is too with flash attention, else it is
transposed, ``[n_embd_v, size]``; a layer whose V is part of its K has none. ggml's own kernels
convert between f32 and the K/V types; quantised rows are stored under a Hadamard transform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvcellar.backends.base import Part
from kvcellar.backends.checks import check_rows, check_types, not_finite
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.buffers import BUFFER, BufferType, KVBuffers, layer_buffer_types
from kvcellar.backends.ggml.library import load
from kvcellar.backends.ggml.rotation import Rotation
from kvcellar.backends.hadamard import transform
from kvcellar.errors import ClosedError, NotSupported, OptionError, not_copied
from kvcellar.types import (
    ByteArray,
    CacheSpec,
    Float32Array,
    Int32Array,
    Int64Array,
    KVType,
    finite_rows,
    overflowed,
)


class _Held(NamedTuple):
    """What changes with the size: one value, so that it changes at once or not at all."""

    spec: CacheSpec
    buffers: KVBuffers | None  # None: closed
    generation: int = 0


class GgmlStore:
    """A :class:`~kvcellar.backends.base.KVStore` in memory that ggml allocates.

    Args:
        spec: the shape of the cache.
        backend: what rotates K rows; without one the store cannot shift.
        buffer_types: one a layer, see :func:`layer_buffer_types`; None: the host's.

    Raises:
        OptionError: a type whose blocks do not divide a head.
        AllocationError: a buffer cannot be had; nothing is left behind.
    """

    __reduce_ex__ = not_copied(
        "a GgmlStore", "make another, and move rows with their read and write methods"
    )

    can_copy = True

    def __init__(
        self,
        spec: CacheSpec,
        backend: GgmlBackend | None = None,
        buffer_types: Sequence[BufferType] | None = None,
    ) -> None:
        check_types(spec)
        _check_transposed(spec)
        self._backend = backend
        n_layers = len(spec.layers)
        types = layer_buffer_types(n_layers) if buffer_types is None else tuple(buffer_types)
        if len(types) != n_layers:
            raise OptionError(f"buffer_types: {len(types)} for {n_layers} layers; give one a layer")
        self._types = types
        self._held = _Held(spec, KVBuffers(spec, types))

    @property
    def spec(self) -> CacheSpec:
        """The shape of the cache."""
        return self._held.spec

    @property
    def generation(self) -> int:
        """Rises when the tensors move: graphs that point at them are void then."""
        return self._held.generation

    @property
    def _buffers(self) -> KVBuffers:
        buffers = self._held.buffers
        if buffers is None:
            raise ClosedError(f"{BUFFER} is closed with its context")
        return buffers

    @property
    def k(self) -> list[int]:
        """Address of each layer's K tensor, ``[size, n_embd_k]``."""
        return self._buffers.k

    @property
    def v(self) -> list[int]:
        """Address of each layer's V tensor, as K or ``[n_embd_v, size]``; 0 where V is in K."""
        return self._buffers.v

    def write(self, layer: int, cells: Int64Array, k: Float32Array, v: Float32Array) -> None:
        """Store f32 rows, converted to the store's types; ComputeError unless all are finite."""
        spec = self.spec
        rows_k = to_rows(transform(k, spec.hadamard_k(layer)), spec.type_k)
        rows_v = to_rows(transform(v, spec.hadamard_v(layer)), spec.type_v)
        check_rows(spec, layer, "k", k, rows_k)
        check_rows(spec, layer, "v", v, rows_v)
        self.write_raw(layer, "k", cells, rows_k)
        self.write_raw(layer, "v", cells, rows_v)

    def read(self, layer: int, part: Part, cells: Int64Array) -> Float32Array:
        """The rows of cells as f32."""
        spec = self.spec
        is_k = part == "k"
        size = spec.hadamard_k(layer) if is_k else spec.hadamard_v(layer)
        rows = from_rows(self.read_raw(layer, part, cells), spec.type_k if is_k else spec.type_v)
        return transform(rows, size)

    def read_raw(self, layer: int, part: Part, cells: Int64Array) -> ByteArray:
        """The rows of cells as stored, ``[n, row_bytes]``; a copy."""
        return self._buffers.rows[part][layer].get(cells)

    def write_raw(self, layer: int, part: Part, cells: Int64Array, rows: ByteArray) -> None:
        """Store rows that :meth:`read_raw` returned, bit for bit."""
        self._buffers.rows[part][layer].put(cells, rows)

    def all_finite(self, cells: Int64Array) -> bool:
        """Whether K and V of cells, at least one, are finite in every layer."""
        return self._buffers.all_finite(cells)

    def check_layer(self, layer: int, cells: Int64Array) -> None:
        """Check what a graph wrote into cells in one layer.

        Raises:
            ComputeError: a row is not finite; says which.
        """
        spec = self.spec
        parts: tuple[tuple[Part, KVType], ...] = (("k", spec.type_k), ("v", spec.type_v))
        for part, kind in parts:
            rows = self.read_raw(layer, part, cells)
            is_finite = finite_rows(rows, kind)
            if not is_finite.all():
                row = int(np.argmin(is_finite))
                raise not_finite(spec, layer, part, row, overflows=overflowed(rows[row], kind))

    def copy(self, src: Int64Array, dst: Int64Array) -> None:
        """Copy K and V rows in every layer, bit for bit."""
        for rows in (*self._buffers.rows["k"], *self._buffers.rows["v"]):
            rows.put(dst, rows.get(src))

    @property
    def can_shift(self) -> bool:
        """Whether there is a backend to rotate K rows with."""
        return self._backend is not None

    def rotate(self, cells: Int64Array, shifts: Int32Array) -> None:
        """Rotate each K row of cells by its shift, in every layer with RoPE.

        Raises:
            AllocationError: the work buffer cannot be had; nothing was rotated.
        """
        moved = shifts != 0  # a row that stays keeps its bytes: quantising it again might not
        cells, shifts = cells[moved], shifts[moved]
        layers = [i for i, layer in enumerate(self.spec.layers) if layer.rope is not None]
        for piece, layer, rows in self._rotation(layers, len(cells)).run(cells, shifts):
            self.write_raw(layer, "k", cells[piece], rows)

    def rotated(self, layer: int, part: Part, cells: Int64Array, shifts: Int32Array) -> ByteArray:
        """What :meth:`read_raw` would return after :meth:`rotate`; nothing changes.

        Raises:
            AllocationError: the work buffer cannot be had.
        """
        rows, moved = self.read_raw(layer, part, cells), np.flatnonzero(shifts)
        if part == "k" and self.spec.layers[layer].rope is not None:
            rotation = self._rotation([layer], len(moved))
            for piece, _, found in rotation.run(cells[moved], shifts[moved]):
                rows[moved[piece]] = found
        return rows

    def _rotation(self, layers: Sequence[int], n: int) -> Rotation:
        if self._backend is None:
            raise NotSupported("this store was made without a backend to rotate K rows with")
        return Rotation(self._backend, self.spec, self.k, layers, n)

    def wipe(self, cells: Int64Array) -> None:
        """Zero the K and V rows of cells in every layer."""
        for rows in (*self._buffers.rows["k"], *self._buffers.rows["v"]):
            rows.wipe(cells)

    def zero(self) -> None:
        """Set every byte to zero."""
        self._buffers.zero()

    def resize(self, size: int, src: Int64Array, dst: Int64Array) -> None:
        """Move to new buffers of ``size`` cells: rows of cells src go to dst, others are zero.

        Raises:
            AllocationError: they cannot be had beside the old ones; the store is as it was.
        """
        held, old = self._held, self._buffers
        spec = replace(held.spec, size=size)
        new = KVBuffers(spec, self._types)
        try:
            for part in ("k", "v"):
                pairs = zip(old.rows[part], new.rows[part], strict=True)
                for old_rows, new_rows in pairs:
                    new_rows.put(dst, old_rows.get(src))
        except BaseException:
            new.close()
            raise
        self._held = _Held(spec, new, held.generation + 1)
        old.close()

    def close(self) -> None:
        """Free the buffers; closing twice is fine."""
        held = self._held
        self._held = held._replace(buffers=None)
        if held.buffers is not None:
            held.buffers.close()


def _check_transposed(spec: CacheSpec) -> None:
    widths = {layer.n_embd_v for layer in spec.layers if layer.v_offset is None}
    if spec.v_trans and len(widths) > 1:
        raise OptionError("flash_attn=False: V rows of layers differ in size; use flash_attn=True")


def to_rows(rows: Float32Array, kind: KVType) -> ByteArray:
    """Rows ``[n, width]`` of f32 as ``[n, row_bytes]`` of that type."""
    n, width = rows.shape
    if width == 0:  # ggml divides by it
        return np.empty((n, 0), np.uint8)
    source = np.ascontiguousarray(rows, dtype=np.float32)
    out = np.empty((n, kind.row_bytes(width)), dtype=np.uint8)
    load().api.ggml_quantize_chunk(
        kind.ggml_id, source.ctypes.data, out.ctypes.data, 0, n, width, None
    )
    return out


def from_rows(rows: ByteArray, kind: KVType) -> Float32Array:
    """Rows ``[n, row_bytes]`` of that type as ``[n, width]`` of f32."""
    n, n_bytes = rows.shape
    if n_bytes == 0:
        return np.empty((n, 0), np.float32)
    width = n_bytes // kind.block_bytes * kind.block_size
    source = np.ascontiguousarray(rows)
    if kind is KVType.F32:
        return np.array(source.view(np.float32))
    out = np.empty((n, width), dtype=np.float32)
    traits = load().api.ggml_get_type_traits(kind.ggml_id).contents
    traits.to_float(source.ctypes.data, out.ctypes.data, n * width)
    return out
