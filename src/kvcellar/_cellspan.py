"""What a table remembers of a sequence, so that verbs need not look at the cells of others."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvcellar._cellsets import Cells, ascending, cell_bounds, cell_count, cell_numbers
from kvcellar.types import Int32Array, Int64Array

_MAX_RECENT = 64


@dataclass(slots=True)
class Span:
    """What is known of a sequence without a scan.

    Its cells always lie among the *candidates*: those from ``lo`` to ``hi``, or, once they are not
    neighbours, those of ``near`` (ascending) and of ``recent``. While ``exact``, every candidate
    is its own. ``count``, ``pos_min`` and ``pos_max`` hold while ``fresh``; then the candidates
    are exact too, and the bounds as tight as can be.

    Arrays and tuples are never changed in place, so a shallow copy is a copy.
    """

    lo: int = 0
    hi: int = 0
    fresh: bool = True
    count: int = 0
    pos_min: int = -1
    pos_max: int = -1
    near: Int64Array | None = field(default=None, compare=False)
    recent: tuple[Cells, ...] = field(default=(), compare=False)
    exact: bool = field(default=True, compare=False)

    @classmethod
    def measure(cls, cells: Cells, positions: Int32Array) -> Span:
        """The span of a sequence that owns exactly these cells, ascending."""
        n = cell_count(cells)
        if n == 0:
            return cls()
        at = positions[cells]
        near = None if isinstance(cells, slice) else cells
        return cls(*cell_bounds(cells), True, n, int(at.min()), int(at.max()), near)

    @property
    def is_dense(self) -> bool:
        """Whether the sequence is known to own every cell within its bounds."""
        return self.exact and self.near is None

    def candidates(self) -> Cells:
        """Cells among which all of the sequence's are, ascending."""
        if self.near is None:
            return slice(self.lo, self.hi)
        if self.recent:
            new = ascending(np.concatenate([cell_numbers(cells) for cells in self.recent]))
            start = int(np.searchsorted(self.near, new[0]))
            if start < len(self.near):
                new = np.union1d(self.near[start:], new)
            self.near, self.recent = np.concatenate((self.near[:start], new)), ()
        return self.near

    def know(self, cells: Cells) -> None:
        """These, ascending, are the sequence's cells."""
        self.exact, self.recent = True, ()
        if isinstance(cells, slice):
            self.near, self.lo, self.hi = None, cells.start, cells.stop
        else:
            self.near = cells

    def add(self, cells: Cells, positions: Int32Array) -> None:
        """Take in cells that the sequence did not own before, at least one."""
        at = positions[cells]
        lowest, highest = int(at.min()), int(at.max())
        self.count += cell_count(cells)
        self.pos_min = lowest if self.pos_min < 0 else min(self.pos_min, lowest)
        self.pos_max = max(self.pos_max, highest)
        self._include(cells)

    def include(self, cells: Cells) -> None:
        """Let these be candidates too; the rest is no longer known."""
        self.doubt()
        self._include(cells)

    def doubt(self) -> None:
        """Some candidates may not be the sequence's any more."""
        self.fresh = self.exact = False

    def _include(self, cells: Cells) -> None:
        lo, hi = cell_bounds(cells)
        if self.hi == 0:
            self.lo, self.hi = lo, hi
            self.near = None if isinstance(cells, slice) else ascending(cells)
            return
        if self.near is not None:
            self.recent = (*self.recent, cells)
            if len(self.recent) > _MAX_RECENT:
                self.candidates()
        elif self.exact and not (isinstance(cells, slice) and (lo == self.hi or hi == self.lo)):
            self.near, self.recent = cell_numbers(slice(self.lo, self.hi)), (cells,)
        self.lo, self.hi = min(self.lo, lo), max(self.hi, hi)
