"""Running a model's forward pass over a memory, by graphs that are built once a shape and kept.

A graph depends on the plan's shape alone: how many tokens, sequences, cells looked at, and outputs.
All graphs of an executor share one compute buffer; when a larger shape makes it move, the smaller
graphs are dropped, since their tensors point into the old one. Likewise when a store is resized.

An exception may come at any line. So buffer and graphs are one value, a workspace, which nobody
can reach while a graph is added to it: if that does not end, the workspace is gone, and the next
call begins with an empty one. And what a computation leaves behind that did not end (it may even
run on for a moment) is dealt with by the next call, not by code that would have to run before.
"""

from __future__ import annotations

import ctypes as c
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np

from kvcellar.backends.base import GraphTimes
from kvcellar.backends.ggml import pieces
from kvcellar.backends.ggml.aside import Stop
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.binding import Ggml, Owned, array_at, tensor_at
from kvcellar.backends.ggml.inputs import Feeds, Inputs, Shape, view_of
from kvcellar.backends.ggml.jit.compiler import compile_seconds
from kvcellar.backends.ggml.model_memory import GgmlMemory
from kvcellar.backends.ggml.nodes import Constants, Nodes
from kvcellar.backends.ggml.ops import GgmlOps
from kvcellar.backends.ggml.pieces import most_pieces
from kvcellar.backends.ggml.profile import GraphProfiler
from kvcellar.backends.memory import check_available, check_room
from kvcellar.backends.operations import Forward
from kvcellar.errors import AllocationError, ClosedError, ComputeError
from kvcellar.plan import Plan
from kvcellar.types import Float32Array, Int64Array

MAX_GRAPHS = 8
_BUFFER = "the compute buffer"
_PLACE = 2**10
"""Bytes that ggml's allocator takes for a node at most."""
NODES_PER_LAYER = 320
"""A layer that attends, scans and mixes 32 experts with all their biases takes fewer."""
FEW_TOKENS = 16
"""Graphs of more are computed so that exceptions end them early."""
LONG = 0.05
"""Seconds; so are graphs that took longer when they were last computed."""


class Compute(Protocol):
    """See ``GgmlBackend.compute``."""

    def __call__(self, graph: int, *, stop: Stop | None = None, keep: object = None) -> None:
        """Compute a graph."""


