"""Sets of cells.

A set is a slice where its cells are neighbours, which makes everything done with it cheap, and an
array of distinct cell numbers where they are not. A :class:`Span` is what a table remembers of a
sequence, so that verbs need not look at the cells of others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from kvcellar.errors import (
    OptionError,
    SequenceIdError,
    shown,
    whole,
)
from kvcellar.types import MAX_POSITION, BoolArray, Int32Array, Int64Array, OwnerBits

Cells: TypeAlias = "slice[int, int, None] | Int64Array"

NO_CELLS: Cells = slice(0, 0)

_MAX_APPENDED = 64  # sets of cells that are put in order at once
_BITS_SET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1).sum(axis=1)


def cell_count(cells: Cells) -> int:
    """How many cells the set holds."""
    return cells.stop - cells.start if isinstance(cells, slice) else len(cells)


def cell_numbers(cells: Cells) -> Int64Array:
    """The set as an array."""
    if isinstance(cells, slice):
        return np.arange(cells.start, cells.stop, dtype=np.int64)
    return cells


def cell_bounds(cells: Cells) -> tuple[int, int]:
    """The smallest cell and the one behind the largest; the set may not be empty."""
    if isinstance(cells, slice):
        return cells.start, cells.stop
    return int(cells.min()), int(cells.max()) + 1


def ascending(numbers: Int64Array) -> Int64Array:
    """Cell numbers in order, each once."""
    return numbers if (numbers[1:] > numbers[:-1]).all() else np.unique(numbers)


def first_gap(cells: Cells) -> int:
    """The smallest cell number that an ascending set lacks."""
    if isinstance(cells, slice):
        return cells.stop if cells.start == 0 else 0
    gaps = np.flatnonzero(cells != np.arange(len(cells)))
    return int(gaps[0]) if len(gaps) else len(cells)


def cells_from_mask(mask: BoolArray, offset: int) -> Cells:
    """The set of cells ``offset + i`` where the mask is true, ascending."""
    n = int(np.count_nonzero(mask))
    if n == 0:
        return NO_CELLS
    first = int(mask.argmax())
    if mask[first : first + n].all():
        return slice(offset + first, offset + first + n)
    return np.flatnonzero(mask) + offset


def cells_where(cells: Cells, mask: BoolArray) -> Cells:
    """The cells of a set where the mask, one value a cell, is true."""
    if isinstance(cells, slice):
        return cells_from_mask(mask, cells.start)
    n = int(np.count_nonzero(mask))
    first = int(mask.argmax()) if n else 0
    if mask[first : first + n].all():
        return cells[first : first + n]  # much cheaper than picking them one by one
    return cells[mask]


def as_cells(numbers: Int64Array) -> Cells:
    """Cell numbers as a slice if they rise by one each, else as they are."""
    first, n = int(numbers[0]), len(numbers)
    if n == 1 or (int(numbers[-1]) - first == n - 1 and bool((np.diff(numbers) == 1).all())):
        return slice(first, first + n)
    return numbers


def clamp_range(p0: int, p1: int) -> tuple[int, int]:
    """A range of positions with its open (negative) bounds filled in."""
    first, end = whole(p0), whole(p1)
    if first is None or end is None:
        raise OptionError(f"range [{shown(p0)}, {shown(p1)}): positions must be integers")
    return max(first, 0), MAX_POSITION if end < 0 else min(end, MAX_POSITION)


def clamp_delta(delta: int) -> int:
    """How far positions move, at most from one end of the range to the other."""
    if (number := whole(delta)) is None:
        raise OptionError(f"delta={shown(delta)}: must be a whole number")
    return max(-MAX_POSITION, min(number, MAX_POSITION))


def clamp_divisor(d: int) -> int:
    """What positions are divided by, at most what makes all of them 0."""
    number = whole(d)
    if number is None or number < 1:
        raise OptionError(f"seq_div by {shown(d)}: the divisor must be a whole number from 1 on")
    return min(number, MAX_POSITION)


def group_rows(rows: Int64Array, seq_ids: Int64Array) -> list[tuple[int, Int64Array]]:
    """For each sequence among (row, sequence) pairs: its id, and its rows in their order."""
    if len(seq_ids) == 1 or (seq_ids == seq_ids[0]).all():
        return [(int(seq_ids[0]), rows)]
    order = np.argsort(seq_ids, kind="stable")
    starts = [0, *(np.flatnonzero(np.diff(seq_ids[order])) + 1).tolist()]
    ends = [*starts[1:], len(order)]
    return [(int(seq_ids[order[i]]), rows[order[i:j]]) for i, j in zip(starts, ends, strict=True)]


def checked_id(seq_id: int, n_seq_max: int) -> int:
    """The id as an int; raises SequenceIdError unless it is in ``[0, n_seq_max)``."""
    number = whole(seq_id)
    if number is None or not 0 <= number < n_seq_max:
        raise SequenceIdError(
            f"seq_id {shown(seq_id)} is outside [0, {n_seq_max}): "
            "use an id in that range or a larger n_seq_max"
        )
    return number


def means_all(seq_id: int) -> bool:
    """Whether an id stands for every sequence: -1."""
    return whole(seq_id) == -1


def owner_words(n_seq_max: int) -> int:
    """How many 64-bit words hold the owner bits of ``n_seq_max`` sequences."""
    return max(1, -(-n_seq_max // 64))


def pack_owners(rows: Int64Array, seq_ids: Int64Array, n: int, n_words: int) -> OwnerBits:
    """Owner bits ``[n_words, n]`` of n cells or tokens: ``rows[i]`` is owned by ``seq_ids[i]``."""
    bits = np.zeros((n_words, n), np.uint64)
    ones = np.left_shift(np.uint64(1), (seq_ids & 63).astype(np.uint64))
    np.bitwise_or.at(bits, (seq_ids >> 6, rows), ones)
    return bits


def unpack_owners(bits: OwnerBits) -> tuple[Int64Array, Int64Array]:
    """The pairs (row, sequence id) of owner bits, rows ascending, then ids ascending."""
    octets = np.ascontiguousarray(bits.T, dtype="<u8").view(np.uint8)
    rows, seq_ids = np.nonzero(np.unpackbits(octets, axis=1, bitorder="little"))
    return rows, seq_ids


def count_owners(bits: OwnerBits) -> int:
    """How many owner bits are set in all."""
    octets = np.ascontiguousarray(bits).view(np.uint8)
    return int(_BITS_SET[octets].sum(dtype=np.int64))


@dataclass(slots=True)
class Span:
    """Facts about a sequence that need no scan; a value, whose methods return another.

    Its cells always lie among the *candidates*: those from ``lo`` to ``hi``, or, once they are not
    neighbours, those of ``cells`` (ascending) and of ``appended``. While ``exact``, every candidate
    is its own. ``count``, ``pos_min`` and ``pos_max`` hold while ``fresh``; then the candidates
    are exact too, and the bounds as tight as can be.
    """

    lo: int = 0
    hi: int = 0
    fresh: bool = True
    count: int = 0
    pos_min: int = -1
    pos_max: int = -1
    cells: Int64Array | None = field(default=None, compare=False)
    appended: tuple[Cells, ...] = field(default=(), compare=False)
    exact: bool = field(default=True, compare=False)

    @classmethod
    def measure(cls, cells: Cells, positions: Int32Array) -> Span:
        """The span of a sequence that owns exactly these cells, ascending."""
        n = cell_count(cells)
        if n == 0:
            return cls()
        at = positions[cells]
        numbers = None if isinstance(cells, slice) else cells
        return cls(*cell_bounds(cells), True, n, int(at.min()), int(at.max()), numbers)

    def candidates(self) -> Cells:
        """Cells among which all of the sequence's are, ascending."""
        if self.cells is None:
            return slice(self.lo, self.hi)
        if self.appended:
            new = ascending(np.concatenate([cell_numbers(cells) for cells in self.appended]))
            start = int(np.searchsorted(self.cells, new[0]))
            if start < len(self.cells):
                new = np.union1d(self.cells[start:], new)
            # The same set in another form; one assignment, so that no half of it is ever seen.
            self.cells, self.appended = np.concatenate((self.cells[:start], new)), ()
        return self.cells

    def narrowed(self, cells: Cells) -> Span:
        """The same with these, ascending, for all of the sequence's cells."""
        facts = self.fresh, self.count, self.pos_min, self.pos_max
        if isinstance(cells, slice):
            return Span(cells.start, cells.stop, *facts)
        return Span(self.lo, self.hi, *facts, cells)

    def added(self, cells: Cells, at: Int32Array) -> Span:
        """With cells at these positions that the sequence did not own before, at least one."""
        lowest, highest = int(at.min()), int(at.max())
        pos_min = lowest if self.pos_min < 0 else min(self.pos_min, lowest)
        facts = self.fresh, self.count + len(at), pos_min, max(self.pos_max, highest)
        return self._including(cells, facts, self.exact)

    def including(self, cells: Cells) -> Span:
        """With further candidates; which are the sequence's is no longer known."""
        return self._including(cells, (False, self.count, self.pos_min, self.pos_max), False)

    def stale(self) -> Span:
        """Without trust in what was known: the sequence has lost or moved cells."""
        facts = self.count, self.pos_min, self.pos_max
        return Span(self.lo, self.hi, False, *facts, self.cells, self.appended, exact=False)

    def moved(self) -> Span:
        """With the same cells at positions that are not known."""
        facts = self.count, self.pos_min, self.pos_max
        return Span(self.lo, self.hi, False, *facts, self.cells, self.appended, self.exact)

    def _including(self, cells: Cells, facts: tuple[bool, int, int, int], exact: bool) -> Span:
        lo, hi = cell_bounds(cells)
        if self.hi == 0:
            numbers = None if isinstance(cells, slice) else ascending(cells)
            return Span(lo, hi, *facts, numbers, exact=exact)
        mine, appended = self.cells, self.appended
        if mine is not None:
            appended = (*appended, cells)
        elif exact and not (isinstance(cells, slice) and (lo == self.hi or hi == self.lo)):
            mine, appended = cell_numbers(slice(self.lo, self.hi)), (cells,)
        span = Span(min(self.lo, lo), max(self.hi, hi), *facts, mine, appended, exact)
        if len(appended) > _MAX_APPENDED:
            span.candidates()
        return span
