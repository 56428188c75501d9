"""Running a model's forward pass over a memory, by graphs that are built once a shape and kept.

A graph depends on the plan's shape alone: how many tokens, sequences, cells looked at, and outputs.
All graphs of an executor share one compute buffer; when a larger shape makes it move, the smaller
graphs are dropped, since their tensors point into the old one. Likewise when a store is resized.
"""

from __future__ import annotations

import ctypes as c
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvcellar.backends.base import GraphTimes
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.binding import InitParams, array_at, tensor_at
from kvcellar.backends.ggml.inputs import Feeds, Inputs, Shape, view_of
from kvcellar.backends.ggml.model_memory import GgmlMemory
from kvcellar.backends.ggml.nodes import Constants, Nodes
from kvcellar.backends.ggml.ops import GgmlOps
from kvcellar.backends.ggml.profile import GraphProfiler
from kvcellar.backends.memory import check_available
from kvcellar.backends.operations import Forward
from kvcellar.errors import AllocationError, ClosedError, ComputeError
from kvcellar.plan import Plan
from kvcellar.types import Float32Array, Int64Array

MAX_GRAPHS = 8
_BUFFER = "the compute buffer"
NODES_PER_LAYER = 320
"""A layer that attends, scans and mixes 32 experts with all their biases takes fewer."""


class GgmlExecutor:
    """Runs a model's forward pass over a memory. Implements ``Executor``.

    Attributes:
        takes_lists: for each group, whether its plans are better given with lists than with masks.
    """

    def __init__(self, backend: GgmlBackend, memory: GgmlMemory, forward: Forward[int]) -> None:
        self._backend = backend
        self._compute = backend.compute
        self._memory = memory
        self._kernels = memory.kernels
        self.takes_lists = tuple(kernel is not None for kernel in memory.kernels)
        self._cache = GraphCache(backend, memory, forward)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the compute buffer."""
        return self._cache.buffer_bytes

    def run(self, plan: Plan) -> Float32Array:
        """Compute a plan; see ``Executor.run``."""
        graph = self._cache.get(plan)
        graph.feeds.load(plan)
        for kernel, group in zip(self._kernels, plan.groups, strict=True):
            if kernel is not None and group.lists is not None:
                kernel.load(group.lists)
        self._compute(graph.graph)
        self._check(graph, plan)
        return graph.logits

    def _check(self, graph: Graph, plan: Plan) -> None:
        """Raise ComputeError unless all that a graph wrote is finite; names the first layer."""
        pairs = list(zip(self._memory.groups, plan.groups, strict=True))
        if not all(store.all_finite(group.cells) for store, group in pairs):
            for place in self._memory.places:
                if place.group >= 0:
                    store, group = pairs[place.group]
                    store.check_layer(place.index, group.cells)
        if not graph.is_sound():
            raise ComputeError("an activation or a state is not finite: the weights are damaged")

    def watch(self, watcher: Callable[[GraphTimes], None]) -> None:
        """Tell a watcher about every graph; see ``Executor.watch``."""
        self._compute = GraphProfiler(self._backend, watcher).compute

    def invalidate(self) -> None:
        """Drop every graph; a resized store makes that happen by itself."""
        self._cache.invalidate()

    def close(self) -> None:
        """Free graphs and buffer; closing twice is fine."""
        self._cache.close()


class GraphCache:
    """The most recently used graphs of one model over one memory."""

    _allocator: int | None = None

    def __init__(self, backend: GgmlBackend, memory: GgmlMemory, forward: Forward[int]) -> None:
        self._api = backend.api
        self._memory = memory
        self._forward = forward
        self._graphs: OrderedDict[Shape, Graph] = OrderedDict()
        self._generations = [store.generation for store in memory.groups]
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
            ClosedError: there is none any more.
        """
        if self._allocator is None:
            raise ClosedError(f"{_BUFFER} is closed with its context")
        if self._generations != [store.generation for store in self._memory.groups]:
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
        """Drop every graph: the tensors of a store have moved."""
        self._drop_all()
        self._generations = [store.generation for store in self._memory.groups]

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
        n_nodes = NODES_PER_LAYER * (len(self._memory.places) + 1)
        size = 2 * n_nodes * api.ggml_tensor_overhead()
        size += api.ggml_graph_overhead_custom(n_nodes, False)
        context = api.ggml_init(InitParams(size, None, True))
        try:
            return self._fill(context, n_nodes, plan, shape)
        except BaseException:
            api.ggml_free(context)
            raise

    def _fill(self, context: int, n_nodes: int, plan: Plan, shape: Shape) -> Graph:
        api, specs = self._api, self._memory.specs
        graph = api.ggml_new_graph_custom(context, n_nodes, False)
        nodes = Nodes(api, context, graph, self._constants)
        inputs = Inputs.declare(nodes, shape, specs)
        ops = GgmlOps(nodes, inputs, self._memory, plan)
        logits = self._forward(ops)
        if shape.n_outputs:
            api.ggml_set_output(logits)
            api.ggml_build_forward_expand(graph, logits)
        self._allocate(graph)
        view = view_of(logits, 2) if shape.n_outputs else None
        empty = np.empty((0, 0), np.float32)
        feeds = Feeds(inputs, specs, ops.n_positions)
        return Graph(context, graph, feeds, empty if view is None else view, _scalars(nodes.sums))

    def _allocate(self, graph: int) -> None:
        """Allocate a graph; a buffer that has to grow moves, and the other graphs are dropped."""
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


@dataclass(frozen=True, slots=True)
class Graph:
    """A built and allocated graph, with NumPy views of its inputs, its logits and its sums."""

    context: int
    graph: int
    feeds: Feeds
    logits: Float32Array
    sums: tuple[Float32Array, Int64Array]

    def is_sound(self) -> bool:
        """Whether everything was finite that the graph has a sum of; see :meth:`Nodes.watch`."""
        memory, which = self.sums
        return bool(np.isfinite(memory[which]).all())


def _scalars(tensors: list[int]) -> tuple[Float32Array, Int64Array]:
    """The memory from the first of some f32 scalars to the last, and where in it each lies."""
    at = np.array([tensor_at(tensor).data for tensor in tensors], np.int64)
    if not len(at):
        return np.empty(0, np.float32), at
    which: Int64Array = (at - at.min()) // 4
    return array_at(int(at.min()), np.float32, (int(which.max()) + 1,)), which