class GgmlExecutor:
    """Runs a model's forward pass over a memory. Implements ``Executor``.

    Attributes:
        takes_lists: for each group, whether its plans are better given with lists than with masks.
        compile_seconds: see ``Executor.compile_seconds``.
    """

    def __init__(self, backend: GgmlBackend, memory: GgmlMemory, forward: Forward[int]) -> None:
        self._backend = backend
        self._compute: Compute = backend.compute
        self._memory = memory
        self._kernels = memory.kernels
        self.takes_lists = tuple(kernel is not None for kernel in memory.kernels)
        self._cache = GraphCache(backend, memory, forward)
        self.compile_seconds = 0.0
        self._unfinished = False  # whether a computation began and was not seen to end

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the compute buffer."""
        return self._cache.buffer_bytes

    def run(self, plan: Plan) -> Float32Array:
        """Compute a plan; see ``Executor.run``."""
        if self._unfinished:
            self._recover()
        compiling = compile_seconds()
        graph = self._cache.get(plan)
        self.compile_seconds += compile_seconds() - compiling
        graph.feeds.load(plan)
        is_long = len(plan.micro.positions) > FEW_TOKENS or graph.seconds > LONG
        stop = Stop() if is_long else None
        for kernel, group in zip(self._kernels, plan.groups, strict=True):
            if kernel is not None and group.lists is not None:
                kernel.load(group.lists, stop)
        start = perf_counter()
        self._unfinished = True
        self._compute(graph.graph, stop=stop, keep=self)
        self._unfinished = False
        graph.seconds = perf_counter() - start
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
        self._recover()
        self._cache.invalidate()

    def close(self) -> None:
        """Free graphs and buffer; closing twice is fine."""
        if self._unfinished:
            self._recover()
        self._cache.close()

    def _recover(self) -> None:
        """Wait for what may still compute, and put right what it leaves half counted."""
        self._backend.settle()
        for kernel in self._kernels:
            if kernel is not None:
                kernel.reset()
        self._unfinished = False


class GraphCache:
    """The most recently used graphs of one model over one memory."""

    def __init__(self, backend: GgmlBackend, memory: GgmlMemory, forward: Forward[int]) -> None:
        self._api = backend.api
        self._memory = memory
        self._n_threads = backend.n_threads
        self._forward: Forward[int] | None = forward  # None: closed
        self._constants = Constants(self._api)
        self._space: Workspace | None = None  # None: none yet, or one is being changed

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the compute buffer."""
        return 0 if self._space is None else self._space.n_bytes

    @property
    def shapes(self) -> list[Shape]:
        """Those that there are graphs for, least recently used first."""
        return [] if self._space is None else list(self._space.graphs)

    def get(self, plan: Plan) -> Graph:
        """The graph for a plan, built if there is none.

        Raises:
            AllocationError: the compute buffer cannot grow.
            ClosedError: there is none any more.
        """
        if self._forward is None:
            raise ClosedError(f"{_BUFFER} is closed with its context")
        generations = [store.generation for store in self._memory.groups]
        space, shape = self._space, Shape.of(plan)
        if space is None or space.generations != generations:
            self._space = None
            space = Workspace(self._api, generations)
        graph = space.graphs.get(shape)
        if graph is None:
            self._space = None
            try:
                graph = self._build(space, self._forward, plan, shape)
            except BaseException:
                space.close()  # now, though a traceback refers to it
                raise
            space.add(shape, graph)
        space.graphs.move_to_end(shape)
        self._space = space
        return graph

    def invalidate(self) -> None:
        """Drop every graph: the tensors of a store have moved."""
        space, self._space = self._space, None
        if space is not None:
            space.close()

    def close(self) -> None:
        """Free graphs and buffer; closing twice is fine."""
        self._forward = None
        self.invalidate()
        self._constants.close()

    def _build(self, space: Workspace, forward: Forward[int], plan: Plan, shape: Shape) -> Graph:
        api, specs = self._api, self._memory.specs
        per_layer = NODES_PER_LAYER + pieces.NODES_PER_LAYER * (most_pieces(shape.n_tokens) - 1)
        n_nodes = per_layer * (len(self._memory.places) + 1)
        size = 2 * n_nodes * api.ggml_tensor_overhead()
        size += api.ggml_graph_overhead_custom(n_nodes, False)
        context = api.context("a graph", size)
        graph: int = api.ggml_new_graph_custom(context, n_nodes, False)
        nodes = Nodes(api, context.address, graph, self._constants)
        inputs = Inputs.declare(nodes, shape, specs)
        ops = GgmlOps(nodes, inputs, self._memory, plan, self._n_threads)
        logits = forward(ops)
        if shape.n_outputs:
            api.ggml_set_output(logits)
            api.ggml_build_forward_expand(graph, logits)
        space.allocate(graph)
        view = view_of(logits, 2) if shape.n_outputs else None
        empty = np.empty((0, 0), np.float32)
        feeds = Feeds(inputs, specs, ops.n_positions)
        return Graph(context, graph, feeds, empty if view is None else view, _scalars(nodes.sums))


@dataclass(slots=True)
class Graph:
    """A built and allocated graph, with NumPy views of its inputs, its logits and its sums.

    ``seconds`` is how long it took when it was last computed.
    """

    context: Owned
    graph: int
    feeds: Feeds
    logits: Float32Array
    sums: tuple[Float32Array, Int64Array]
    seconds: float = 0.0

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


class Workspace:
    """A compute buffer and the graphs whose tensors lie in it.

    Attributes:
        generations: of the stores that the graphs write to.
        graphs: by shape, least recently used first.
        n_bytes: of the buffer.
    """

    def __init__(self, api: Ggml, generations: list[int]) -> None:
        self._api = api
        self._allocator = api.make("ggml_gallocr_new", api.ggml_backend_cpu_buffer_type())
        self.generations = generations
        self.graphs: OrderedDict[Shape, Graph] = OrderedDict()
        self.n_bytes = 0

    def add(self, shape: Shape, graph: Graph) -> None:
        """Keep a graph, and the least recently used one no more if there are too many."""
        self.graphs[shape] = graph
        while len(self.graphs) > MAX_GRAPHS:
            self.graphs.popitem(last=False)

    def allocate(self, graph: int) -> None:
        """Allocate a graph; a buffer that has to grow moves, and the other graphs are dropped.

        Raises:
            AllocationError: it cannot grow; the workspace is of no use any more.
        """
        api, needed = self._api, c.c_size_t()
        check_room("the places of a graph's tensors", _PLACE * api.ggml_graph_n_nodes(graph))
        api.ggml_gallocr_reserve_n_size(self._allocator, graph, None, None, c.byref(needed))
        if needed.value > self.n_bytes:
            self.graphs.clear()
            check_available(_BUFFER, needed.value)
            check_room(_BUFFER, needed.value)
            if not api.ggml_gallocr_reserve(self._allocator, graph):
                raise AllocationError(_BUFFER, needed.value)
            self.n_bytes = needed.value
        if not api.ggml_gallocr_alloc_graph(self._allocator, graph):
            raise AllocationError(_BUFFER, needed.value)

    def close(self) -> None:
        """Free buffer and graphs; it is of no use any more."""
        self.graphs.clear()
        self._allocator.close()
