"""The table and the plot say what the results say."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree

import pytest
from _case import Unit
from _plot import svg
from _results import Results
from _table import about, markdown, number, rows, show
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def results() -> Results:
    made = Results({"cpu": "<fast> & small"}, {"kvcellar": "1", "llama.cpp": "2"}, ["skipped x"])
    for n, ours, theirs in ((512, 130.0, 100.0), (2048, 90.0, 100.0)):
        for engine, value in (("kvcellar", ours), ("llama.cpp", theirs)):
            made.add("lengths", f"decode at {n}", Unit.RATE, engine, value)
    made.add("edits", "fork | <a> & b", Unit.US, "kvcellar", 2.0)
    made.add("edits", "fork | <a> & b", Unit.US, "llama.cpp", 8.0)
    made.add("edits", "alone", Unit.MS, "kvcellar", 0.01234)
    return made


@pytest.fixture
def settings() -> Results:
    made = Results()
    for n, *figures in ((512, 100.0, 80.0, 64.0, 70.0), (4096, 60.0, 30.0, 40.0, 50.0)):
        names = ("kvcellar", "llama.cpp (flash)", "llama.cpp (no flash)", "openvino")
        for engine, value in zip(names, figures, strict=True):
            made.add("lengths", f"decode at {n}", Unit.RATE, engine, value)
    return made


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_a_row_for_each_scenario_and_engine(results: Results) -> None:
    assert list(rows(results))[:2] == [
        ("decode at 512, tokens/s", "kvcellar", "1", "130", "130 to 130", "", ""),
        ("", "llama.cpp", "1", "100", "100 to 100", "1.30", "1.30 to 1.30"),
    ]
    assert list(rows(results))[-1][:4] == ("alone, ms", "kvcellar", "1", "0.012")


def test_a_row_says_how_many_rounds_it_has(results: Results) -> None:
    for value in (1.0, 2.0):
        results.add("edits", "alone", Unit.MS, "kvcellar", value)
    assert [row[2] for row in rows(results)] == ["1"] * 6 + ["3"]
    assert any(line.startswith("n: rounds") for line in about(results))


def test_a_peer_has_one_row_and_it_names_the_better_setting(settings: Results) -> None:
    assert [row[1:4] + row[5:6] for row in rows(settings)] == [
        ("kvcellar", "1", "100", ""),
        ("llama.cpp (flash)", "1", "80.0", "1.25"),
        ("openvino", "1", "70.0", "1.43"),
        ("kvcellar", "1", "60.0", ""),
        ("llama.cpp (no flash)", "1", "40.0", "1.50"),
        ("openvino", "1", "50.0", "1.20"),
    ]


def test_the_table_holds_every_figure_and_note(results: Results) -> None:
    out = io.StringIO()
    show(results, Console(file=out, width=140))
    for text in ("decode at 2048, tokens/s", "llama.cpp", "4.00", "skipped x", "<fast> & small"):
        assert text in out.getvalue()


def test_markdown_is_a_table_of_seven_columns(results: Results) -> None:
    lines = markdown(results).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 7
    for line in table:
        assert line.replace("\\|", "").count("|") == 8
    assert "* skipped x" in lines


def test_a_note_of_several_lines_is_one_in_markdown(results: Results) -> None:
    results.note("died:\n    last words")
    assert "* died: last words" in markdown(results).splitlines()


def test_the_machine_and_the_versions_are_told(results: Results) -> None:
    assert about(results)[:2] == ["cpu <fast> & small", "kvcellar 1; llama.cpp 2"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234.5, "1234"), (123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.01, "0.01")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_the_plot_names_scenarios_engines_and_ratios(results: Results) -> None:
    found = texts(svg(results))
    for text in ("decode at 512", "fork | <a> & b", "llama.cpp", "1.30", "0.90", "4.00", "2048"):
        assert text in found
    assert "alone" not in found  # nothing to compare with


def test_bars_begin_at_1_and_go_to_the_better_side(results: Results) -> None:
    root = ElementTree.fromstring(svg(results))
    (one,) = (line for line in root.iter(f"{SVG}line") if line.get("stroke") == "#000000")
    middle = float(one.get("x1", ""))
    bars = [r for r in root.iter(f"{SVG}rect") if r.get("height") == "11.0"]
    spans = [(float(r.get("x", "")), float(r.get("width", ""))) for r in bars]
    assert [round(x, 1) for x, _ in (spans[0], spans[2])] == [round(middle, 1)] * 2
    assert round(spans[1][0] + spans[1][1], 1) == pytest.approx(middle, abs=0.11)
    assert spans[2][1] > spans[0][1] > 0


def test_decode_over_length_is_a_line_an_engine(results: Results) -> None:
    lines = list(ElementTree.fromstring(svg(results)).iter(f"{SVG}polyline"))
    assert len(lines) == 2
    for line in lines:
        points = [tuple(map(float, p.split(","))) for p in line.get("points", "").split()]
        assert len(points) == 2
        assert points[0][0] < points[1][0]


def test_the_plot_draws_each_peer_once_by_its_better_setting(settings: Results) -> None:
    picture = svg(settings)
    found = texts(picture)
    assert {"1.25 (flash)", "1.50 (no flash)", "1.43", "1.20"} <= set(found)
    assert not {"2.00 (flash)", "1.56 (no flash)", "llama.cpp (flash)"} & set(found)
    root = ElementTree.fromstring(picture)
    drawn = [line.get("points", "").split() for line in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in drawn] == [2, 2, 2]
    heights = [float(point.split(",")[1]) for point in drawn[1]]
    bottom, top = (float(drawn[0][i].split(",")[1]) for i in (1, 0))
    per_rate = (bottom - top) / (100 - 60)
    assert heights == pytest.approx([top + 20 * per_rate, top + 60 * per_rate], abs=0.2)


def test_an_empty_result_is_still_a_picture_and_a_table() -> None:
    empty = Results()
    assert ElementTree.fromstring(svg(empty)).tag == f"{SVG}svg"
    assert len([line for line in markdown(empty).splitlines() if line.startswith("|")]) == 2


@given(st.lists(st.tuples(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6)), min_size=1, max_size=5))
def test_everything_drawn_lies_within_the_picture(pairs: list[tuple[float, float]]) -> None:
    results = Results()
    for i, (ours, theirs) in enumerate(pairs):
        results.add("g", f"decode at {2**i}", Unit.RATE, "kvcellar", ours)
        results.add("g", f"decode at {2**i}", Unit.RATE, "llama.cpp", theirs)
    root = ElementTree.fromstring(svg(results))
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for element in root:
        for name in ("x", "x1", "x2", "cx"):
            assert 0 <= float(element.get(name, 0)) <= width
        for name in ("y", "y1", "y2", "cy"):
            assert 0 <= float(element.get(name, 0)) <= height
