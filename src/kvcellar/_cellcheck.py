"""Brute-force proof of the cell table's invariants; the numbers are those of ``cells.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcellar._cellsets import cell_numbers
from kvcellar._cellspan import Span
from kvcellar.errors import InvariantError
from kvcellar.types import AnyArray, unpack_owners

if TYPE_CHECKING:
    from kvcellar._cellstate import CellState


def _require(number: int, holds: object, what: str) -> None:
    if not holds:
        raise InvariantError(f"invariant {number} is broken: {what}")


def check_cells(table: CellState, bound: int, shifted: bool, spans: Sequence[Span]) -> None:
    """Raise InvariantError unless the table and what it derives agree."""
    arrays: list[AnyArray] = [table.positions, table.pending, table.tokens, table.owners]
    arrays += [] if table.reserved is None else [table.reserved]
    owned = np.asarray(table.owners.any(axis=0), np.bool_)
    free = ~owned
    _require(1, (table.positions[free] == -1).all(), "a free cell has a position")
    _require(1, (table.pending[free] == 0).all(), "a free cell has a pending shift")
    _require(1, (table.tokens[free] == -1).all(), "a free cell has a token")
    _require(1, (table.positions[owned] >= 0).all(), "an owned cell has no position")
    rows, seq_ids = unpack_owners(table.owners)
    n_used = int(owned.sum())
    _require(2, table.used == n_used, f"used is {table.used}, {n_used} cells are owned")
    _require(2, table.token_count == len(rows), f"token_count is not {len(rows)}")
    _require(2, not owned[bound:].any(), f"a cell at or behind {bound} is owned")
    _require(2, 0 <= table.head < table.size, f"head is {table.head}")
    _require(2, all(array.shape[-1] == table.size for array in arrays), "an array is too short")
    stands = table.positions[owned].astype(np.int64) - table.pending[owned]
    _require(4, (stands >= 0).all(), "a K row stands at a negative position")
    _require(4, shifted or not table.pending.any(), "a pending shift would be overlooked")
    _require(3, (seq_ids < table.n_seq_max).all(), "a cell is owned by an unknown sequence")
    for seq, span in enumerate(spans):
        cells = rows[seq_ids == seq]
        fits = not len(cells) or (span.lo <= cells[0] and cells[-1] < span.hi)
        fits = fits and bool(np.isin(cells, near := cell_numbers(span.candidates())).all())
        fits = fits and not (span.exact and len(near) > len(cells))
        _require(3, fits, f"cells of sequence {seq} lie outside {span}")
        exact = Span.measure(cells, table.positions)
        _require(3, not span.fresh or span == exact, f"sequence {seq} is {exact}, not {span}")
