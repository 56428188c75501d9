"""Graphs that are built once a shape, kept, and run again with other inputs.

A graph depends on the plan's shape alone: how many tokens, cells looked at, and outputs. All
graphs of an executor share one compute buffer; when a larger shape makes it move, the smaller
graphs are dropped, since their tensors point into the old one. Likewise when a store is resized.
"""

from __future__ import annotations

import ctypes as c
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.binding import (
    TYPE_F16,
    TYPE_F32,
    TYPE_I32,
    TYPE_I64,
    InitParams,
)
from kvcellar.backends.ggml.constants import Constants
from kvcellar.backends.ggml.inputs import Inputs, Target
from kvcellar.backends.ggml.kernel.attention import AttentionKernel
from kvcellar.backends.ggml.memory import array_at
from kvcellar.backends.ggml.ops import GgmlOps
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.backends.ggml.weights import tensor_at
from kvcellar.backends.memory import check_available
from kvcellar.backends.operations import Forward
from kvcellar.errors import AllocationError
from kvcellar.plan import Plan
from kvcellar.types import AnyArray, Float32Array

MAX_GRAPHS = 8
_BUFFER = "the compute buffer"
NODES_PER_LAYER = 160  # a layer with all its biases takes 55, each of 32 experts 2 more


class Shape(NamedTuple):
    """What a graph depends on; the key it is kept under."""

    n_tokens: int
    n_kv: int
    n_outputs: int
    n_embd: int  # width of input embeddings, 0 when tokens are given

    @classmethod
    def of(cls, plan: Plan) -> Shape:
        """The shape of a plan."""
        micro = plan.micro
        n_embd = 0 if micro.embeddings is None else micro.embeddings.shape[1]
        return cls(plan.n_tokens, plan.n_kv, len(micro.outputs), n_embd)


@dataclass(frozen=True, slots=True)
class Graph:
    """A built and allocated graph, with NumPy views of its inputs and its logits."""

    context: int
    graph: int
    tokens: AnyArray | None
    embeddings: AnyArray | None
    positions: AnyArray
    cells: AnyArray
    channels: AnyArray | None
    mask: AnyArray | None
    outputs: AnyArray | None
    logits: Float32Array
    starts: AnyArray  # where each channel of V begins when V lies across

    def load(self, plan: Plan) -> None:
        """Write a plan of this graph's shape into its inputs."""
        micro = plan.micro
        if self.tokens is not None:
            self.tokens[:] = micro.tokens
        if self.embeddings is not None:
            self.embeddings[:] = micro.embeddings
        self.positions[:] = micro.positions
        self.cells[:] = plan.cells
        if self.channels is not None:
            np.add.outer(plan.cells, self.starts, out=self.channels.reshape(plan.n_tokens, -1))
        if self.mask is not None:
            self.mask[:] = plan.mask
        if self.outputs is not None:
            self.outputs[:] = micro.outputs


