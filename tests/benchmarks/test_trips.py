"""Counting calls, and the trips that are counted."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import trips
from _calls import Call, Counts, by_file, hops, record, tree
from _protocol import EngineFailed
from _worker_trips import CELLS, PACKAGE, Trips, routes

ONE = """
from two import double, numbers

def total(n):
    return double(n) + sum(numbers(n))

def fail():
    double(1)
    raise ValueError("on purpose")
"""
TWO = """
def double(n):
    return once(once(n))

def once(n):
    return n

def numbers(n):
    yield n
    yield n
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder of two files that call each other."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "one.py").write_text(ONE)
    (folder / "two.py").write_text(TWO)
    return folder


@pytest.fixture
def one(package: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "two", _load(package / "two.py"))
    return _load(package / "one.py")


@pytest.fixture(scope="module")
def taken(shared: Path) -> Trips:
    return Trips({"models": shared / "models", "n_threads": 1})


def test_a_small_trip_is_counted_call_by_call(package: Path, one: ModuleType) -> None:
    calls = record(package, lambda: one.total(3))
    assert [(call.file, call.function, call.depth) for call in calls] == [
        ("one.py", "total", 0),
        ("two.py", "double", 1),
        ("two.py", "once", 2),
        ("two.py", "once", 2),
        ("two.py", "numbers", 1),
        ("two.py", "numbers", 1),  # resumed
        ("two.py", "numbers", 1),
    ]
    assert Counts.of(calls) == Counts(calls=7, files=2, hops=2)


def test_calls_elsewhere_are_not_counted(package: Path) -> None:
    calls = record(package, lambda: json.dumps(sorted([2, 1])))
    assert Counts.of(calls) == Counts(0, 0, 0)


def test_an_error_passes_and_recording_ends(package: Path, one: ModuleType) -> None:
    before = sys.getprofile()
    with pytest.raises(ValueError, match="on purpose"):
        record(package, one.fail)
    assert sys.getprofile() is before


def test_every_change_of_file_is_a_hop_and_so_is_the_first_call() -> None:
    calls = [Call(file, "f", 1, 0) for file in "abbac"]
    assert hops(calls) == [True, True, False, True, True]
    assert hops([]) == []


def test_the_list_has_every_call_and_the_tree_their_order(package: Path, one: ModuleType) -> None:
    calls = record(package, lambda: one.total(3))
    assert [line.split() for line in by_file(calls)][:3] == [
        ["6", "calls", "1", "hops", "two.py"],
        ["3", "numbers:8"],
        ["2", "once:5"],
    ]
    assert list(tree(calls)) == [
        "total:4  [one.py]",
        "  double:2  [two.py]",
        "    once:5 x2",
        "  numbers:8 x3",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(routes()))
def test_a_trip_takes_the_same_calls_every_time(taken: Trips, name: str) -> None:
    first, again = taken.calls(name), taken.calls(name)
    assert first == again
    assert Counts.of(first).calls >= Counts.of(first).hops >= Counts.of(first).files > 1
    assert not [call for call in first if call.function == "<module>"], "an import was counted"


@pytest.mark.slow
def test_a_second_save_and_a_second_hit_are_shorter(taken: Trips) -> None:
    for name in ("save", "hit"):
        counts = [Counts.of(taken.calls(trip)) for trip in (f"{name}-first", name)]
        assert counts[0].calls > counts[1].calls
        assert counts[0].files > counts[1].files


def test_time_outside_the_graph_is_measured_behind_the_same_text(taken: Trips) -> None:
    for _ in range(2):
        measured = taken.outside("llama", 4)
        assert {part: figure["count"] for part, figure in measured.items()} == {
            "decode": 4,
            "append": 4,
        }
        assert all(figure["seconds"] > 0 for figure in measured.values())
        assert taken._open["llama"].context.cache.used == CELLS


@pytest.mark.slow
def test_both_tables_have_all_rows_for_two_trees(
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(trips, "_timed_models", lambda: ["llama"])
    source, out = str(PACKAGE.parent), tmp_path / "out" / "trips.json"
    arguments = ["--against", source, "--models", str(shared / "models"), "--repeats", "1"]
    assert trips.main([*arguments, "--threads", "1", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(out.read_text())
    assert list(written["trips"]) == [route.label for route in routes().values()]
    for label, counts in written["trips"].items():
        assert label in printed
        assert counts["here"] == counts["there"], label
    assert list(written["outside"]) == ["llama, decode", "llama, append"]
    for label, figures in written["outside"].items():
        assert label in printed
        assert [len(figures[tree]) for tree in ("here", "there")] == [1, 1]


def test_a_trip_is_explained(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trips.main(["--explain", "trim", "--models", str(shared / "models")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("trim(2), forked: ")
    assert any(line.split(":")[0].split(".")[-1].strip() == "trim" for line in lines)


def test_a_tree_that_is_not_the_one_imported_is_refused(shared: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="is imported from"):
        trips.start(tmp_path, {"models": str(shared / "models"), "n_threads": 1})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--against", "nowhere"],
        ["--explain", "nothing"],
        ["--explain", "trim", "--json", "out.json"],
        ["--repeats", "-1"],
        ["--threads", "0"],
        ["--models", "nowhere"],
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        trips.parse(["--models", str(tmp_path), *arguments])
    assert arguments[0] in capsys.readouterr().err


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
