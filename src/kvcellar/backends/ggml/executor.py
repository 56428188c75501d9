"""Running a model's forward pass over a store: a graph of the plan's shape, loaded and computed."""

from __future__ import annotations

from collections.abc import Callable

from kvcellar.backends.base import GraphTimes
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.graph import GraphCache
from kvcellar.backends.ggml.kernel.attention import AttentionKernel
from kvcellar.backends.ggml.profile import GraphProfiler
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.backends.operations import Forward
from kvcellar.plan import Plan
from kvcellar.types import Float32Array


class GgmlExecutor:
    """Runs a model's forward pass over a store. Implements ``Executor``."""

    def __init__(
        self,
        backend: GgmlBackend,
        store: GgmlStore,
        forward: Forward[int],
        kernel: AttentionKernel | None = None,
    ) -> None:
        self._backend = backend
        self._compute = backend.compute
        self._kernel = kernel
        self._cache = GraphCache(backend, store, forward, kernel)

    @property
    def lists_up_to(self) -> tuple[int, ...]:
        """Of each group: plans of so many tokens are better given with lists than with a mask."""
        return () if self._kernel is None else (self._kernel.max_tokens,)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the compute buffer."""
        return self._cache.buffer_bytes

    def run(self, plan: Plan) -> Float32Array:
        """Compute a plan; see ``Executor.run``."""
        graph = self._cache.get(plan)
        graph.load(plan)
        if plan.lists is not None and self._kernel is not None:
            self._kernel.load(plan.lists)
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
