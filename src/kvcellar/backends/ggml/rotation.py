"""Moving K rows to another position: out of the cache as f32, rotated, and back.

The rotation is pure: YaRN's magnitude, which the key got when it was computed, is divided out, so
that ten shifts of one are one shift of ten. Values that would overflow the type of K become the
largest that it holds: a row that is infinite would reach all sequences (invariant 8). Cells are
taken in pieces to bound the memory.
"""

from __future__ import annotations

from math import log

import numpy as np

from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.binding import TYPE_I32, TYPE_I64, InitParams, array_at, tensor_at
from kvcellar.backends.ggml.nodes import Constants, Nodes
from kvcellar.errors import AllocationError
from kvcellar.types import AnyArray, CacheSpec, Int32Array, Int64Array, RopeSpec

PIECE = 512
_NODES_PER_LAYER = 16


def rotate_rows(
    backend: GgmlBackend,
    spec: CacheSpec,
    tensors: list[int],
    cells: Int64Array,
    shifts: Int32Array,
) -> None:
    """Rotate each K row of cells by its shift, in every layer with RoPE.

    Raises:
        AllocationError: the work buffer cannot be had; nothing was rotated.
    """
    pieces = [slice(i, min(i + PIECE, len(cells))) for i in range(0, len(cells), PIECE)]
    sizes = {piece.stop - piece.start for piece in pieces}
    graphs: dict[int, RotationGraph] = {}
    try:
        for n in sizes:  # all of them before any row is touched
            graphs[n] = RotationGraph(backend, spec, tensors, n)
        for piece in pieces:
            graphs[piece.stop - piece.start].run(cells[piece], shifts[piece])
    finally:
        for graph in graphs.values():
            graph.close()


def magnitude_inverse(rope: RopeSpec) -> float:
    """What ``attn_factor`` must be for ggml to rotate without scaling."""
    if rope.ext_factor == 0.0:
        return 1.0
    return 1.0 / (1.0 + 0.1 * log(1.0 / rope.freq_scale))


class RotationGraph:
    """Rotates n K rows of every layer; built once, run for each piece of that size."""

    def __init__(self, backend: GgmlBackend, spec: CacheSpec, tensors: list[int], n: int) -> None:
        self.n = n
        self._backend = backend
        self._api = backend.api
        n_nodes = _NODES_PER_LAYER * (len(tensors) + 1)
        size = 2 * n_nodes * self._api.ggml_tensor_overhead()
        size += self._api.ggml_graph_overhead_custom(n_nodes, False)
        self._context = self._api.ggml_init(InitParams(size, None, True))
        kind = self._api.ggml_backend_cpu_buffer_type()
        self._allocator = self._api.ggml_gallocr_new(kind)
        self._constants = Constants(self._api)
        self._graph = self._api.ggml_new_graph_custom(self._context, n_nodes, False)
        self._nodes = Nodes(self._api, self._context, self._graph, self._constants)
        self._cells = self._input(TYPE_I64, n)
        self._rows = self._input(TYPE_I32, n)
        self._shifts = self._input(TYPE_I32, n)
        try:
            for i, tensor in enumerate(tensors):
                self._add_layer(spec, i, tensor)
            if not self._api.ggml_gallocr_alloc_graph(self._allocator, self._graph):
                raise AllocationError("rotating K rows", n * spec.layers[0].n_embd_k * 4)
        except BaseException:
            self.close()
            raise

    def run(self, cells: Int64Array, shifts: Int32Array) -> None:
        """Rotate the rows of n cells."""
        if not self._shifted_anything:
            return
        _view(self._cells, (self.n,), np.int64)[:] = cells
        _view(self._rows, (self.n,), np.int32)[:] = cells
        _view(self._shifts, (self.n,), np.int32)[:] = shifts
        self._backend.compute(self._graph)

    def close(self) -> None:
        """Free the graph."""
        self._constants.close()
        self._api.ggml_gallocr_free(self._allocator)
        self._api.ggml_free(self._context)

    @property
    def _shifted_anything(self) -> bool:
        return bool(self._api.ggml_graph_n_nodes(self._graph))

    def _add_layer(self, spec: CacheSpec, i: int, tensor: int) -> None:
        layer = spec.layers[i]
        if layer.rope is None:
            return
        nodes, mixed = self._nodes, spec.hadamard_k(i)
        rows = nodes.get_rows(tensor, self._rows)
        heads = nodes.reshape_3d(rows, layer.head_dim_k, layer.n_head_kv, self.n)
        pure = magnitude_inverse(layer.rope)
        rotated = nodes.rope(nodes.mix(heads, mixed), self._shifts, layer.rope, pure)
        largest = spec.type_k.largest
        flat = nodes.clamp(nodes.flat(nodes.mix(rotated, mixed)), -largest, largest)
        nodes.run_first(nodes.set_rows(tensor, flat, self._cells))

    def _input(self, kind: int, n: int) -> int:
        tensor = self._nodes.new_tensor_1d(kind, n)
        self._api.ggml_set_input(tensor)
        return tensor


def _view(tensor: int, shape: tuple[int, ...], dtype: type[np.generic]) -> AnyArray:
    return array_at(tensor_at(tensor).data, dtype, shape)
