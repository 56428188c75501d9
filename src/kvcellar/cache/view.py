"""The cells of a cache at one moment, as a value that later changes do not reach.

Printing a view shows a glyph a cell: the owner, ``+`` for several, a dot for a free cell. Large
caches are shown in buckets of neighbouring cells, each by what most of them hold. A terminal gets
colours through rich, a notebook HTML, other programs JSON.

The HTML of :func:`render_html` stands on its own:

1. It loads and runs nothing: one element with its style inside.
2. Text from outside (token texts) is escaped; invisible characters are spelled out.
3. Colours only add to glyphs and descriptions, and are legible on light and dark pages.
4. Its size is bounded: large caches are shown in buckets of neighbouring cells.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcellar.cellsets import unpack_owners
from kvcellar.errors import (
    check_callable,
    check_range,
)
from kvcellar.types import MAX_POSITION, Int32Array, OwnerBits

if TYPE_CHECKING:
    from rich.text import Text

    from kvcellar.cells import CellTable

FREE, SHARED = -1, -2
FIGURES = (
    "n_cells",
    "n_seq_max",
    "token_count",
    "used_cells",
    "max_contiguous",
    "max_contiguous_idx",
)
"""The counts of a view, under the names of llama.cpp's view."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WIDTH = 64
_MAX_GLYPHS = 1024
_MAX_INDENT = 64
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")


