"""Where the time of decoding goes: graphs by kind of operation, and Python around them.

Invariants:

1. The lines of a kind of step add up to its seconds, and those to the time from the first step to
   the last, less what measuring itself took.
2. Every node of every graph is in a line.
3. A context that is not profiled pays for one comparison with None a decode.

Every second time a graph is computed whole (see ``Executor.watch``). That tells how much more a
node costs when it is computed alone, which is subtracted, and how long the graph really takes, to
which the nodes are scaled. Of the first such pair one part was cold and the other warm; it is left
out, and where few remain nothing is subtracted or scaled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import NamedTuple, ParamSpec, TypeVar

from kvcellar.backends.base import Executor, GraphTimes, OpTime

P = ParamSpec("P")
R = TypeVar("R")

NOTHING = OpTime(0, 0.0)
FEWEST_PAIRS = 3  # from which on the cost of a lone node is known


class Profile:
    """The record of a profiled context; made by :meth:`Context.start_profile`.

    Attributes:
        prefill: steps of more than a token a sequence.
        decode: all others; sampling and detokenising are theirs.
    """

    def __init__(self) -> None:
        self.prefill = StepTimes()
        self.decode = StepTimes()
        self._graphs: list[GraphTimes] = []
        self._before: GraphTimes | None = None
        self._last_end: float | None = None
        self._since_step = 0.0

    @classmethod
    def of(cls, executor: Executor) -> Profile:
        """Profile what an executor computes from now on.

        Raises:
            NotSupported: the backend has no profile.
        """
        profile = cls()
        executor.watch(profile.see_graph)
        return profile

    def see_graph(self, times: GraphTimes) -> None:
        """Count one graph as part of the current step."""
        self._graphs.append(times)

    def add(
        self, n_tokens: int, n_seqs: int, start: float, seconds: float, in_graphs: float
    ) -> None:
        """Count a step that has ended.

        Args:
            n_tokens: of the batch.
            n_seqs: how many sequences it has.
            start: when the step began.
            seconds: how long it took.
            in_graphs: the part of that in which the executor was at work.
        """
        kind = self.prefill if n_tokens > n_seqs else self.decode
        kind.n_steps += 1
        kind.n_tokens += n_tokens
        end = start + seconds
        graphs = [graph for graph in self._graphs if graph.begin >= start]  # others had failed
        self._graphs.clear()
        computing = sum(graph.end - graph.begin for graph in graphs)
        behind = end - graphs[-1].end if graphs else 0.0
        kind.parts["cells and plans"] += seconds - in_graphs - behind
        kind.parts["graph and inputs"] += in_graphs - computing
        kind.parts["logits"] += behind
        if self._last_end is not None:
            kind.parts["everything else"] += start - self._last_end - self._since_step
        self._last_end, self._since_step = end, 0.0
        for graph in graphs:
            kind.add_graph(graph, self._before)
            self._before = graph

    def timed(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function, its time counted as that part of decoding."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = perf_counter() - start
                self.decode.parts[part] += seconds
                self._since_step += seconds

        return call


@dataclass(slots=True)
class StepTimes:
    """All steps of one kind.

    Attributes:
        n_steps: calls of decode.
        n_tokens: their tokens.
        parts: seconds outside the graphs, by what was done.
        ops: nodes and seconds of the graphs that were computed node by node, by operation.
        n_split: the number of those graphs.
        whole_seconds: seconds of the graphs that were computed whole.
        n_whole: the number of those graphs.
        pairs: those beside the same graph computed just before, node by node.
    """

    n_steps: int = 0
    n_tokens: int = 0
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ops: dict[str, OpTime] = field(default_factory=dict)
    n_split: int = 0
    whole_seconds: float = 0.0
    n_whole: int = 0
    pairs: list[Pair] = field(default_factory=list)

    def __reduce__(self) -> tuple[type[StepTimes], tuple[object, ...]]:
        return StepTimes, tuple(getattr(self, each.name) for each in fields(self))

    @property
    def compared(self) -> Pair | None:
        """Sum of all pairs but the first; None if there are too few."""
        warm = self.pairs[1:]
        if len(warm) < FEWEST_PAIRS:
            return None
        return Pair(*(sum(figures) for figures in zip(*warm, strict=True)))

    @property
    def node_cost(self) -> float:
        """Seconds that a node costs more when it is computed alone; 0 if not known."""
        pair = self.compared
        return max(pair.split - pair.whole, 0.0) / pair.n_nodes if pair else 0.0

    @property
    def graph_seconds(self) -> float:
        """An estimate of what the graphs would have taken if all had been computed whole."""
        split = sum(op.seconds for op in self.ops.values())
        pair = self.compared
        return self.whole_seconds + split * (pair.whole / pair.split if pair else 1.0)

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return self.graph_seconds + sum(self.parts.values())

    def lines(self) -> list[Line]:
        """Return operations and what Python did, the longest first."""
        cost = self.node_cost
        own = {k: max(op.seconds - cost * op.n_nodes, 0.0) for k, op in self.ops.items()}
        total = sum(own.values())
        scale = self.graph_seconds / total if total else 0.0
        found = [Line(k, op.n_nodes / self.n_split, own[k] * scale) for k, op in self.ops.items()]
        found += [Line(name, 0.0, seconds) for name, seconds in self.parts.items()]
        return sorted(found, key=lambda line: -line.seconds)

    def add_graph(self, times: GraphTimes, before: GraphTimes | None) -> None:
        """Count one graph; ``before`` is the one computed last."""
        if not times.ops:
            self.n_whole += 1
            whole = times.end - times.begin
            self.whole_seconds += whole
            if before is not None and before.ops:
                self.pairs.append(Pair(*_sum(*before.ops.values()), whole))
            return
        self.n_split += 1
        for kind, op in times.ops.items():
            self.ops[kind] = _sum(self.ops.get(kind, NOTHING), op)


class Line(NamedTuple):
    """One line of a profile; it has no nodes if it is no operation of a graph."""

    name: str
    n_nodes: float  # a graph, on average
    seconds: float


class Pair(NamedTuple):
    """A graph computed node by node, and right after that as a whole."""

    n_nodes: int
    split: float  # seconds of the nodes together
    whole: float


def _sum(*times: OpTime) -> OpTime:
    return OpTime(sum(t.n_nodes for t in times), sum(t.seconds for t in times))
