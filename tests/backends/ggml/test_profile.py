"""A graph computed node by node gives the same, and every node is counted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvcellar.backends.base import GraphTimes
from kvcellar.backends.ggml.profile import VIEWS
from kvcellar.errors import ComputeError
from kvcellar.testing.plans import causal_plan
from tests.backends.helpers import Rig

TOKENS = [5, 3, 40, 0]


def test_node_by_node_gives_the_same_logits(rig: Rig) -> None:
    _, plain = rig.executor()
    _, watched = rig.executor()
    watched.watch(lambda _: None)
    for first in range(0, 12, 4):
        plan = causal_plan(TOKENS, first)
        np.testing.assert_array_equal(watched.run(plan), plain.run(plan))


def test_every_node_of_the_graph_is_counted(rig: Rig) -> None:
    _, executor = rig.executor()
    seen: list[GraphTimes] = []
    executor.watch(seen.append)
    plan = causal_plan(TOKENS)
    executor.run(plan)
    api, graph = rig.backend.api, executor._cache.get(plan).graph
    nodes = [api.ggml_graph_node(graph, i) for i in range(api.ggml_graph_n_nodes(graph))]
    ops = Counter(api.ggml_op_desc(node).decode() for node in nodes)
    views = sum(ops.pop(name, 0) for name in ("RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"))
    counted: Counter[str] = Counter()
    for kind, op in seen[0].ops.items():
        counted[kind.split()[0]] += op.n_nodes
    assert counted.pop(VIEWS) == views
    assert counted == ops
    assert ops["MUL_MAT"] == 2 * 7 + 1


def test_products_are_told_apart_by_the_type_of_their_weights(rig: Rig) -> None:
    _, executor = rig.executor()
    seen: list[GraphTimes] = []
    executor.watch(seen.append)
    executor.run(causal_plan(TOKENS))
    assert seen[0].ops["MUL_MAT f32"].n_nodes == 15


def test_nodes_take_time_within_that_of_the_graph(rig: Rig) -> None:
    _, executor = rig.executor()
    seen: list[GraphTimes] = []
    executor.watch(seen.append)
    executor.run(causal_plan(TOKENS))
    (times,) = seen
    for kind, op in times.ops.items():
        assert (op.seconds == 0) == (kind == VIEWS), kind
    assert sum(op.seconds for op in times.ops.values()) <= times.end - times.begin


def test_a_graph_computed_again_is_whole_every_second_time(rig: Rig) -> None:
    _, executor = rig.executor()
    seen: list[GraphTimes] = []
    executor.watch(seen.append)
    for first in range(3):
        executor.run(causal_plan([1], first))
    executor.run(causal_plan(TOKENS, 3))
    executor.run(causal_plan([1], 7))
    assert [bool(times.ops) for times in seen] == [True, False, True, True, True]


def test_without_a_watcher_the_backend_itself_computes(rig: Rig) -> None:
    _, executor = rig.executor()
    assert executor._compute == rig.backend.compute


def test_a_failure_is_told_and_the_next_run_works(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, executor = rig.executor()
    seen: list[GraphTimes] = []
    executor.watch(seen.append)
    with monkeypatch.context() as patch:
        patch.setattr(rig.backend.api, "ggml_graph_compute", lambda *_: 1)
        with pytest.raises(ComputeError, match="aborted"):
            executor.run(causal_plan(TOKENS))
    assert seen == []
    executor.run(causal_plan(TOKENS))
    assert seen[0].ops
