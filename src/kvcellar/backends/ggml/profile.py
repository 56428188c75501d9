"""A graph's time by kind of operation: every node computed alone and timed.

ggml does not tell how long a node took, so each becomes a graph of its own. What that costs
(threads that start and meet for every node, nodes that ggml would have fused) is known by
comparison: of a graph that is computed several times in a row, every second time is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from kvcellar.backends.base import GraphTimes, OpTime
from kvcellar.backends.ggml.aside import Stop
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.binding import Tensor, tensor_at

VIEWS = "views"
_NO_WORK = ("NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE")
_OF_WEIGHTS = ("MUL_MAT", "MUL_MAT_ID")


class GraphProfiler:
    """Computes graphs like the backend, and tells a watcher how long each took."""

    def __init__(self, backend: GgmlBackend, watch: Callable[[GraphTimes], None]) -> None:
        self._backend = backend
        self._api = backend.api
        self._watch = watch
        self._last_split: int | None = None
        size = self._api.ggml_graph_overhead_custom(1, False)
        self._context = self._api.context("a graph of one node", size)
        self._one: int = self._api.ggml_new_graph_custom(self._context, 1, False)

    def compute(self, graph: int, *, stop: Stop | None = None, keep: object = None) -> None:
        """Compute an allocated graph, node by node or whole in turns.

        Arguments are those of ``GgmlBackend.compute``; between nodes, exceptions come anyway.

        Raises:
            ComputeError: ggml reports a failure or an abort.
        """
        ops: dict[str, OpTime] = {}
        whole, self._last_split = graph == self._last_split, None
        begin = perf_counter()
        if whole:
            self._backend.compute(graph, stop=stop, keep=keep)
        else:
            ops = self._compute_nodes(graph)
            self._last_split = graph
        self._watch(GraphTimes(begin, perf_counter(), ops))

    def close(self) -> None:
        """Free its graph; closing twice is fine."""
        self._context.close()

    def _compute_nodes(self, graph: int) -> dict[str, OpTime]:
        found: dict[str, OpTime] = {}
        for i in range(self._api.ggml_graph_n_nodes(graph)):
            node = self._api.ggml_graph_node(graph, i)
            kind = self._kind(node)
            seconds = 0.0 if kind == VIEWS else self._compute_alone(node)
            calls, before = found.get(kind, OpTime(0, 0.0))
            found[kind] = OpTime(calls + 1, before + seconds)
        return found

    def _compute_alone(self, node: int) -> float:
        self._api.ggml_graph_clear(self._one)
        self._api.ggml_graph_add_node(self._one, node)
        start = perf_counter()
        self._backend.compute(self._one)
        return perf_counter() - start

    def _kind(self, node: int) -> str:
        """Ggml's name of the operation; of products the type of the weights too."""
        name = _text(self._api.ggml_op_desc(node))
        if name in _NO_WORK:
            return VIEWS
        tensor: Tensor = tensor_at(node)
        if name == "CUSTOM" and not tensor.name.startswith(b"node_"):
            return _text(tensor.name)
        if name in _OF_WEIGHTS:
            return f"{name} {_text(self._api.ggml_type_name(tensor_at(tensor.src[0]).type))}"
        return name


def _text(raw: bytes) -> str:
    return raw.decode()