class GraphCache:
    """The most recently used graphs of one model over one store."""

    _allocator: int | None = None

    def __init__(
        self,
        backend: GgmlBackend,
        store: GgmlStore,
        forward: Forward[int],
        kernel: AttentionKernel | None = None,
    ) -> None:
        self._api = backend.api
        self._store = store
        self._kernel = kernel
        self._forward = forward
        self._graphs: OrderedDict[Shape, Graph] = OrderedDict()
        self._generation = store.generation
        kind = self._api.ggml_backend_cpu_buffer_type()
        self._constants = Constants(self._api)
        self._allocator = self._api.ggml_gallocr_new(kind)
        self._n_bytes = 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the compute buffer."""
        return self._n_bytes

    def get(self, plan: Plan) -> Graph:
        """The graph for a plan, built if there is none.

        Raises:
            AllocationError: the compute buffer cannot grow.
        """
        if self._generation != self._store.generation:
            self.invalidate()
        shape = Shape.of(plan)
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._build(plan, shape)
            self._graphs[shape] = graph
        self._graphs.move_to_end(shape)
        while len(self._graphs) > MAX_GRAPHS:
            self._free(self._graphs.popitem(last=False)[1])
        return graph

    def invalidate(self) -> None:
        """Drop every graph: the store's tensors have moved."""
        self._drop_all()
        self._generation = self._store.generation

    def close(self) -> None:
        """Free graphs and buffer; closing twice is fine."""
        if self._allocator is None:
            return
        self._drop_all()
        self._constants.close()
        self._api.ggml_gallocr_free(self._allocator)
        self._allocator = None
        self._n_bytes = 0

    def __del__(self) -> None:
        self.close()

    def _reset(self) -> None:
        self._api.ggml_gallocr_free(self._allocator)
        kind = self._api.ggml_backend_cpu_buffer_type()
        self._allocator = self._api.ggml_gallocr_new(kind)
        self._n_bytes = 0

    def _drop_all(self) -> None:
        while self._graphs:
            self._free(self._graphs.popitem()[1])

    def _free(self, graph: Graph) -> None:
        self._api.ggml_free(graph.context)

    def _build(self, plan: Plan, shape: Shape) -> Graph:
        api = self._api
        n_nodes = NODES_PER_LAYER * (len(self._store.spec.layers) + 1)
        size = 2 * n_nodes * api.ggml_tensor_overhead()
        size += api.ggml_graph_overhead_custom(n_nodes, False)
        context = api.ggml_init(InitParams(size, None, True))
        try:
            return self._fill(context, n_nodes, plan, shape)
        except BaseException:
            api.ggml_free(context)
            raise

    def _fill(self, context: int, n_nodes: int, plan: Plan, shape: Shape) -> Graph:
        api = self._api
        inputs = self._declare_inputs(context, shape)
        graph = api.ggml_new_graph_custom(context, n_nodes, False)
        target = Target(api, context, graph)
        kernel = None if plan.lists is None else self._kernel
        ops = GgmlOps(target, inputs, self._store, self._constants, plan, kernel)
        logits = self._forward(ops)
        if shape.n_outputs:
            api.ggml_set_output(logits)
            api.ggml_build_forward_expand(graph, logits)
        self._allocate(graph)
        return Graph(
            context=context,
            graph=graph,
            tokens=_view_or_none(inputs.tokens, 1),
            embeddings=_view_or_none(inputs.embeddings, 2),
            positions=_view(inputs.positions, 1),
            cells=_view(inputs.cells, 1),
            channels=_view_or_none(inputs.channels, 1),
            mask=_view_or_none(inputs.mask, 2),
            outputs=_view_or_none(inputs.outputs, 1),
            logits=_view(logits, 2) if shape.n_outputs else np.empty((0, 0), dtype=np.float32),
            starts=np.arange(self._width_across(), dtype=np.int64) * self._store.spec.size,
        )

    def _width_across(self) -> int:
        """Values of V a cell when V lies across, else 0."""
        spec = self._store.spec
        return spec.layers[0].n_embd_v if spec.v_trans else 0

    def _declare_inputs(self, context: int, shape: Shape) -> Inputs:
        api, n = self._api, shape.n_tokens
        partial, width = 0 < shape.n_outputs < n, self._width_across()

        def declare(kind: int, *ne: int) -> int:
            make: Callable[..., int] = getattr(api, f"ggml_new_tensor_{len(ne)}d")
            tensor = make(context, kind, *ne)
            api.ggml_set_input(tensor)
            return tensor

        return Inputs(
            tokens=None if shape.n_embd else declare(TYPE_I32, n),
            embeddings=declare(TYPE_F32, shape.n_embd, n) if shape.n_embd else None,
            positions=declare(TYPE_I32, n),
            cells=declare(TYPE_I64, n),
            channels=declare(TYPE_I64, n * width) if width else None,
            mask=declare(TYPE_F16, shape.n_kv, n) if shape.n_kv else None,
            outputs=declare(TYPE_I32, shape.n_outputs) if partial else None,
        )

    def _allocate(self, graph: int) -> None:
        """Give a graph its memory; a buffer that has to grow moves, and drops the other graphs."""
        needed = c.c_size_t()
        self._api.ggml_gallocr_reserve_n_size(self._allocator, graph, None, None, c.byref(needed))
        if needed.value > self._n_bytes:
            self._drop_all()
            self._grow(graph, needed.value)
        self._api.ggml_gallocr_alloc_graph(self._allocator, graph)

    def _grow(self, graph: int, n_bytes: int) -> None:
        try:
            check_available(_BUFFER, n_bytes)
            if not self._api.ggml_gallocr_reserve(self._allocator, graph):
                raise AllocationError(_BUFFER, n_bytes)
        except AllocationError:
            self._reset()  # the old buffer is gone, and ggml would not notice
            raise
        self._n_bytes = n_bytes


_DTYPES = {TYPE_F32: np.float32, TYPE_F16: np.float16, TYPE_I32: np.int32, TYPE_I64: np.int64}


def _view(tensor: int, n_dims: int) -> AnyArray:
    struct = tensor_at(tensor)
    return array_at(struct.data, _DTYPES[struct.type], tuple(reversed(struct.ne[:n_dims])))


def _view_or_none(tensor: int | None, n_dims: int) -> AnyArray | None:
    return None if tensor is None else _view(tensor, n_dims)