@dataclass(frozen=True, eq=False)
class CacheView:
    """The cells of a cache, and how full and how fragmented it is.

    ``token_count`` counts a shared cell once for each owner, ``used_cells`` once.
    """

    n_cells: int
    n_seq_max: int  # owners shown a cell, the smallest first
    token_count: int
    used_cells: int
    positions: Int32Array  # [n_cells], -1 in a free cell
    tokens: Int32Array  # [n_cells], -1 where not known
    owners: OwnerBits  # [n_words, n_cells]
    texts: Mapping[int, str] = field(default_factory=dict)  # by token, as far as known

    @classmethod
    def of(cls, table: CellTable, n_seq_max: int | None = None) -> CacheView:
        """The state of a table, with at most n_seq_max owners (None: all) shown a cell."""
        shown = table.n_seq_max
        if n_seq_max is not None:
            shown = check_range("n_seq_max", n_seq_max, 1, MAX_POSITION)
        arrays = (table.positions.copy(), table.tokens.copy(), table.owners.copy())
        for array in arrays:
            array.flags.writeable = False
        return cls(table.size, shown, table.token_count, table.used, *arrays)

    @cached_property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """The owners of each cell, ascending, at most ``n_seq_max`` of them."""
        rows, seq_ids = unpack_owners(self.owners)
        ends = np.searchsorted(rows, np.arange(self.n_cells + 1))
        bounds = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ids = seq_ids.tolist()
        return tuple(tuple(ids[a : min(b, a + self.n_seq_max)]) for a, b in bounds)

    @cached_property
    def _longest_free(self) -> tuple[int, int]:
        free = np.concatenate(([False], self.positions < 0, [False]))
        edges = np.flatnonzero(free[1:] != free[:-1])
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        if not len(starts):
            return 0, -1
        best = int(lengths.argmax())
        return int(lengths[best]), int(starts[best])

    @property
    def max_contiguous(self) -> int:
        """How long the longest run of free cells is."""
        return self._longest_free[0]

    @property
    def max_contiguous_idx(self) -> int:
        """Where the longest run of free cells starts, -1 if no cell is free."""
        return self._longest_free[1]

    @cached_property
    def _holders(self) -> Int32Array:
        """For each cell its owner, ``SHARED`` or ``FREE``."""
        holders = np.full(self.n_cells, FREE, np.int32)
        for i, words in enumerate(self.owners):
            owned = np.flatnonzero(words)
            bits = words[owned]
            is_shared = (bits & (bits - np.uint64(1)) != 0) | (holders[owned] != FREE)
            seq_ids = 64 * i + np.frexp(bits.astype(np.float64))[1] - 1
            holders[owned] = np.where(is_shared, SHARED, seq_ids)
        return holders

    @property
    def cells_per_glyph(self) -> int:
        """How many neighbouring cells one glyph stands for."""
        return -(-self.n_cells // _MAX_GLYPHS)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """What each glyph stands for: a sequence, ``SHARED`` or ``FREE``."""
        step = self.cells_per_glyph
        if step == 1:
            return tuple(self._holders.tolist())
        kinds = []
        for start in range(0, self.n_cells, step):
            found, counts = np.unique(self._holders[start : start + step], return_counts=True)
            kinds.append(int(found[counts.argmax()]))
        return tuple(kinds)

    @property
    def glyphs(self) -> str:
        """The picture: a letter or digit for an owner, ``+`` for several, a dot for none."""
        return "".join(_glyph(kind) for kind in self.kinds)

    @property
    def summary(self) -> str:
        """The figures in a line."""
        step = self.cells_per_glyph
        scale = "" if step == 1 else f", {step} cells a glyph"
        return (
            f"{self.used_cells} of {self.n_cells} cells used, {self.token_count} tokens, "
            f"longest free run {self.max_contiguous}{scale}"
        )

    def with_texts(self, text_of: Callable[[int], str]) -> CacheView:
        """The same view knowing what its tokens say, for HTML and JSON."""
        check_callable("text_of", text_of)
        known = np.unique(self.tokens[self.tokens >= 0]).tolist()
        return replace(self, texts={token: text_of(token) for token in known})

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they go into JSON.

        The figures under their names here, and ``cells``: for each used cell ``cell`` (its
        number), ``position``, ``sequences`` (its owners, at most ``n_seq_max``), ``token`` (None
        where not known) and ``text`` (None unless the view was told by :meth:`with_texts`).
        """
        rows = []
        for cell in np.flatnonzero(self.positions >= 0).tolist():
            token = int(self.tokens[cell])
            rows.append(
                {
                    "cell": cell,
                    "position": int(self.positions[cell]),
                    "sequences": list(self.sequences[cell]),
                    "token": token if token >= 0 else None,
                    "text": self.texts.get(token),
                }
            )
        return {**{name: getattr(self, name) for name in FIGURES}, "cells": rows}

    def to_json(self, indent: int | None = None) -> str:
        """:meth:`as_dict` as JSON text, in ASCII."""
        if indent is not None:
            indent = check_range("indent", indent, 0, _MAX_INDENT)
        return json.dumps(self.as_dict(), indent=indent)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CacheView):
            return NotImplemented
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return all(np.array_equal(a, b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Callable[..., CacheView], tuple[object, ...]]:
        return _view, tuple(getattr(self, f.name) for f in fields(self))

    def __str__(self) -> str:
        text = self.glyphs
        lines = (text[i : i + _WIDTH] for i in range(0, len(text), _WIDTH))
        return "\n".join((self.summary, *lines))

    def _repr_html_(self) -> str:
        return render_html(self)

    def __rich__(self) -> Text:
        """The view in colours: a colour an owner, dim dots for free cells."""
        from rich.text import Text

        text = Text(self.summary)
        for i, kind in enumerate(self.kinds):
            text.append("\n" if i % _WIDTH == 0 else "")
            text.append(_glyph(kind), _style(kind))
        return text


def _view(*values: Any) -> CacheView:
    """Rebuild a view that was copied or pickled; arrays come out of that writeable."""
    view = CacheView(*values)
    for array in (view.positions, view.tokens, view.owners):
        array.flags.writeable = False
    return view


def _glyph(kind: int) -> str:
    if kind == FREE:
        return "."
    return "+" if kind == SHARED else _DIGITS[kind % len(_DIGITS)]


def _style(kind: int) -> str:
    if kind == FREE:
        return "dim"
    return "bold white" if kind == SHARED else _COLOURS[kind % len(_COLOURS)]


# Black on colours of middle lightness reads well whatever the page behind them is.
_HUES = (190, 130, 50, 310, 220, 0, 170, 90)
_STYLE = (
    ".kvcellar-view{margin:0;font:13px/1.4 monospace}"
    ".kvcellar-view div{display:grid;grid-template-columns:repeat(auto-fill,1.5em);gap:1px}"
    ".kvcellar-view i{font-style:normal;text-align:center;border-radius:2px;color:#000}"
    ".kvcellar-view i.free{color:inherit;opacity:.6}"
    ".kvcellar-view i.shared{background:#aaa;font-weight:bold}"
) + "".join(f".kvcellar-view i.s{i}{{background:hsl({h},65%,65%)}}" for i, h in enumerate(_HUES))
_TEXT_LIMIT = 40


def render_html(view: CacheView) -> str:
    """The view as HTML: a figure with a list of cells, each described by its title."""
    titles = _cells(view) if view.cells_per_glyph == 1 else _buckets(view)
    items = "".join(
        f'<i role="listitem" class="{_css_class(kind)}" title="{escape(title)}">{glyph}</i>'
        for kind, glyph, title in zip(view.kinds, view.glyphs, titles, strict=True)
    )
    return (
        f'<figure class="kvcellar-view"><style>{_STYLE}</style>'
        f"<figcaption>{escape(view.summary)}</figcaption>"
        f'<div role="list" aria-label="cells of the cache">{items}</div></figure>'
    )


def _cells(view: CacheView) -> Iterator[str]:
    """What there is to say about each cell."""
    rows = zip(view.positions.tolist(), view.sequences, view.tokens.tolist(), strict=True)
    for cell, (position, seq_ids, token) in enumerate(rows):
        if position < 0:
            yield f"cell {cell}: free"
            continue
        owners = ", ".join(map(str, seq_ids))
        parts = [
            f"cell {cell}: position {position}",
            f"sequence{'s' * (len(seq_ids) > 1)} {owners}",
        ]
        if token >= 0:
            parts.append(f"token {token}")
        if token in view.texts:
            parts.append(f"“{_visible(view.texts[token])}”")
        yield ", ".join(parts)


def _buckets(view: CacheView) -> Iterator[str]:
    """What there is to say about each bucket of cells."""
    step = view.cells_per_glyph
    starts = range(0, view.n_cells, step)
    used = np.add.reduceat(view.positions >= 0, np.array(starts), dtype=np.int64).tolist()
    for start, kind, n_used in zip(starts, view.kinds, used, strict=True):
        stop = min(start + step, view.n_cells)
        most = {FREE: "free", SHARED: "shared"}.get(kind, f"of sequence {kind}")
        yield f"cells {start} to {stop - 1}: {n_used} of {stop - start} used, most {most}"


def _css_class(kind: int) -> str:
    return {FREE: "free", SHARED: "shared"}.get(kind, f"s{kind % len(_HUES)}")


def _visible(text: str) -> str:
    """The text with what cannot be seen, or would turn it around, spelled out; not too long."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_TEXT_LIMIT]
    )
    return shown + "…" * (len(text) > _TEXT_LIMIT)
