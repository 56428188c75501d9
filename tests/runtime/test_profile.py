"""The arithmetic of profiles, and what a context records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar.backends.base import GraphTimes, OpTime
from kvcellar.batch import Batch
from kvcellar.errors import CacheFull, NotSupported
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.runtime.profile import Profile, StepTimes
from kvcellar.testing.tiny_llama import TinyLlama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    path.write_bytes(TinyLlama().to_bytes())
    return path


@pytest.fixture
def context(tiny: Path) -> Iterator[Context]:
    with Model.from_gguf(tiny, n_threads=1) as model:
        yield model.context(n_ctx=64, n_ubatch=4)


def _split(begin: float, end: float, **ops: tuple[int, float]) -> GraphTimes:
    return GraphTimes(begin, end, {name: OpTime(*op) for name, op in ops.items()})


def _rows(times: StepTimes) -> dict[str, float]:
    return {line.name: round(line.seconds, 9) for line in times.lines()}


def test_parts_of_a_step_add_up_to_it() -> None:
    profile = Profile()
    profile.see_graph(_split(12.0, 17.0, MUL=(2, 3.0), ADD=(1, 1.0)))
    profile.add(4, 1, 10.0, 9.0, in_graphs=6.5)
    # 1 of the 5 seconds of computing went into measuring; 2 passed after the graph
    assert _rows(profile.prefill) == {
        "MUL": 3.0,
        "logits": 2.0,
        "graph and inputs": 1.5,
        "ADD": 1.0,
        "cells and plans": 0.5,
    }
    assert profile.prefill.seconds == pytest.approx(9.0 - 1.0)
    assert profile.decode.n_steps == 0


def _in_pairs(split: GraphTimes, whole: float, n_pairs: int) -> StepTimes:
    times = StepTimes()
    for _ in range(n_pairs):
        times.add_graph(split, None)
        times.add_graph(_split(split.end, split.end + whole), split)
    return times


def test_what_a_node_costs_alone_is_taken_off_and_the_rest_scaled() -> None:
    profile = Profile()
    for start in range(0, 52, 13):
        profile.see_graph(_split(start, start + 9.0, MUL=(2, 6.0), ADD=(2, 2.0)))
        profile.add(1, 1, start, 9.0, in_graphs=9.0)
        profile.see_graph(_split(start + 9.0, start + 13.0))
        profile.add(1, 1, start + 9.0, 4.0, in_graphs=4.0)
    times = profile.decode
    assert times.node_cost == pytest.approx(1.0)  # 8 seconds in place of 4, for 4 nodes
    rows = _rows(times)
    assert (rows["MUL"], rows["ADD"]) == (32.0, 0.0)
    assert times.graph_seconds == pytest.approx(32.0)
    assert times.seconds == pytest.approx(32.0)


def test_no_kind_of_operation_gets_less_than_nothing() -> None:
    times = _in_pairs(_split(0.0, 5.0, MUL=(1, 4.0), ADD=(3, 0.5)), 1.0, n_pairs=4)
    rows = _rows(times)
    assert rows["ADD"] == 0.0
    assert rows["MUL"] == pytest.approx(times.graph_seconds)


@pytest.mark.parametrize("n_pairs", [0, 1, 3])
def test_of_a_few_graphs_nothing_is_taken_off_or_scaled(n_pairs: int) -> None:
    times = _in_pairs(_split(0.0, 9.0, MUL=(2, 6.0), ADD=(2, 1.0)), 3.5, n_pairs)
    assert (times.compared, times.node_cost) == (None, 0.0)
    assert times.graph_seconds == pytest.approx(n_pairs * (7.0 + 3.5))
    rows = _rows(times)
    assert rows.get("MUL", 0.0) == pytest.approx(n_pairs * 10.5 * 6 / 7)
    assert rows.get("ADD", 0.0) == pytest.approx(n_pairs * 10.5 * 1 / 7)


def test_a_cold_first_graph_says_nothing_about_the_others() -> None:
    cold, warm = (_split(0.0, 99.0, MUL=(1, seconds), ADD=(1, 1.0)) for seconds in (90.0, 3.0))
    times = StepTimes()
    for split in (cold, warm, warm, warm):
        times.add_graph(split, None)
        times.add_graph(_split(0.0, 2.0), split)
    assert times.compared == (6, 12.0, 6.0)
    assert times.node_cost == pytest.approx(1.0)
    assert times.graph_seconds == pytest.approx(4 * 2.0 + (91.0 + 3 * 4.0) / 2)


def test_a_graph_after_one_that_was_lost_is_no_pair() -> None:
    times = StepTimes()
    for _ in range(5):
        times.add_graph(_split(0.0, 1.0), _split(0.0, 2.0))
    assert (times.pairs, times.n_whole, times.graph_seconds) == ([], 5, 5.0)


def test_time_between_steps_is_that_of_the_second() -> None:
    profile = Profile()
    profile.add(4, 1, 0.0, 1.0, in_graphs=1.0)
    profile.add(1, 1, 3.0, 1.0, in_graphs=1.0)
    assert _rows(profile.decode)["everything else"] == 2.0
    assert "everything else" not in _rows(profile.prefill)


def test_sampling_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.5, 2.0])
    monkeypatch.setattr("kvcellar.runtime.profile.perf_counter", lambda: next(now))
    profile = Profile()
    profile.add(4, 1, 0.0, 1.0, in_graphs=1.0)
    assert profile.timed("sampling", lambda x: x + 1)(2) == 3
    profile.add(1, 1, 3.0, 1.0, in_graphs=1.0)
    rows = _rows(profile.decode)
    assert (rows["sampling"], rows["everything else"]) == (0.5, 1.5)


def test_graphs_of_a_step_that_failed_are_not_counted() -> None:
    profile = Profile()
    profile.see_graph(_split(1.0, 2.0, MUL=(1, 1.0)))
    profile.add(1, 1, 5.0, 1.0, in_graphs=0.0)
    assert profile.decode.ops == {}


def test_a_context_records_every_step(context: Context) -> None:
    profile = context.start_profile()
    context.decode(Batch.of([1] * 10))
    for token in range(9):
        context.decode(Batch.of([token]))
    prefill, decode = profile.prefill, profile.decode
    assert (prefill.n_steps, prefill.n_tokens, prefill.n_split + prefill.n_whole) == (1, 10, 3)
    assert (decode.n_steps, decode.n_tokens, decode.n_split, decode.n_whole) == (9, 9, 5, 4)
    for times in (prefill, decode):
        assert sum(line.seconds for line in times.lines()) == pytest.approx(times.seconds)
        assert {line.name for line in times.lines()} >= {"MUL_MAT f32", "cells and plans", "logits"}
        assert all(line.seconds >= 0 for line in times.lines())
    assert (len(prefill.pairs), len(decode.pairs)) == (prefill.n_whole, 4)
    assert decode.compared is not None
    assert decode.compared.n_nodes == 3 * sum(op.n_nodes for op in decode.ops.values()) / 5


def test_a_profile_counts_no_more_time_than_passed(context: Context) -> None:
    profile = context.start_profile()
    context.decode(Batch.of([1] * 10))
    times, prefill = context.timings, profile.prefill
    measured = sum(prefill.parts.values()) + sum(op.seconds for op in prefill.ops.values())
    assert measured + prefill.whole_seconds <= times.prefill_seconds


def test_a_failed_decode_leaves_the_profile_usable(context: Context) -> None:
    profile = context.start_profile()
    with pytest.raises(CacheFull):
        context.decode(Batch.of([1] * 65))
    context.decode(Batch.of([1]))
    assert (profile.prefill.n_steps, profile.decode.n_steps) == (0, 1)


def test_nothing_is_recorded_before_it_is_asked_for(context: Context) -> None:
    context.decode(Batch.of([1]))
    profile = context.start_profile()
    assert context.profile is profile
    assert profile.decode == StepTimes()


def test_numpy_says_that_it_cannot_be_profiled(tiny: Path) -> None:
    pytest.importorskip("gguf")
    with Model.from_gguf(tiny, backend="numpy") as model:
        context = model.context(n_ctx=16)
        with pytest.raises(NotSupported, match="backend='ggml'"):
            context.start_profile()
        assert context.profile is None
