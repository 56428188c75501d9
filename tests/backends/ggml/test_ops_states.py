"""Graphs of states: which of them are kept, and for which plans."""

from __future__ import annotations

import numpy as np

from tests.backends.ops_bench import Bench, close_to, rows
from tests.backends.test_ops_states import (
    N_ROWS,
    OTHER,
    Mamba,
    all_states,
    open_filled,
    state_plan,
)


def _open(opened: list[Bench], mamba: Mamba) -> Bench:
    bench = open_filled(Bench, mamba)
    assert isinstance(bench, Bench)
    opened.append(bench)
    return bench


def test_one_graph_serves_all_rows(opened: list[Bench]) -> None:
    mamba = Mamba()
    bench = _open(opened, mamba)
    executor, x = bench.executor(mamba.forward(bench)), rows(4, mamba.width)
    plans = [
        state_plan(x, *where)
        for where in (([0, 1], [2, 3]), ([3, N_ROWS], [3, 0]), ([4, 4], [1, 4]))
    ]
    for plan in plans:
        assert plan.states is not None
        before = all_states(bench)
        halves = np.split(x.astype(np.float64), 2)
        pairs = zip(halves, plan.states.sources, strict=True)
        expected = [mamba.expected(half, before[source, OTHER:]) for half, source in pairs]
        got = executor.run(plan)
        close_to(got, np.concatenate([y for y, _ in expected]))
        left = all_states(bench)[plan.states.targets, OTHER:]
        close_to(left, np.array([state for _, state in expected]))
    assert len(executor._cache.shapes) == 1


def test_the_number_of_sequences_is_part_of_a_graph_s_shape(opened: list[Bench]) -> None:
    mamba = Mamba()
    bench, x = _open(opened, mamba), rows(4, mamba.width)
    executor = bench.executor(mamba.forward(bench))
    one = executor._cache.get(state_plan(x, [0], [0]))
    assert executor._cache.get(state_plan(x, [0, 1], [0, 1])) is not one
