"""Running a model's forward pass over a memory: a graph of the plan's shape, loaded, computed."""

from __future__ import annotations

from collections.abc import Callable

from kvcellar.backends.base import GraphTimes
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.graph import GraphCache
from kvcellar.backends.ggml.model_memory import GgmlMemory
from kvcellar.backends.ggml.profile import GraphProfiler
from kvcellar.backends.operations import Forward
from kvcellar.plan import Plan
from kvcellar.types import Float32Array


class GgmlExecutor:
    """Runs a model's forward pass over a memory. Implements ``Executor``."""

    def __init__(self, backend: GgmlBackend, memory: GgmlMemory, forward: Forward[int]) -> None:
        self._backend = backend
        self._compute = backend.compute
        self._kernels = memory.kernels
        self._cache = GraphCache(backend, memory, forward)

    @property
    def takes_lists(self) -> tuple[bool, ...]:
        """Of each group, whether its plans are better given with lists than with masks."""
        return tuple(kernel is not None for kernel in self._kernels)

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
        return graph.logits

    def watch(self, watcher: Callable[[GraphTimes], None]) -> None:
        """Tell a watcher about every graph; see ``ProfiledExecutor.watch``."""
        self._compute = GraphProfiler(self._backend, watcher).compute

    def invalidate(self) -> None:
        """Drop every graph; a resized store makes that happen by itself."""
        self._cache.invalidate()

    def close(self) -> None:
        """Free graphs and buffer; closing twice is fine."""
        self._cache.close()
