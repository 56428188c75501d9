"""Results as one SVG: bars of the ratios beside a line at 1, and decode speed over length."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from _case import OURS, peer_of
from _results import Results, Scenario, Spread
from _table import number

WIDTH, LABELS, MARGIN = 960, 430, 90
BAR, GAP, HEAD = 13, 7, 64
CHART = 260
COLORS = ("#2f6fb0", "#e08a1e", "#3a9a5b", "#9b59b6", "#c0392b")
_DECODE = re.compile(r"decode at (\d+)$")

Line = dict[str, list[tuple[int, float]]]


def svg(results: Results) -> str:
    """The picture; it needs no font, script or style of its own."""
    names = list(dict.fromkeys(name for s in results.scenarios for name in s.shown()))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    bars = list(_bars(results, colors))
    top = HEAD + bars_height(results) + 40
    chart = list(_chart(_lines(results), colors, top))
    height = top + (CHART + 60 if chart else 0)
    body = [
        _rect(0, 0, WIDTH, height, "#ffffff"),
        _text(16, 26, "kvcellar against other engines", size=17),
        _text(
            16,
            46,
            "median ratios of rounds (lines: ranges), above 1 kvcellar is faster or smaller; "
            "of a peer's settings the better one",
            size=12,
        ),
        *_legend([n for n in names if n != OURS], colors),
        *bars,
        *chart,
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    )
    return "\n".join([head, *body, "</svg>", ""])


def bars_height(results: Results) -> int:
    """Pixels that the bars take."""
    return sum(len(spreads) * BAR + GAP for _, spreads in _ratios(results))


def _ratios(results: Results) -> Iterator[tuple[Scenario, dict[str, Spread]]]:
    for scenario in results.scenarios:
        spreads = {name: scenario.ratio(name) for name in scenario.shown().values()}
        known = {name: spread for name, spread in spreads.items() if spread is not None}
        if known:
            yield scenario, known


def _bars(results: Results, colors: dict[str, str]) -> Iterator[str]:
    """Bars from 1 to the ratio on a logarithmic scale, a thin line for the range."""
    spreads = [spread for _, known in _ratios(results) for spread in known.values()]
    if not spreads:
        return
    most = max(max(s.largest, 1 / s.least) for s in spreads)
    limit = max(math.log(most), math.log(2))
    middle = (LABELS + WIDTH - MARGIN) / 2
    scale = (WIDTH - MARGIN - LABELS) / 2 / limit

    def x(ratio: float) -> float:
        return middle + math.log(ratio) * scale

    bottom = HEAD + bars_height(results)
    for tick in _ticks(math.exp(limit)):
        for value, label in ((tick, str(tick)), (1 / tick, f"1/{tick}")):
            yield _line(x(value), HEAD, x(value), bottom, "#e3e3e3")
            yield _text(x(value), bottom + 14, label, size=10, anchor="middle")
    y = float(HEAD)
    for scenario, known in _ratios(results):
        yield _text(LABELS - 12, y + len(known) * BAR / 2 + 4, scenario.label, anchor="end")
        for name, spread in known.items():
            peer = peer_of(name)
            left, right = sorted((middle, x(spread.median)))
            yield _rect(left, y + 1, right - left, BAR - 2, colors[peer])
            at = y + BAR / 2
            yield _line(x(spread.least), at, x(spread.largest), at, "#333333")
            end = max(right, x(spread.largest)) + 5
            label = number(spread.median) + name.removeprefix(peer)
            yield _text(end, y + BAR - 3, label, size=10)
            y += BAR
        y += GAP
    yield _line(middle, HEAD - 4, middle, bottom, "#000000", 1.5)


def _lines(results: Results) -> Line:
    found: Line = {}
    for scenario in results.scenarios:
        match = _DECODE.match(scenario.label)
        for peer, name in scenario.shown().items() if match else ():
            assert match is not None
            point = int(match[1]), Spread.of(scenario.engines[name]).median
            found.setdefault(peer, []).append(point)
    return {name: sorted(points) for name, points in found.items()}


def _chart(lines: Line, colors: dict[str, str], top: int) -> Iterator[str]:
    """Tokens a second over the tokens of context, from 0."""
    points = [point for line in lines.values() for point in line]
    if not points:
        return
    x_most, y_most = max(x for x, _ in points), max(y for _, y in points) * 1.1
    left, width, bottom = MARGIN, WIDTH - 2 * MARGIN - 110, top + 20 + CHART

    def place(point: tuple[int, float]) -> tuple[float, float]:
        return left + point[0] / x_most * width, bottom - point[1] / y_most * CHART

    yield _text(16, top + 6, "decode, tokens a second over tokens of context", size=12)
    for n in sorted({x for x, _ in points}):
        at, _ = place((n, 0))
        yield _line(at, top + 20, at, bottom, "#eeeeee")
        yield _text(at, bottom + 16, str(n), size=10, anchor="middle")
    step = _nice_step(y_most)
    for i in range(int(y_most / step) + 1):
        _, at = place((0, i * step))
        yield _line(left, at, left + width, at, "#e3e3e3")
        yield _text(left - 6, at + 4, f"{i * step:g}", size=10, anchor="end")
    labels = _apart({name: place(line[-1])[1] for name, line in lines.items()})
    for name, line in lines.items():
        color, dots = colors[name], [place(point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in dots)
        yield _text(dots[-1][0] + 8, labels[name] + 4, name, color=color)


def _legend(names: Sequence[str], colors: dict[str, str]) -> Iterator[str]:
    x = float(LABELS + 60)
    for name in names:
        yield _rect(x, 17, 10, 10, colors[name])
        yield _text(x + 15, 26, name)
        x += 40 + 7 * len(name)


def _ticks(most: float) -> list[int]:
    """Powers of two, or of ten where those would be many."""
    step = 2 if most < 20 else 10
    return [step**i for i in range(1, int(math.log(most, step) + 1e-9) + 1)]


def _nice_step(most: float) -> float:
    """1, 2 or 5 times a power of ten, of which about five make the whole."""
    power = 10 ** math.floor(math.log10(most / 5))
    return float(next(step for step in (1, 2, 5, 10) if step * power * 5 >= most) * power)


def _apart(ends: dict[str, float]) -> dict[str, float]:
    """Heights of labels, moved so that none covers another."""
    placed: dict[str, float] = {}
    last = -math.inf
    for name, y in sorted(ends.items(), key=lambda item: item[1]):
        last = placed[name] = max(y, last + 13)
    return placed


def _rect(x: float, y: float, width: float, height: float, color: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{color}"/>'


def _line(x: float, y: float, x2: float, y2: float, color: str, width: float = 1) -> str:
    place = f'x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{color}" stroke-width="{width}"/>'


def _text(
    x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", color: str = "#222222"
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{color}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
