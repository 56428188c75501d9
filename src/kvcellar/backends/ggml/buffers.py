"""The tensors of K and V, and the memory they lie in: one allocation a buffer type.

A layer's tensors lie in the buffer type of the device that runs it, or in the host's if K and V
are not offloaded (:func:`layer_buffer_types`). ggml's prebuilt libraries know one such type, the
host's memory; what is done with several is the same.

K is stored a row a cell. V is too with flash attention, else it is transposed (a row a channel), so
that weights x V is a plain product. Both give the same bytes for the same cells.

1. Buffers are zero, so that padding never holds a NaN. They take no room until they are written:
   a context for long texts costs what is in it.
2. If an allocation fails, those before it are freed, and the error names buffer and bytes.
3. Sizes are logged.
4. Whatever interrupts the making of buffers, they are freed with the last reference.

After each graph the rows that it wrote are looked at (:meth:`KVBuffers.all_finite`). Layers of one
shape lie equally far apart, so all of them are one array: a look costs as much as for one layer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvcellar.backends.base import Part
from kvcellar.backends.ggml.binding import Owned, array_at, tensor_at
from kvcellar.backends.ggml.library import load
from kvcellar.backends.memory import ZeroedMemory, check_available
from kvcellar.errors import AllocationError, NotSupported, OptionError
from kvcellar.types import AnyArray, ByteArray, CacheSpec, Int64Array, KVType, all_finite

BUFFER = "the K/V buffer"
_MIB = 2**20
_log = logging.getLogger(__name__)


class KVBuffers:
    """K and V of all layers for ``spec.size`` cells.

    Attributes:
        k: address of each layer's K tensor, ``[size, n_embd_k]``.
        v: address of each layer's V tensor, ``[size, n_embd_v]`` or ``[n_embd_v, size]``; 0 where
            V is part of K.
        rows: access to the rows of both by cell, for each layer.
        buffers: where they lie, one a buffer type.

    Raises:
        AllocationError: a buffer cannot be had; nothing is left behind.
    """

    def __init__(self, spec: CacheSpec, types: Sequence[BufferType]) -> None:
        self._contexts: list[Owned] = []
        self.buffers: list[Buffer] = []
        for kind in types:
            if not kind.is_host:
                raise NotSupported(f"K and V in {kind.name} memory: rows are reached by address")
        check_available(BUFFER, spec.n_bytes)
        self._spec = spec
        self._api = load().api
        self.k = [0] * len(spec.layers)
        self.v = [0] * len(spec.layers)
        try:
            for kind in dict.fromkeys(types):
                self._allocate(kind, [i for i, other in enumerate(types) if other == kind])
        except BaseException:
            self.close()
            raise
        self.rows: dict[Part, list[RowMajor | ChannelMajor]] = {
            "k": [self._rows(tensor) for tensor in self.k],
            "v": [self._rows(tensor, transposed=spec.v_trans) for tensor in self.v],
        }
        self._stacks = stacked([*self._numbers(self.k, spec.type_k), *self._numbers_of_v()])

    def all_finite(self, cells: Int64Array) -> bool:
        """Whether K and V of cells are finite in every layer; see ``types.all_finite``."""
        first, n = int(cells[0]), len(cells)
        is_run = n == 1 or (
            int(cells[-1]) - first == n - 1 and bool((cells[1:] > cells[:-1]).all())
        )
        which = slice(first, first + n) if is_run else cells
        return all(all_finite(bits[:, which], kind) for kind, bits in self._stacks)

    def zero(self) -> None:
        """Set every byte to zero."""
        for buffer in self.buffers:
            buffer.zero()

    def close(self) -> None:
        """Free the buffers; closing twice is fine."""
        self.rows = {"k": [], "v": []}
        self._stacks = []
        while self.buffers:
            self.buffers.pop().close()
        while self._contexts:
            self._contexts.pop().close()

    def _rows(self, tensor: int, *, transposed: bool = False) -> RowMajor | ChannelMajor:
        if tensor == 0:  # V is part of K: rows of no bytes
            return RowMajor(np.empty((self._spec.size, 0), np.uint8))
        struct = tensor_at(tensor)
        if transposed:
            dtype = np.dtype(f"u{struct.nb[0]}")
            return ChannelMajor(array_at(struct.data, dtype, (struct.ne[1], struct.ne[0])))
        return RowMajor(array_at(struct.data, np.uint8, (struct.ne[1], struct.nb[1])))

    def _numbers_of_v(self) -> list[tuple[KVType, AnyArray]]:
        found = self._numbers(self.v, self._spec.type_v)
        return [(kind, bits.T) for kind, bits in found] if self._spec.v_trans else found

    def _numbers(self, tensors: list[int], kind: KVType) -> list[tuple[KVType, AnyArray]]:
        """The bits of values or scales, cell by cell, as views of the buffers."""
        found = []
        for tensor in filter(None, tensors):
            struct = tensor_at(tensor)
            rows = array_at(struct.data, np.uint8, (struct.ne[1], struct.nb[1]))
            found.append((kind, kind.numbers(rows)))
        return found

    def _allocate(self, kind: BufferType, layers: list[int]) -> None:
        spec = self._spec
        n_k = sum(spec.k_bytes(i) for i in layers)
        n_v = sum(spec.v_bytes(i) for i in layers)
        buffer = kind.allocate(self._declare(layers))
        if buffer is None:
            raise AllocationError(f"{BUFFER} in {kind.name} memory", n_k + n_v)
        self.buffers.append(buffer)
        _log.info(
            "%s K/V buffer: %.2f MiB for %d layers of %d cells, K (%s) %.2f MiB, V (%s) %.2f MiB",
            *(kind.name, (n_k + n_v) / _MIB, len(layers), spec.size),
            *(spec.type_k.label, n_k / _MIB, spec.type_v.label, n_v / _MIB),
        )

    def _declare(self, layers: list[int]) -> int:
        api, spec = self._api, self._spec
        size = (2 * len(layers) + 1) * api.ggml_tensor_overhead()
        made = api.context(BUFFER, size)
        self._contexts.append(made)
        context = made.address
        for i in layers:
            layer = spec.layers[i]
            k = api.ggml_new_tensor_2d(context, spec.type_k.ggml_id, layer.n_embd_k, spec.size)
            api.ggml_set_name(k, f"cache_k_l{i}".encode())
            self.k[i] = k
            if layer.v_offset is not None:
                continue
            transposed = (spec.size, layer.n_embd_v)
            ne = transposed if spec.v_trans else transposed[::-1]
            v = api.ggml_new_tensor_2d(context, spec.type_v.ggml_id, *ne)
            api.ggml_set_name(v, f"cache_v_l{i}".encode())
            self.v[i] = v
        return context


def stacked(views: Sequence[tuple[KVType, AnyArray]]) -> list[tuple[KVType, AnyArray]]:
    """Make one array of views that are alike and equally far apart, with an axis more in front.

    Any views fit into some arrays; in the worst case each is one by itself.
    """
    alike: dict[tuple[KVType, object, object], list[AnyArray]] = {}
    for kind, view in views:
        alike.setdefault((kind, view.shape, view.strides), []).append(view)
    found = []
    for (kind, *_), members in alike.items():
        members.sort(key=lambda view: view.ctypes.data)
        while members:
            at = [view.ctypes.data for view in members]
            step = at[1] - at[0] if len(at) > 1 else 0
            n = next((i for i in range(1, len(at)) if at[i] - at[i - 1] != step), len(at))
            first = members[0]
            shape, strides = (n, *first.shape), (step, *first.strides)
            found.append((kind, as_strided(first, shape, strides, writeable=False)))
            del members[:n]
    return found


class RowMajor:
    """Rows ``[size, row_bytes]``: a row a cell, read and written as raw bytes."""

    def __init__(self, rows: ByteArray) -> None:
        self._rows = rows

    def get(self, cells: Int64Array) -> ByteArray:
        """A copy of the rows of cells, ``[n, row_bytes]``."""
        return self._rows[cells]

    def put(self, cells: Int64Array, rows: ByteArray) -> None:
        """Overwrite the rows of cells."""
        self._rows[cells] = rows

    def wipe(self, cells: Int64Array) -> None:
        """Zero the rows of cells."""
        self._rows[cells] = 0


class ChannelMajor:
    """As :class:`RowMajor` over values ``[width, size]``: a row a channel, a column a cell."""

    def __init__(self, values: AnyArray) -> None:  # unsigned integers of the size of a value
        self._values = values

    def get(self, cells: Int64Array) -> ByteArray:
        """A copy of the rows of cells, ``[n, row_bytes]``."""
        return np.ascontiguousarray(self._values[:, cells].T).view(np.uint8)

    def put(self, cells: Int64Array, rows: ByteArray) -> None:
        """Overwrite the rows of cells."""
        self._values[:, cells] = np.ascontiguousarray(rows).view(self._values.dtype).T

    def wipe(self, cells: Int64Array) -> None:
        """Zero the rows of cells."""
        self._values[:, cells] = 0


def layer_buffer_types(
    n_layers: int,
    devices: Sequence[BufferType] = (),
    *,
    offload: bool = True,
    host: BufferType | None = None,
) -> tuple[BufferType, ...]:
    """Choose the buffer type of each layer's K and V.

    Args:
        n_layers: how many layers there are.
        devices: the buffer type of the device that runs each layer; none: all run on the host.
        offload: whether K and V lie with the device that runs the layer, or stay with the host.
        host: the host's buffer type.
    """
    host = HostBufferType() if host is None else host
    if devices and len(devices) != n_layers:
        raise OptionError(f"devices: {len(devices)} for {n_layers} layers; give one a layer")
    return tuple(devices) if devices and offload else (host,) * n_layers


class BufferType(Protocol):
    """A kind of memory that ggml can allocate."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def is_host(self) -> bool:
        """Whether the host can read and write it at an address."""

    def allocate(self, context: int) -> Buffer | None:
        """Allocate zeros for all tensors of a ggml context; None if there is no memory."""


