"""Figures, ratios and spreads; JSON and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from _case import BATCHED, LLAMA_CPP, LLAMA_CPP_PLAIN, Unit
from _results import Results, Scenario, Spread
from hypothesis import given
from hypothesis import strategies as st

FIGURES = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("unit", "expected"),
    [(Unit.RATE, 2.0), (Unit.SECONDS, 5.0), (Unit.MS, 500.0), (Unit.US, 500_000.0)],
)
def test_a_unit_makes_a_figure_of_what_was_measured(unit: Unit, expected: float) -> None:
    assert unit.of({"seconds": 5.0, "count": 10}) == pytest.approx(expected)


def test_bytes_become_mib() -> None:
    assert Unit.MIB.of({"bytes": 3 * 2**20}) == 3.0


def test_a_ratio_above_1_means_that_ours_is_better() -> None:
    for unit, ours, theirs in ((Unit.RATE, 20.0, 10.0), (Unit.MS, 10.0, 20.0)):
        scenario = Scenario("g", "x", unit, {"kvcellar": [ours], "llama.cpp": [theirs]})
        assert scenario.ratio("llama.cpp") == Spread(2.0, 2.0, 2.0)


def test_ratios_are_of_rounds_not_of_medians() -> None:
    scenario = Scenario(
        "g", "x", Unit.RATE, {"kvcellar": [10.0, 20.0, 90.0], "llama.cpp": [10.0, 40.0, 30.0]}
    )
    assert scenario.ratio("llama.cpp") == Spread(1.0, 0.5, 3.0)


def test_only_rounds_that_both_have_are_compared() -> None:
    scenario = Scenario("g", "x", Unit.RATE, {"kvcellar": [8.0, 1.0], "llama.cpp": [4.0]})
    assert scenario.ratio("llama.cpp") == Spread(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    "engines",
    [
        {"kvcellar": [1.0]},
        {"llama.cpp": [1.0]},
        {"kvcellar": [0.0], "llama.cpp": [1.0]},
        {"kvcellar": [1.0], "llama.cpp": [0.0]},
    ],
)
def test_without_two_figures_there_is_no_ratio(engines: dict[str, list[float]]) -> None:
    assert Scenario("g", "x", Unit.MS, engines).ratio("llama.cpp") is None


def test_ours_has_no_ratio() -> None:
    assert Scenario("g", "x", Unit.MS, {"kvcellar": [1.0]}).ratio("kvcellar") is None


@pytest.mark.parametrize(
    ("unit", "better"), [(Unit.RATE, "peer (b)"), (Unit.MS, "peer (a)"), (Unit.MIB, "peer (a)")]
)
def test_a_peer_is_quoted_by_the_setting_with_the_better_median(unit: Unit, better: str) -> None:
    engines = {"kvcellar": [9.0], "peer (a)": [1.0, 2.0, 9.0], "peer (b)": [3.0, 3.0, 0.5]}
    assert Scenario("g", "x", unit, engines).shown() == {"kvcellar": "kvcellar", "peer": better}


def test_of_equal_settings_the_first_is_quoted() -> None:
    for unit in (Unit.RATE, Unit.MS):
        engines = {"peer (b)": [1.0], "peer (a)": [1.0]}
        assert Scenario("g", "x", unit, engines).shown() == {"peer": "peer (b)"}


def test_pools_are_quoted_beside_each_other() -> None:
    engines = {name: [float(i)] for i, name in enumerate(BATCHED, 1)}
    assert list(Scenario("g", "x", Unit.RATE, engines).shown().values()) == [
        "kvcellar",
        "llama.cpp (no flash)",
        "llama.cpp, one pool (no flash)",
    ]


@given(st.lists(FIGURES, min_size=1, max_size=4), st.sampled_from([Unit.RATE, Unit.MS]))
def test_no_setting_is_better_than_the_one_that_is_shown(
    figures: list[list[float]], unit: Unit
) -> None:
    made = Scenario("g", "x", unit, {f"peer ({i})": values for i, values in enumerate(figures)})
    shown = Spread.of(made.engines[made.shown()["peer"]]).median
    medians = [Spread.of(values).median for values in figures]
    assert shown == (max(medians) if unit.more_is_better else min(medians))


@given(FIGURES)
def test_a_spread_holds_its_median(values: list[float]) -> None:
    spread = Spread.of(values)
    below = sum(value < spread.median for value in values)
    above = sum(value > spread.median for value in values)
    assert (spread.least, spread.largest) == (min(values), max(values))
    assert max(below, above) <= len(values) / 2


@given(FIGURES, FIGURES)
def test_a_ratio_and_its_inverse_belong_together(ours: list[float], theirs: list[float]) -> None:
    engines = {"kvcellar": ours, "llama.cpp": theirs}
    rate = Scenario("g", "x", Unit.RATE, engines).ratio("llama.cpp")
    time = Scenario("g", "x", Unit.MS, engines).ratio("llama.cpp")
    assert rate is not None
    assert time is not None
    assert rate.least == pytest.approx(1 / time.largest)
    assert rate.largest == pytest.approx(1 / time.least)


def test_figures_of_one_line_stay_together() -> None:
    results = Results()
    for engine, value in (("kvcellar", 1.0), ("llama.cpp", 2.0), ("kvcellar", 3.0)):
        results.add("g", "x", Unit.MS, engine, value)
    results.add("h", "x", Unit.MS, "kvcellar", 4.0)
    assert [s.engines for s in results.scenarios] == [
        {"kvcellar": [1.0, 3.0], "llama.cpp": [2.0]},
        {"kvcellar": [4.0]},
    ]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    results = Results({"cpu": "ein Prozessor, 3 µm"}, {"kvcellar": "1"}, ["skipped: a, b"])
    results.add("g", "decode at 512", Unit.US, "kvcellar", 1.5)
    path = tmp_path / "deep" / "kept.json"
    results.save(path)
    assert Results.load(path) == results
    (kept,) = json.loads(path.read_text("utf-8"))["scenarios"]
    assert kept["unit"] == "µs"


def test_all_settings_are_saved_and_which_one_is_shown(tmp_path: Path) -> None:
    results = Results()
    for engine, value in (("kvcellar", 9.0), (LLAMA_CPP, 4.0), (LLAMA_CPP_PLAIN, 5.0)):
        results.add("g", "decode at 4096", Unit.RATE, engine, value)
    results.save(tmp_path / "kept.json")
    (kept,) = json.loads((tmp_path / "kept.json").read_text("utf-8"))["scenarios"]
    assert kept["engines"] == {"kvcellar": [9.0], LLAMA_CPP: [4.0], LLAMA_CPP_PLAIN: [5.0]}
    assert kept["shown"] == {"kvcellar": "kvcellar", "llama.cpp": LLAMA_CPP_PLAIN}
    assert Results.load(tmp_path / "kept.json") == results


def test_a_note_is_made_once() -> None:
    results = Results()
    for text in ("a", "b", "a"):
        results.note(text)
    assert results.notes == ["a", "b"]
