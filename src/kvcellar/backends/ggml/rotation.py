"""Moving K rows to another position: out of the cache as f32, rotated, and back to bytes.

The rotation is pure: YaRN's magnitude, which the key got when it was computed, is divided out, so
that ten shifts of one are one shift of ten. Values that would overflow the type of K become the
largest that it holds: a row that is infinite would reach all sequences (invariant 8). Cells are
taken in pieces to bound the memory.

Rows are rotated beside the cache and not in it, so that nothing has changed until somebody writes
them there: who was interrupted while writing can write them again, but could not rotate them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log

import numpy as np

from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.binding import TYPE_I32, TYPE_I64, array_at, tensor_at
from kvcellar.backends.ggml.nodes import Constants, Nodes
from kvcellar.backends.memory import check_room
from kvcellar.errors import AllocationError
from kvcellar.types import AnyArray, ByteArray, CacheSpec, Int32Array, Int64Array, RopeSpec

PIECE = 512
_NODES_PER_LAYER = 16
_BUFFER = "rotating K rows"


class Rotation:
    """Rotates rows of some layers; memory for all of it is there once it is made.

    Args:
        backend: what computes.
        spec: the shape of the cache.
        tensors: the address of each layer's K.
        layers: whose rows; all of them have RoPE.
        n: how many rows.

    Raises:
        AllocationError: the work buffers cannot be had.
    """

    def __init__(
        self,
        backend: GgmlBackend,
        spec: CacheSpec,
        tensors: Sequence[int],
        layers: Sequence[int],
        n: int,
    ) -> None:
        self._pieces = [slice(i, min(i + PIECE, n)) for i in range(0, n, PIECE)]
        sizes = {piece.stop - piece.start for piece in self._pieces} if layers else set()
        self._graphs = {size: RotationGraph(backend, spec, tensors, layers, size) for size in sizes}

    def run(self, cells: Int64Array, shifts: Int32Array) -> Iterator[tuple[slice, int, ByteArray]]:
        """For each piece of the cells and each layer: the rotated rows, good until the next piece.

        They are bytes as the cache stores them, ``[piece, row_bytes]``.
        """
        for piece in self._pieces:
            for layer, rows in self._graphs[piece.stop - piece.start].run(
                cells[piece], shifts[piece]
            ):
                yield piece, layer, rows


def magnitude_inverse(rope: RopeSpec) -> float:
    """What ``attn_factor`` must be for ggml to rotate without scaling."""
    if rope.ext_factor == 0.0:
        return 1.0
    return 1.0 / (1.0 + 0.1 * log(1.0 / rope.freq_scale))


class RotationGraph:
    """Rotates n K rows of some layers; built once, run for each piece of that size."""

    def __init__(
        self,
        backend: GgmlBackend,
        spec: CacheSpec,
        tensors: Sequence[int],
        layers: Sequence[int],
        n: int,
    ) -> None:
        self._n = n
        self._backend = backend
        self._api = api = backend.api
        n_nodes = _NODES_PER_LAYER * (len(layers) + 1)
        size = 2 * n_nodes * api.ggml_tensor_overhead()
        size += api.ggml_graph_overhead_custom(n_nodes, False)
        self._context = api.context(_BUFFER, size)
        self._allocator = api.make("ggml_gallocr_new", api.ggml_backend_cpu_buffer_type())
        self._constants = Constants(api)
        self._graph: int = api.ggml_new_graph_custom(self._context, n_nodes, False)
        self._nodes = Nodes(api, self._context.address, self._graph, self._constants)
        self._cells = self._input(TYPE_I64)
        self._rows = self._input(TYPE_I32)
        self._shifts = self._input(TYPE_I32)
        try:
            self._rotated = {i: self._add_layer(spec, i, tensors[i]) for i in layers}
            n_bytes = n * sum(4 * spec.layers[i].n_embd_k for i in layers)
            check_room(_BUFFER, 2 * n_bytes)
            if not api.ggml_gallocr_alloc_graph(self._allocator, self._graph):
                raise AllocationError(_BUFFER, n_bytes)
        except BaseException:
            self.close()
            raise

    def run(self, cells: Int64Array, shifts: Int32Array) -> Iterator[tuple[int, ByteArray]]:
        """Each layer and the rotated rows of n of its cells, ``[n, row_bytes]``."""
        self._view(self._cells, np.int64)[:] = np.arange(self._n)
        self._view(self._rows, np.int32)[:] = cells
        self._view(self._shifts, np.int32)[:] = shifts
        self._backend.compute(self._graph, keep=self)
        for layer, tensor in self._rotated.items():
            struct = tensor_at(tensor)
            yield layer, array_at(struct.data, np.uint8, (self._n, struct.nb[1]))

    def close(self) -> None:
        """Free it now, though there may be a traceback that refers to it."""
        self._constants.close()
        self._allocator.close()
        self._context.close()

    def _add_layer(self, spec: CacheSpec, i: int, tensor: int) -> int:
        """A tensor of rotated rows, of the cache's type."""
        layer, nodes, mixed = spec.layers[i], self._nodes, spec.hadamard_k(i)
        assert layer.rope is not None, "asked for by the caller"
        rows = nodes.get_rows(tensor, self._rows)
        heads = nodes.reshape_3d(rows, layer.head_dim_k, layer.n_head_kv, self._n)
        pure = magnitude_inverse(layer.rope)
        rotated = nodes.rope(nodes.mix(heads, mixed), self._shifts, layer.rope, pure)
        largest = spec.type_k.largest
        flat = nodes.clamp(nodes.flat(nodes.mix(rotated, mixed)), -largest, largest)
        out = nodes.new_tensor_2d(tensor_at(tensor).type, layer.n_embd_k, self._n)
        self._api.ggml_set_output(out)  # nothing else may use its memory
        nodes.run_first(nodes.set_rows(out, flat, self._cells))
        return out

    def _input(self, kind: int) -> int:
        tensor = self._nodes.new_tensor_1d(kind, self._n)
        self._api.ggml_set_input(tensor)
        return tensor

    def _view(self, tensor: int, dtype: type[np.generic]) -> AnyArray:
        return array_at(tensor_at(tensor).data, dtype, (self._n,))