class HostBufferType:
    """Ordinary memory, which the system gives when it is first written."""

    name = "CPU"
    is_host = True

    def allocate(self, context: int) -> Buffer | None:
        """A buffer for all tensors of a context, one behind the other."""
        api = load().api
        unit: int = api.ggml_backend_buft_get_alignment(api.ggml_backend_cpu_buffer_type())
        tensors, ends = [], [0]
        tensor = api.ggml_get_first_tensor(context)
        while tensor:
            tensors.append(tensor)
            ends.append(ends[-1] + -(-api.ggml_nbytes(tensor) // unit) * unit)
            tensor = api.ggml_get_next_tensor(context, tensor)
        try:
            memory = ZeroedMemory(ends[-1])
        except MemoryError:
            return None
        handle = api.make("ggml_backend_cpu_buffer_from_ptr", memory.address, memory.n_bytes)
        for tensor, start in zip(tensors, ends, strict=False):
            api.ggml_backend_tensor_alloc(handle, tensor, memory.address + start)
        return Buffer(handle, memory)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of ggml, and the memory it lies in if ggml does not own that."""

    handle: Owned
    memory: ZeroedMemory | None = None

    def zero(self) -> None:
        """Set every byte to zero."""
        if self.memory is None:
            load().api.ggml_backend_buffer_clear(self.handle, 0)
        else:
            self.memory.zero()

    def close(self) -> None:
        """Free both."""
        self.handle.close()
        if self.memory is not None:
            self.memory.close()
