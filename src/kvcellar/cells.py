"""Which sequences own which cell, and at what position: NumPy arrays over all cells.

The table knows no K or V byte. Verbs carry llama.cpp's names; ranges are half open and a negative
bound is open. A verb does all of its work, or raises and changes nothing (invariant 5).

``check()`` proves by brute force:

1. A cell without owners has position -1, pending shift 0 and no token; an owned cell has a
   position of 0 or more.
2. ``used`` is the number of owned cells, ``token_count`` the sum of owners over cells.
3. A sequence's count, smallest and largest position, and the bounds of its cells equal a scan.
4. The pending shift of a cell is the sum of its moves since its K row was last rotated:
   ``position - pending`` is where the row stands, and never negative.
"""

from __future__ import annotations

import operator

import numpy as np

from kvcellar._cellsets import (
    NO_CELLS,
    Cells,
    as_cells,
    cell_bounds,
    cell_count,
    cells_from_mask,
    cells_where,
    clamp_range,
    first_gap,
    group_rows,
)
from kvcellar._cellstate import CellState, padded_n_kv
from kvcellar.errors import InvariantError, OptionError, PositionError
from kvcellar.types import MAX_POSITION, Int32Array, Int64Array, OwnerBits, unpack_owners

__all__ = ["CellTable", "Cells", "check_moved", "padded_n_kv"]


