"""K and V rows in ggml buffers: two tensors a layer, one allocation for all of them.

K of layer i is ``[size, n_embd_k]``, a row a cell; V likewise with flash attention, else it lies
across, ``[n_embd_v, size]``. The buffer is cleared to zero, so that padding never holds a NaN. Rows
are read and written through NumPy views.
"""

from __future__ import annotations

from kvcellar.backends.base import Part
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.binding import InitParams
from kvcellar.backends.ggml.convert import from_rows, to_rows, transform
from kvcellar.backends.ggml.layout import CellRows, ChannelMajor, RowMajor
from kvcellar.backends.ggml.library import load
from kvcellar.backends.ggml.memory import check_available
from kvcellar.backends.ggml.rotation import rotate_rows
from kvcellar.errors import AllocationError, NotSupported, OptionError
from kvcellar.types import ByteArray, CacheSpec, Float32Array, Int32Array, Int64Array, KVType

_BUFFER = "the K/V buffer"


class GgmlStore:
    """A :class:`~kvcellar.backends.base.KVStore` in the CPU's buffer type.

    Attributes:
        spec: the shape of the cache.
        k: address of each layer's K tensor, ``[size, n_embd_k]``.
        v: address of each layer's V tensor, ``[size, n_embd_v]`` or ``[n_embd_v, size]``.

    Args:
        spec: the shape of the cache.
        backend: what rotates K rows; without one the store cannot shift.

    Raises:
        OptionError: a type whose blocks do not divide a head.
        AllocationError: the buffer cannot be had; nothing is left behind.
    """

    can_copy = True
    _context: int | None = None

    def __init__(self, spec: CacheSpec, backend: GgmlBackend | None = None) -> None:
        _check_types(spec)
        check_available(_BUFFER, spec.n_bytes)
        self.spec = spec
        self._backend = backend
        self._api = load().api
        self.k: list[int] = []
        self.v: list[int] = []
        self._context = self._declare()
        self._buffer: int | None = self._allocate()
        self._rows: dict[Part, list[CellRows]] = {
            "k": [RowMajor(t) for t in self.k],
            "v": [ChannelMajor(t) if spec.v_trans else RowMajor(t) for t in self.v],
        }

    def _declare(self) -> int:
        api, spec = self._api, self.spec
        size = (2 * len(spec.layers) + 1) * api.ggml_tensor_overhead()
        context: int = api.ggml_init(InitParams(size, None, True))
        for i, layer in enumerate(spec.layers):
            k = api.ggml_new_tensor_2d(context, spec.type_k.ggml_id, layer.n_embd_k, spec.size)
            across = (spec.size, layer.n_embd_v)
            ne = across if spec.v_trans else across[::-1]
            v = api.ggml_new_tensor_2d(context, spec.type_v.ggml_id, *ne)
            api.ggml_set_name(k, f"cache_k_l{i}".encode())
            api.ggml_set_name(v, f"cache_v_l{i}".encode())
            self.k.append(k)
            self.v.append(v)
        return context

    def _allocate(self) -> int:
        api = self._api
        kind = api.ggml_backend_cpu_buffer_type()
        buffer: int | None = api.ggml_backend_alloc_ctx_tensors_from_buft(self._context, kind)
        if not buffer:
            api.ggml_free(self._context)
            self._context = None
            raise AllocationError(_BUFFER, self.spec.n_bytes)
        api.ggml_backend_buffer_clear(buffer, 0)
        return buffer

    def write(self, layer: int, cells: Int64Array, k: Float32Array, v: Float32Array) -> None:
        """Store f32 rows, converted to the store's types."""
        spec = self.spec
        k, v = transform(k, spec.hadamard_k(layer)), transform(v, spec.hadamard_v(layer))
        self._rows["k"][layer].put(cells, to_rows(k, spec.type_k))
        self._rows["v"][layer].put(cells, to_rows(v, spec.type_v))

    def read(self, layer: int, part: Part, cells: Int64Array) -> Float32Array:
        """The rows of cells as f32."""
        spec = self.spec
        is_k = part == "k"
        size = spec.hadamard_k(layer) if is_k else spec.hadamard_v(layer)
        rows = from_rows(self.read_raw(layer, part, cells), spec.type_k if is_k else spec.type_v)
        return transform(rows, size)

    def read_raw(self, layer: int, part: Part, cells: Int64Array) -> ByteArray:
        """The rows of cells as stored, ``[n, row_bytes]``; a copy."""
        return self._rows[part][layer].get(cells)

    def write_raw(self, layer: int, part: Part, cells: Int64Array, rows: ByteArray) -> None:
        """Store rows that :meth:`read_raw` returned, bit for bit."""
        self._rows[part][layer].put(cells, rows)

    def copy(self, src: Int64Array, dst: Int64Array) -> None:
        """Copy K and V rows in every layer, bit for bit."""
        for rows in (*self._rows["k"], *self._rows["v"]):
            rows.put(dst, rows.get(src))

    @property
    def can_shift(self) -> bool:
        """Whether there is a backend to rotate K rows with."""
        return self._backend is not None

    def rotate(self, cells: Int64Array, shifts: Int32Array) -> None:
        """Rotate the K rows of cells by so many positions each, in every layer with RoPE."""
        if self._backend is None:
            raise NotSupported("this store was made without a backend to rotate K rows with")
        rotate_rows(self._backend, self.spec, self.k, cells, shifts)

    def wipe(self, cells: Int64Array) -> None:
        """Zero the K and V rows of cells in every layer."""
        for rows in (*self._rows["k"], *self._rows["v"]):
            rows.wipe(cells)

    def zero(self) -> None:
        """Set every byte to zero."""
        self._api.ggml_backend_buffer_clear(self._buffer, 0)

    def close(self) -> None:
        """Free the buffer; closing twice is fine."""
        if self._context is None:
            return
        self._rows = {"k": [], "v": []}
        self._api.ggml_backend_buffer_free(self._buffer)
        self._api.ggml_free(self._context)
        self._context = self._buffer = None

    def __del__(self) -> None:
        self.close()


def _check_types(spec: CacheSpec) -> None:
    for i, layer in enumerate(spec.layers):
        _check_width("type_k", spec.type_k, layer.head_dim_k, i)
        _check_width("type_v", spec.type_v, layer.head_dim_v, i)
    if spec.v_trans and spec.type_v.is_quantized:
        raise OptionError(
            f"type_v={spec.type_v.label}: quantised V needs flash_attn=True, "
            "since blocks cannot be cut across cells"
        )
    if spec.v_trans and len({layer.n_embd_v for layer in spec.layers}) > 1:
        raise OptionError("flash_attn=False: V rows of layers differ in size; use flash_attn=True")


def _check_width(option: str, kind: KVType, head_dim: int, layer: int) -> None:
    if head_dim % kind.block_size:
        raise OptionError(
            f"{option}={kind.label}: heads of layer {layer} have {head_dim} values, which is not "
            f"a multiple of the block of {kind.block_size}; use f16"
        )
