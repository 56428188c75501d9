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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from kvcellar.cellsets import (
    NO_CELLS,
    Cells,
    Span,
    as_cells,
    cell_bounds,
    cell_count,
    cell_numbers,
    cells_from_mask,
    cells_where,
    checked_id,
    clamp_delta,
    clamp_divisor,
    clamp_range,
    count_owners,
    first_gap,
    group_rows,
    means_all,
    owner_words,
    unpack_owners,
)
from kvcellar.errors import (
    InvariantError,
    PositionError,
    check_range,
)
from kvcellar.types import MAX_POSITION, AnyArray, BoolArray, Int32Array, Int64Array, OwnerBits

__all__ = ["CellTable", "Cells", "check_moved", "padded_n_kv"]

_SCAN = 4096
_EMPTY = (-1, 0, -1, 0)  # position, pending shift, token and owners of a free cell


class CellTable:
    """The metadata of ``size`` cells and of the sequences ``0 .. n_seq_max-1`` that own them.

    The arrays may be read freely; only the verbs change them. ``head`` is where the next search
    for free cells starts. ``reserved`` marks cells that may not be filled although they are free,
    or become free later; None: there are none. ``shifted`` is False if no shift is pending.

    Verbs and questions check ids and ranges; what caches build on takes them as they are. Either
    keeps ``used``, ``token_count``, ``_bound`` and the sequences' spans true, and costs a few
    passes over the cells that enclose its sequence.

    A verb that is interrupted leaves a table half changed. Whoever owns the table takes that back:
    :meth:`remember` notes how, and ``log`` gets the old values of cells before they are written.
    """

    def __init__(self, size: int, n_seq_max: int) -> None:
        self.size = size = check_range("size", size, 1, MAX_POSITION)
        self.n_seq_max = n_seq_max = check_range("n_seq_max", n_seq_max, 1, MAX_POSITION)
        self.positions: Int32Array = np.full(size, -1, np.int32)
        self.pending: Int32Array = np.zeros(size, np.int32)
        self.tokens: Int32Array = np.full(size, -1, np.int32)
        self.owners: OwnerBits = np.zeros((owner_words(n_seq_max), size), np.uint64)
        self.reserved: BoolArray | None = None
        self.log: list[Callable[[], object]] | None = None  # None: nobody wants to take back
        self._reset()

    def _reset(self) -> None:
        self.head = 0
        self.used = 0
        self.token_count = 0
        self._bound = 0  # cells from here on are free
        self.shifted = False  # whether a pending shift may differ from 0
        self._spans = [Span() for _ in range(self.n_seq_max)]

    # -- questions

    def cell_max(self) -> int:
        """The index behind the last used cell, 0 when none is used; amortised O(1)."""
        step = _SCAN
        while self._bound and self.positions[self._bound - 1] < 0:
            lo = max(0, self._bound - step)
            busy = np.flatnonzero(self.positions[lo : self._bound] >= 0)
            self._bound = lo + int(busy[-1]) + 1 if len(busy) else lo
            step *= 4
        return self._bound

    def n_kv(self, padding: int) -> int:
        """How many cells attention has to look at."""
        return padded_n_kv(self.cell_max(), padding, self.size)

    def n_free(self) -> int:
        """How many cells may be filled."""
        n = self.size - self.used
        if self.reserved is not None:
            n -= int(np.count_nonzero(self.reserved & (self.positions < 0)))
        return n

    def taken(self, lo: int, hi: int) -> BoolArray:
        """Whether each of the cells ``lo .. hi`` is used or reserved: it may not be filled."""
        used: BoolArray = self.positions[lo:hi] >= 0
        return used if self.reserved is None else used | self.reserved[lo:hi]

    def span(self, seq_id: int) -> Span:
        """A sequence's count of cells, smallest and largest position (-1 when it is empty)."""
        if type(seq_id) is not int or not 0 <= seq_id < self.n_seq_max:
            seq_id = checked_id(seq_id, self.n_seq_max)
        span = self._spans[seq_id]
        if not span.fresh:
            span = self._spans[seq_id] = Span.measure(self._owned(seq_id), self.positions)
        return span

    def seq_count(self, seq_id: int) -> int:
        """How many cells a sequence owns."""
        return self.span(seq_id).count

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position of a sequence, -1 when it is empty."""
        return self.span(seq_id).pos_min

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position of a sequence, -1 when it is empty."""
        return self.span(seq_id).pos_max

    def owners_of(self, cell: int) -> tuple[int, ...]:
        """The sequences that own a cell, ascending."""
        return tuple(unpack_owners(self.owners[:, [cell]])[1].tolist())

    def cells_of(self, seq_id: int) -> Int64Array:
        """The cells of a sequence in the order of their positions."""
        cells = cell_numbers(self._owned(self.checked(seq_id)))
        return cells[np.argsort(self.positions[cells], kind="stable")]

    def tokens_of(self, seq_id: int) -> Int32Array:
        """The token ids of a sequence in the order of their positions (-1: not known)."""
        return self.tokens[self.cells_of(seq_id)]

    def select(self, seq_id: int, p0: int = -1, p1: int = -1) -> Cells:
        """The cells of a sequence with positions in the range, by ascending cell number."""
        return self.cells_between(self.checked(seq_id), *clamp_range(p0, p1))

    def shared(self, cells: Cells) -> Cells:
        """Those of the cells that have more than one owner."""
        if self.token_count == self.used:
            return NO_CELLS
        bits = self.owners[:, cells]
        many = (bits & (bits - np.uint64(1))).any(axis=0)  # a word with two bits or more
        return cells_where(cells, many | (np.count_nonzero(bits, axis=0) > 1))

    def checked(self, seq_id: int) -> int:
        """The id as an int.

        Raises:
            SequenceIdError: it is outside ``[0, n_seq_max)``.
        """
        if type(seq_id) is int and 0 <= seq_id < self.n_seq_max:
            return seq_id
        return checked_id(seq_id, self.n_seq_max)

    # -- llama.cpp's verbs

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Drop a sequence (-1: every one) from cells in the range; ownerless cells are freed."""
        lo, hi = clamp_range(p0, p1)
        if means_all(seq_id):
            at = self.positions[: self._bound]
            freed = cells_from_mask((at >= lo) & (at < hi), 0)
            self._free(freed)
        else:
            seq = self.checked(seq_id)
            freed = self.drop(seq, self.cells_between(seq, lo, hi))
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
        self.drop(b, self.cells_between(b, lo, hi))
        cells = self.cells_between(a, lo, hi)
        if n := cell_count(cells):
            self._before(cells)
            self.owners[b >> 6][cells] |= np.uint64(1 << (b & 63))
            self.token_count += n
            self._spans[b] = self._spans[b].added(cells, self.positions[cells])

    def seq_keep(self, seq_id: int) -> None:
        """Free every cell that the sequence does not own and make it the only owner of the rest."""
        seq = self.checked(seq_id)
        cells = self.cells_between(seq, 0, MAX_POSITION)
        span, shifted, head = self.span(seq), self.shifted, self.head
        arrays = (self.positions, self.pending, self.tokens)
        kept = [array[cells].copy() for array in arrays]
        self.clear()
        for array, values in zip(arrays, kept, strict=True):
            array[cells] = values
        self.owners[seq >> 6][cells] = np.uint64(1 << (seq & 63))
        self.used = self.token_count = span.count
        self._bound, self.shifted, self._spans[seq] = span.hi, shifted, span
        self.head = min(head, first_gap(cells))

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions in the range, for all owners of a cell; those below 0 are freed.

        Raises:
            PositionError: a position would pass the largest one.
        """
        lo, hi = clamp_range(p0, p1)
        seq, delta = self.checked(seq_id), clamp_delta(delta)
        if hi <= lo:
            return
        cells, dead = self.cells_between(seq, lo, hi), NO_CELLS
        if cell_count(cells) and delta:
            at = self.positions[cells]
            check_moved(at, delta)
            if int(at.min()) + delta < 0:
                dead, cells = cells_where(cells, at < -delta), cells_where(cells, at >= -delta)
                at = self.positions[cells]
            self.shift(seq, cells, at, delta)
            self._free(dead)
        self.head = cell_bounds(dead)[0] if cell_count(dead) else 0

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions in the range by d, truncating, for all owners of a cell."""
        seq, d = self.checked(seq_id), clamp_divisor(d)
        cells = self.cells_between(seq, *clamp_range(p0, p1))
        if cell_count(cells) and d > 1:
            at = self.positions[cells]
            self.shift(seq, cells, at, at // np.int32(d) - at)

    def clear(self) -> None:
        """Free every cell; nothing is pending and head is 0."""
        self._before(slice(0, self._bound))
        self.positions.fill(-1)
        self.pending.fill(0)
        self.tokens.fill(-1)
        self.owners.fill(0)
        self._reset()

    # -- what caches build on: ids and ranges are checked already

    def cells_between(self, seq: int, lo: int, hi: int) -> Cells:
        """The cells of a sequence with positions from lo to before hi, ascending."""
        span, cells = self._spans[seq], self._owned(seq)
        low, high = (span.pos_min, span.pos_max) if span.fresh else (0, MAX_POSITION - 1)
        if lo <= low and high < hi:
            return cells
        at = self.positions[cells]
        mask = at >= lo
        if hi <= high:
            mask &= at < hi
        return cells_where(cells, mask)

    def pending_cells(self) -> Int64Array:
        """The cells whose K row waits to be rotated."""
        return np.flatnonzero(self.pending[: self._bound])

    def settle(self, cells: Int64Array) -> None:
        """Forget the pending shifts of cells: their K rows stand at their positions now."""
        if len(cells):
            self._before(as_cells(cells))
            self.pending[cells] = 0

    def place(
        self,
        cells: Int64Array,
        positions: Int32Array,
        owners: OwnerBits,
        tokens: Int32Array | None,
        pending: int = 0,
    ) -> None:
        """Put tokens into free cells, K rows ``pending`` before them; head stays where it is."""
        n, at = len(cells), as_cells(cells)
        is_taken = (self.positions[at] >= 0).any()
        if is_taken or (self.reserved is not None and self.reserved[at].any()):
            raise InvariantError(f"cells {cells.tolist()} are to be filled but not all are free")
        self._before(at)
        self.positions[at] = positions
        self.owners[:, at] = owners
        if tokens is not None:
            self.tokens[at] = tokens
        self.pending[at] = pending
        self.shifted |= pending != 0
        self.used += n
        self._bound = max(self._bound, at.stop if isinstance(at, slice) else int(at.max()) + 1)
        rows, seq_ids = unpack_owners(owners)
        self.token_count += len(rows)
        for seq, mine in group_rows(rows, seq_ids):
            if len(mine) == n:  # the only owner, or one of all cells
                self._spans[seq] = self._spans[seq].added(at, positions)
            else:
                part = as_cells(cells[mine])
                self._spans[seq] = self._spans[seq].added(part, positions[mine])

    def set_reserved(self, cells: Int64Array, value: bool) -> None:
        """Say of cells, where some are reserved, that they are, or are not any more."""
        assert self.reserved is not None
        if self.log is not None:
            self.log.append(partial(self.reserved.__setitem__, cells, self.reserved[cells]))
        self.reserved[cells] = value

    def held_before(self) -> BoolArray | None:
        """Which free cells were held when what is logged began; None: there are none."""
        found: BoolArray | None = None
        for entry in self.log or ():
            if isinstance(entry, OldCells) and entry.arrays[0] is self.positions:
                cells = entry.held
                if cell_count(cells):
                    found = np.zeros(self.size, np.bool_) if found is None else found
                    found[cells] = True
        return found

    def release(self, cells: Int64Array) -> None:
        """Free exactly these cells, for all owners; head stays where it is."""
        if len(cells):
            self._free(as_cells(cells))

    def drop(self, seq: int, cells: Cells) -> Cells:
        """Drop a sequence from cells that it owns; returns those freed by that. Head stays."""
        n = cell_count(cells)
        if n == 0:
            return NO_CELLS
        self._before(cells)
        unshared = self.token_count == self.used
        self.token_count -= n
        span = self._spans[seq]
        if span.fresh and n == span.count:
            self._spans[seq] = Span()
        else:
            self._spans[seq] = span.stale()
        if not unshared:
            self.owners[seq >> 6][cells] &= ~np.uint64(1 << (seq & 63))
            left = self.owners[0][cells]
            for words in self.owners[1:]:
                left = left | words[cells]
            cells = cells_where(cells, np.equal(left, 0))
        self._wipe(cells)
        return cells

    def shift(self, seq: int, cells: Cells, at: Int32Array, change: int | Int32Array) -> None:
        """Move cells of a sequence, which stand ``at`` these positions, for all of their owners."""
        if len(at):
            self._before(cells)
            self.positions[cells] = at + change
            self.pending[cells] += change
            self.shifted = True
            for owner in [seq] if self.used == self.token_count else self._owners_among(cells):
                self._spans[owner] = self._spans[owner].moved()

    def move(self, src: Int64Array, dst: Int64Array) -> None:
        """Put free cells dst in the place of used cells src; no cell may be in both."""
        self._before(dst)
        self._before(src)
        for array in (self.positions, self.pending, self.tokens, *self.owners):
            array[dst] = array[src]
        for seq in self._owners_among(dst):
            self._spans[seq] = self._spans[seq].including(dst)
        self.used += len(src)
        self._bound = max(self._bound, cell_bounds(dst)[1])
        self._wipe(src)

    def split(self, seq: int, src: Int64Array, dst: Int64Array) -> None:
        """Give a sequence free cells dst in place of the cells src that it shares."""
        at, pending, tokens = self.positions[src], self.pending[src], self.tokens[src]
        bits = np.zeros((len(self.owners), len(src)), np.uint64)
        bits[seq >> 6] = 1 << (seq & 63)
        self.drop(seq, src)
        self.place(dst, at, bits, tokens)
        self.pending[dst] = pending

    # -- as a whole

    def remember(self) -> Callable[[], None]:
        """Return what puts back everything but what ``log`` does, however often it is called."""
        facts, spans = dict(vars(self)), tuple(self._spans)

        def undo() -> None:
            vars(self).update(facts)
            self._spans = list(spans)

        return undo

    def save(self) -> SavedCells:
        """The state of all cells and sequences, for :meth:`load`."""
        n = self.cell_max()
        arrays = tuple([array[..., :n].copy() for array in self._arrays()])
        spans = tuple(self._spans)
        return SavedCells(arrays, self.head, self.used, self.token_count, self.shifted, spans)

    def load(self, saved: SavedCells) -> None:
        """Restore what :meth:`save` returned; the size may not have changed since."""
        n, top = saved.arrays[0].shape[-1], self._bound
        self._before(slice(0, max(n, top)))
        for array, values, empty in zip(self._arrays(), saved.arrays, _EMPTY, strict=True):
            array[..., :n] = values
            array[..., n:top] = empty
        self._bound = n
        self.head, self.used, self.token_count = saved.head, saved.used, saved.token_count
        self.shifted = saved.shifted
        self._spans = list(saved.spans)

    def resize(self, size: int) -> None:
        """Resize to ``size`` cells; those that go must be free. A head that goes with them is 0."""
        if self.cell_max() > size:
            raise InvariantError(f"cell {self.cell_max() - 1} is used and cannot go")
        for seq in range(self.n_seq_max):
            self.span(seq)  # bounds that are not exact could reach beyond the end
        kept = min(size, self.size)
        grown = []
        for array, empty in zip(self._arrays(), _EMPTY, strict=True):
            new = np.full((*array.shape[:-1], size), empty, array.dtype)
            new[..., :kept] = array[..., :kept]
            grown.append(new)
        self.positions, self.pending, self.tokens, self.owners = grown
        self.size = size
        self.head = self.head if self.head < size else 0

    def check(self) -> None:
        """Prove invariants 1 to 4 by brute force.

        Raises:
            InvariantError: one does not hold; the message cites its number.
        """
        arrays: list[AnyArray] = [self.positions, self.pending, self.tokens, self.owners]
        arrays += [] if self.reserved is None else [self.reserved]
        owned = np.asarray(self.owners.any(axis=0), np.bool_)
        free = ~owned
        _require(1, (self.positions[free] == -1).all(), "a free cell has a position")
        _require(1, (self.pending[free] == 0).all(), "a free cell has a pending shift")
        _require(1, (self.tokens[free] == -1).all(), "a free cell has a token")
        _require(1, (self.positions[owned] >= 0).all(), "an owned cell has no position")
        rows, seq_ids = unpack_owners(self.owners)
        n_used = int(owned.sum())
        _require(2, self.used == n_used, f"used is {self.used}, {n_used} cells are owned")
        _require(2, self.token_count == len(rows), f"token_count is not {len(rows)}")
        _require(2, not owned[self._bound :].any(), f"a cell at or behind {self._bound} is owned")
        _require(2, 0 <= self.head < self.size, f"head is {self.head}")
        _require(2, all(array.shape[-1] == self.size for array in arrays), "an array is too short")
        stands = self.positions[owned].astype(np.int64) - self.pending[owned]
        _require(4, (stands >= 0).all(), "a K row stands at a negative position")
        _require(4, self.shifted or not self.pending.any(), "a pending shift would be overlooked")
        _require(3, (seq_ids < self.n_seq_max).all(), "a cell is owned by an unknown sequence")
        for seq, span in enumerate(self._spans):
            cells = rows[seq_ids == seq]
            fits = not len(cells) or (span.lo <= cells[0] and cells[-1] < span.hi)
            fits = fits and bool(np.isin(cells, near := cell_numbers(span.candidates())).all())
            fits = fits and not (span.exact and len(near) > len(cells))
            _require(3, fits, f"cells of sequence {seq} lie outside {span}")
            exact = Span.measure(cells, self.positions)
            _require(3, not span.fresh or span == exact, f"sequence {seq} is {exact}, not {span}")

    # -- steps

    def _arrays(self) -> tuple[AnyArray, ...]:
        return self.positions, self.pending, self.tokens, self.owners

    def _owned(self, seq: int) -> Cells:
        """All cells of a sequence, ascending; remembered until it loses some."""
        span = self._spans[seq]
        cells = slice(span.lo, span.hi) if span.cells is None else span.candidates()
        if not span.exact:
            words = self.owners[seq >> 6][cells]
            cells = cells_where(cells, np.not_equal(words & np.uint64(1 << (seq & 63)), 0))
            self._spans[seq] = span.narrowed(cells)
        return cells

    def _owners_among(self, cells: Cells) -> list[int]:
        found = []
        for i, words in enumerate(self.owners):
            bits = int(np.bitwise_or.reduce(words[cells]))
            while bits:
                found.append(64 * i + (bits & -bits).bit_length() - 1)
                bits &= bits - 1
        return found

    def _before(self, cells: Cells) -> None:
        """Log what cells are like before they are written."""
        if self.log is not None:
            self.log.append(OldCells.of(cells, self._arrays()))

    def _free(self, cells: Cells) -> None:
        n = cell_count(cells)
        if n:
            for seq in self._owners_among(cells):
                self._spans[seq] = self._spans[seq].stale()
            self._before(cells)
            unshared = self.token_count == self.used
            self.token_count -= n if unshared else count_owners(self.owners[:, cells])
            self._wipe(cells)

    def _wipe(self, cells: Cells) -> None:
        self.positions[cells] = -1
        if self.shifted:
            self.pending[cells] = 0
        self.tokens[cells] = -1
        for words in self.owners:
            words[cells] = 0
        self.used -= cell_count(cells)


@dataclass(frozen=True, slots=True)
class OldCells:
    """What cells were like before they were written; a call puts that back."""

    cells: Cells
    arrays: tuple[AnyArray, ...]
    values: tuple[AnyArray, ...]

    @classmethod
    def of(cls, cells: Cells, arrays: tuple[AnyArray, ...]) -> OldCells:
        """Copies of the values of cells in arrays."""
        return cls(cells, arrays, tuple([array[..., cells].copy() for array in arrays]))

    @property
    def held(self) -> Cells:
        """Those of the cells that were used."""
        return cells_where(self.cells, self.values[0] >= 0)

    def __call__(self) -> None:
        """Put the values back."""
        for array, values in zip(self.arrays, self.values, strict=True):
            array[..., self.cells] = values


class SavedCells(NamedTuple):
    """A table as it was; cells behind those of the arrays were free."""

    arrays: tuple[AnyArray, ...]
    head: int
    used: int
    token_count: int
    shifted: bool
    spans: tuple[Span, ...]


def padded_n_kv(cell_max: int, padding: int, size: int) -> int:
    """How many cells attention looks at when those from ``cell_max`` on do not matter."""
    return min(size, max(padding, -(-cell_max // padding) * padding))


def check_moved(at: Int32Array, delta: int) -> None:
    """Raise PositionError if moving these positions by delta would pass the largest one."""
    if (top := int(at.max())) + delta >= MAX_POSITION:
        raise PositionError(
            f"seq_add by {delta} would move position {top} to {top + delta}; "
            f"positions must stay below {MAX_POSITION}"
        )


def _require(number: int, holds: object, what: str) -> None:
    if not holds:
        raise InvariantError(f"invariant {number} is broken: {what}")
