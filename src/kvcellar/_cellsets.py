"""Sets of cells.

A set is a slice where its cells are neighbours, which makes everything done with it cheap, and an
array of distinct cell numbers where they are not. Ranges of positions are half open.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from kvcellar.errors import OptionError, SequenceIdError
from kvcellar.types import MAX_POSITION, BoolArray, Int64Array

Cells: TypeAlias = "slice[int, int, None] | Int64Array"

NO_CELLS: Cells = slice(0, 0)


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
    try:
        p0, p1 = operator.index(p0), operator.index(p1)
    except TypeError:
        raise OptionError(f"range [{p0!r}, {p1!r}): positions must be integers") from None
    return max(p0, 0), MAX_POSITION if p1 < 0 else min(p1, MAX_POSITION)


def group_rows(rows: Int64Array, seq_ids: Int64Array) -> Iterator[tuple[int, Int64Array]]:
    """For each sequence among (row, sequence) pairs: its id, and its rows in their order."""
    if len(seq_ids) == 1 or (seq_ids == seq_ids[0]).all():
        yield int(seq_ids[0]), rows
        return
    order = np.argsort(seq_ids, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(seq_ids[order])) + 1, len(order))
    start = 0
    for end in ends.tolist():
        yield int(seq_ids[order[start]]), rows[order[start:end]]
        start = end


def checked_id(seq_id: int, n_seq_max: int) -> int:
    """The id as an int; raises SequenceIdError unless it is in ``[0, n_seq_max)``."""
    try:
        number = operator.index(seq_id)
    except TypeError:
        number = -1
    if not 0 <= number < n_seq_max:
        raise SequenceIdError(
            f"seq_id {seq_id!r} is outside [0, {n_seq_max}): "
            "use an id in that range or a larger n_seq_max"
        )
    return number
