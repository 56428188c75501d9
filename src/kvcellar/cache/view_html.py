"""A view of a cache as a piece of HTML that stands on its own, for notebooks and pages.

1. Nothing is loaded and nothing is run: one element with its style inside.
2. Whatever comes from outside (token texts) is escaped; what cannot be seen is spelled out.
3. Colours only add to glyphs and descriptions, and are legible on light and dark pages.
4. Its size is bounded: large caches are shown in buckets of neighbouring cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from kvcellar.cache.view import FREE, SHARED, CacheView

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
