"""Results as a table: for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from _results import Results, Scenario, Spread
from rich import box
from rich.console import Console
from rich.table import Table

Cells = tuple[str, str, str, str, str, str, str]
HEADS: Cells = ("scenario", "engine", "n", "median", "range", "ours against it", "range")
LEGEND = (
    "Medians of rounds, engines in turns; ratios are of rounds, above 1 kvcellar is better.",
    "n: rounds, after one that is not counted; long steps: half of --repeats or 1, none before.",
    "llama.cpp: with and without flash attention where that matters; the better median is shown.",
)


def rows(results: Results) -> Iterator[Cells]:
    """A row for each scenario and peer; the scenario is named in its first row only."""
    for scenario in results.scenarios:
        name = f"{scenario.label}, {scenario.unit.value}"
        for engine in scenario.shown().values():
            values = scenario.engines[engine]
            figures = _figures(Spread.of(values))
            yield name, engine, str(len(values)), *figures, *_ratio(scenario, engine)
            name = ""


def about(results: Results) -> list[str]:
    """Lines on what was measured on what."""
    machine = ", ".join(f"{key} {value}" for key, value in results.about.items())
    versions = "; ".join(f"{name} {version}" for name, version in results.versions.items())
    return [
        machine,
        versions,
        *LEGEND,
        *results.notes,
    ]


def show(results: Results, console: Console) -> None:
    """Print the table."""
    table = Table(box=box.SIMPLE_HEAD)
    for i, head in enumerate(HEADS):
        table.add_column(head, justify="left" if i < 2 else "right", overflow="fold")
    for cells in rows(results):
        table.add_row(*cells)
    console.print(table)
    for line in about(results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def markdown(results: Results) -> str:
    """The same as Markdown."""
    lines = [HEADS, ("---", "---", *["---:"] * 5), *rows(results)]
    table = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines]
    return "\n".join([*table, "", *(f"* {' '.join(line.split())}" for line in about(results)), ""])


def number(value: float) -> str:
    """Three digits, or all before the point."""
    if value == 0:
        return "0"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}" if abs(value) >= 0.1 else f"{value:.2g}"


def _figures(spread: Spread) -> tuple[str, str]:
    return number(spread.median), f"{number(spread.least)} to {number(spread.largest)}"


def _ratio(scenario: Scenario, engine: str) -> tuple[str, str]:
    spread = scenario.ratio(engine)
    return ("", "") if spread is None else _figures(spread)
