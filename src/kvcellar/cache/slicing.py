"""A range of positions of what was taken out of a cache without states or windows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvcellar.cache.content import CacheContent, CellContent, RowBytes
from kvcellar.cellsets import Cells, as_cells
from kvcellar.errors import NotSupported


def between(content: CacheContent, lo: int, hi: int) -> CacheContent:
    """What stands at positions from lo to before hi; itself if that is all.

    Raises:
        NotSupported: there are states, or tokens that left a window: they cannot be cut.
    """
    if all(_is_between(group, lo, hi) for group in content.groups) and content.groups:
        return content
    if content.states is not None or content.has_slid:
        raise NotSupported(
            "a range of a snapshot with states or windows: they cannot be cut; load all of it"
        )
    groups = tuple(_between(group, lo, hi) for group in content.groups)
    return replace(content, groups=groups, start=max(content.start, lo))


def pick(rows: RowBytes, cells: Cells) -> RowBytes:
    """The rows of some of the cells; those of neighbours are views."""
    if not isinstance(cells, slice) and len(cells):
        cells = as_cells(cells)
    return RowBytes(tuple(k[cells] for k in rows.k), tuple(v[cells] for v in rows.v))


def _is_between(group: CellContent, lo: int, hi: int) -> bool:
    at = group.positions
    return len(at) == 0 or (int(at.min()) >= lo and int(at.max()) < hi)


def _between(group: CellContent, lo: int, hi: int) -> CellContent:
    cells = np.flatnonzero((group.positions >= lo) & (group.positions < hi))
    numbers = np.full(len(group.positions), -1, np.int64)
    numbers[cells] = np.arange(len(cells))
    pairs = group.owners[:, numbers[group.owners[0]] >= 0]
    return CellContent(
        positions=group.positions[cells],
        tokens=group.tokens[cells],
        owners=np.stack((numbers[pairs[0]], pairs[1])),
        rows=pick(group.rows, cells),
        slid=group.slid,
    )