class CellTable(CellState):
    """The metadata of ``size`` cells and of the sequences ``0 .. n_seq_max-1`` that own them.

    The arrays may be read freely; only the verbs change them. ``head`` is where the next search
    for free cells starts. A verb costs a few passes over the cells that enclose its sequence.
    """

    # -- llama.cpp's verbs

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Drop a sequence (-1: every one) from cells in the range; ownerless cells are freed."""
        lo, hi = clamp_range(p0, p1)
        if seq_id == -1:
            at = self.positions[: self._bound]
            freed = cells_from_mask((at >= lo) & (at < hi), 0)
            self._free(freed)
        else:
            seq = self.checked(seq_id)
            freed = self._drop(seq, self._select(seq, lo, hi))
        if cell_count(freed):
            self.head = min(self.head, cell_bounds(freed)[0])
        return True

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Make dst an owner of src's cells in the range, in place of what dst had there."""
        a, b = self.checked(src), self.checked(dst)
        lo, hi = clamp_range(p0, p1)
        self.head = 0
        if a == b or hi <= lo:
            return
        self._drop(b, self._select(b, lo, hi))
        cells = self._select(a, lo, hi)
        if n := cell_count(cells):
            self.owners[b >> 6][cells] |= np.uint64(1 << (b & 63))
            self.token_count += n
            self._spans[b].add(cells, self.positions)

    def seq_keep(self, seq_id: int) -> None:
        """Free every cell that the sequence does not own and make it the only owner of the rest."""
        seq = self.checked(seq_id)
        cells = self._select(seq, 0, MAX_POSITION)
        span, shifted, head = self._known(seq), self._shifted, self.head
        arrays = (self.positions, self.pending, self.tokens)
        kept = [array[cells].copy() for array in arrays]
        self.clear()
        for array, values in zip(arrays, kept, strict=True):
            array[cells] = values
        self.owners[seq >> 6][cells] = np.uint64(1 << (seq & 63))
        self.used = self.token_count = span.count
        self._bound, self._shifted, self._spans[seq] = span.hi, shifted, span
        self.head = min(head, first_gap(cells))

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions in the range, for all owners of a cell; those below 0 are freed.

        Raises:
            PositionError: a position would pass the largest one.
        """
        lo, hi = clamp_range(p0, p1)
        seq, delta = self.checked(seq_id), operator.index(delta)
        if hi <= lo:
            return
        cells, dead = self._select(seq, lo, hi), NO_CELLS
        if cell_count(cells) and delta:
            at = self.positions[cells]
            check_moved(at, delta)
            if int(at.min()) + delta < 0:
                dead, cells = cells_where(cells, at < -delta), cells_where(cells, at >= -delta)
                at = self.positions[cells]
            self._shift(seq, cells, at, delta)
            self._free(dead)
        self.head = cell_bounds(dead)[0] if cell_count(dead) else 0

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions in the range by d, truncating, for all owners of a cell."""
        if d < 1:
            raise OptionError(f"seq_div by {d}: the divisor must be at least 1")
        seq = self.checked(seq_id)
        cells = self._select(seq, *clamp_range(p0, p1))
        if cell_count(cells) and d > 1:
            at = self.positions[cells]
            self._shift(seq, cells, at, at // np.int32(min(d, MAX_POSITION)) - at)

    def clear(self) -> None:
        """Free every cell; nothing is pending and head is 0."""
        self.positions.fill(-1)
        self.pending.fill(0)
        self.tokens.fill(-1)
        self.owners.fill(0)
        self._forget()

    # -- what caches build on

    def place(
        self,
        cells: Int64Array,
        positions: Int32Array,
        owners: OwnerBits,
        tokens: Int32Array | None,
        pending: int = 0,
    ) -> None:
        """Put tokens into free cells, K rows ``pending`` before them; head stays where it is."""
        at = as_cells(cells)
        is_taken = (self.positions[at] >= 0).any()
        if is_taken or (self.reserved is not None and self.reserved[at].any()):
            raise InvariantError(f"cells {cells.tolist()} are to be filled but not all are free")
        self.positions[at] = positions
        self.owners[:, at] = owners
        if tokens is not None:
            self.tokens[at] = tokens
        self.pending[at] = pending
        self._shifted |= pending != 0
        self.used += len(cells)
        self._bound = max(self._bound, cell_bounds(at)[1])
        rows, seq_ids = unpack_owners(owners)
        self.token_count += len(rows)
        for seq, mine in group_rows(rows, seq_ids):
            self._spans[seq].add(as_cells(cells[mine]), self.positions)

    def release(self, cells: Int64Array) -> None:
        """Free exactly these cells, whoever owns them; head stays where it is."""
        if len(cells):
            self._free(as_cells(cells))

    def move(self, src: Int64Array, dst: Int64Array) -> None:
        """Let free cells dst take the place of used cells src; no cell may be in both."""
        for array in (self.positions, self.pending, self.tokens, *self.owners):
            array[dst] = array[src]
        for seq in self._owners_among(dst):
            self._spans[seq].include(dst)
        self.used += len(src)
        self._bound = max(self._bound, cell_bounds(dst)[1])
        self._wipe(src)

    def split(self, seq_id: int, src: Int64Array, dst: Int64Array) -> None:
        """Let a sequence own free cells dst instead of the cells src that it shares."""
        seq = self.checked(seq_id)
        at, pending, tokens = (a[src] for a in (self.positions, self.pending, self.tokens))
        bits = np.zeros((len(self.owners), len(src)), np.uint64)
        bits[seq >> 6] = 1 << (seq & 63)
        self._drop(seq, src)
        self.place(dst, at, bits, tokens)
        self.pending[dst] = pending

    def disown(self, seq_id: int, cells: Cells) -> None:
        """Drop a sequence from cells that it owns; ownerless ones are freed, head stays."""
        self._drop(self.checked(seq_id), cells)

    def settle(self) -> None:
        """Forget pending shifts: the K rows stand at their positions now."""
        if self._shifted:
            self.pending[: self._bound] = 0
            self._shifted = False


def check_moved(at: Int32Array, delta: int) -> None:
    """Raise PositionError if moving these positions by delta would pass the largest one."""
    if (top := int(at.max())) + delta >= MAX_POSITION:
        raise PositionError(
            f"seq_add by {delta} would move position {top} to {top + delta}; "
            f"positions must stay below {MAX_POSITION}"
        )
