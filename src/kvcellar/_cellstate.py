"""The arrays of a cell table, the questions one can ask, and the few primitive changes.

``cells.py`` states the invariants. Whatever changes ownership or positions keeps ``used``,
``token_count``, ``_bound`` and the sequences' spans true; verbs are written in these steps only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvcellar._cellcheck import check_cells
from kvcellar._cellsets import (
    NO_CELLS,
    Cells,
    cell_count,
    cell_numbers,
    cells_where,
    checked_id,
    clamp_range,
)
from kvcellar._cellspan import Span
from kvcellar.errors import InvariantError, OptionError
from kvcellar.types import (
    MAX_POSITION,
    AnyArray,
    BoolArray,
    Int32Array,
    Int64Array,
    OwnerBits,
    count_owners,
    owner_words,
    unpack_owners,
)

_SCAN = 4096
_EMPTY = (-1, 0, -1, 0)  # position, pending shift, token and owners of a free cell


def padded_n_kv(cell_max: int, padding: int, size: int) -> int:
    """How many cells attention looks at when those from ``cell_max`` on do not matter."""
    return min(size, max(padding, -(-cell_max // padding) * padding))


class SavedCells(NamedTuple):
    """A table as it was; cells behind those of the arrays were free."""

    arrays: tuple[AnyArray, ...]
    head: int
    used: int
    token_count: int
    shifted: bool
    spans: list[Span]


class CellState:
    """Arrays over ``size`` cells, and what is derived from them for ``n_seq_max`` sequences.

    ``reserved`` marks cells that may not be filled although they are free, or become free later;
    None: there are none.
    """

    def __init__(self, size: int, n_seq_max: int) -> None:
        for name, value in (("size", size), ("n_seq_max", n_seq_max)):
            if value < 1:
                raise OptionError(f"{name} is {value}: it must be at least 1")
        self.size = size
        self.n_seq_max = n_seq_max
        self.positions: Int32Array = np.full(size, -1, np.int32)
        self.pending: Int32Array = np.zeros(size, np.int32)
        self.tokens: Int32Array = np.full(size, -1, np.int32)
        self.owners: OwnerBits = np.zeros((owner_words(n_seq_max), size), np.uint64)
        self.reserved: BoolArray | None = None
        self._forget()

    def _forget(self) -> None:
        self.head = 0
        self.used = 0
        self.token_count = 0
        self._bound = 0  # cells from here on are free
        self._shifted = False  # whether a pending shift may differ from 0
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

    def seq_count(self, seq_id: int) -> int:
        """How many cells a sequence owns."""
        return self._known(self.checked(seq_id)).count

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position of a sequence, -1 when it is empty."""
        return self._known(self.checked(seq_id)).pos_min

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position of a sequence, -1 when it is empty."""
        return self._known(self.checked(seq_id)).pos_max

    def owners_of(self, cell: int) -> tuple[int, ...]:
        """The sequences that own a cell, ascending."""
        return tuple(unpack_owners(self.owners[:, [cell]])[1].tolist())

    def cells_of(self, seq_id: int) -> Int64Array:
        """The cells of a sequence in the order of their positions."""
        cells = cell_numbers(self.select(seq_id))
        return cells[np.argsort(self.positions[cells], kind="stable")]

    def tokens_of(self, seq_id: int) -> Int32Array:
        """The token ids of a sequence in the order of their positions (-1: not known)."""
        return self.tokens[self.cells_of(seq_id)]

    def select(self, seq_id: int, p0: int = -1, p1: int = -1) -> Cells:
        """The cells of a sequence with positions in the range, by ascending cell number."""
        return self._select(self.checked(seq_id), *clamp_range(p0, p1))

    def shared(self, cells: Cells) -> Cells:
        """Those of the cells that have more than one owner."""
        if self.token_count == self.used:
            return NO_CELLS
        bits = self.owners[:, cells]
        many = (bits & (bits - np.uint64(1))).any(axis=0)  # a word with two bits or more
        return cells_where(cells, many | (np.count_nonzero(bits, axis=0) > 1))

    def pending_cells(self) -> Int64Array:
        """The cells whose K row waits to be rotated."""
        return np.flatnonzero(self.pending[: self._bound if self._shifted else 0])

    def checked(self, seq_id: int) -> int:
        """The id as an int.

        Raises:
            SequenceIdError: it is outside ``[0, n_seq_max)``.
        """
        return checked_id(seq_id, self.n_seq_max)

    def check(self) -> None:
        """Prove invariants 1 to 4 by brute force.

        Raises:
            InvariantError: one does not hold; the message cites its number.
        """
        check_cells(self, self._bound, self._shifted, self._spans)

    # -- as a whole

    def save(self) -> SavedCells:
        """The state of all cells and sequences, for :meth:`load`."""
        n = self.cell_max()
        arrays = tuple(array[..., :n].copy() for array in self._arrays())
        spans = [replace(span) for span in self._spans]
        return SavedCells(arrays, self.head, self.used, self.token_count, self._shifted, spans)

    def load(self, saved: SavedCells) -> None:
        """Be as when it was saved; the size may not have changed since."""
        n, top = saved.arrays[0].shape[-1], self._bound
        for array, values, empty in zip(self._arrays(), saved.arrays, _EMPTY, strict=True):
            array[..., :n] = values
            array[..., n:top] = empty
        self._bound = n
        self.head, self.used, self.token_count = saved.head, saved.used, saved.token_count
        self._shifted = saved.shifted
        self._spans = [replace(span) for span in saved.spans]

    def resize(self, size: int) -> None:
        """Have so many cells; those that go must be free. A head that goes with them is 0."""
        if self.cell_max() > size:
            raise InvariantError(f"cell {self.cell_max() - 1} is used and cannot go")
        for seq in range(self.n_seq_max):
            self._known(seq)  # bounds that are not exact could reach beyond the end
        kept = min(size, self.size)
        grown = []
        for array, empty in zip(self._arrays(), _EMPTY, strict=True):
            new = np.full((*array.shape[:-1], size), empty, array.dtype)
            new[..., :kept] = array[..., :kept]
            grown.append(new)
        self.positions, self.pending, self.tokens, self.owners = grown
        self.size = size
        self.head = self.head if self.head < size else 0

    def _arrays(self) -> tuple[AnyArray, ...]:
        return self.positions, self.pending, self.tokens, self.owners

    # -- steps

    def _mine(self, seq: int) -> Cells:
        """All cells of a sequence, ascending; remembered until it loses some."""
        span = self._spans[seq]
        cells = span.candidates()
        if not span.exact:
            words = self.owners[seq >> 6][cells]
            cells = cells_where(cells, np.not_equal(words & np.uint64(1 << (seq & 63)), 0))
            span.know(cells)
        return cells

    def _select(self, seq: int, p0: int, p1: int) -> Cells:
        span, cells = self._spans[seq], self._mine(seq)
        low, high = (span.pos_min, span.pos_max) if span.fresh else (0, MAX_POSITION - 1)
        if p0 <= low and high < p1:
            return cells
        at = self.positions[cells]
        mask = at >= p0
        if p1 <= high:
            mask &= at < p1
        return cells_where(cells, mask)

    def _known(self, seq: int) -> Span:
        span = self._spans[seq]
        if not span.fresh:
            span = self._spans[seq] = Span.measure(self._mine(seq), self.positions)
        return span

    def _owners_among(self, cells: Cells) -> list[int]:
        found = []
        for i, words in enumerate(self.owners):
            bits = int(np.bitwise_or.reduce(words[cells]))
            while bits:
                found.append(64 * i + (bits & -bits).bit_length() - 1)
                bits &= bits - 1
        return found

    def _shift(self, seq: int, cells: Cells, at: Int32Array, change: int | Int32Array) -> None:
        """Move cells of a sequence, which stand ``at`` these positions, for all of their owners."""
        if cell_count(cells):
            self.positions[cells] = at + change
            self.pending[cells] += change
            self._shifted = True
            for owner in [seq] if self.used == self.token_count else self._owners_among(cells):
                self._spans[owner].fresh = False

    def _drop(self, seq: int, cells: Cells) -> Cells:
        n = cell_count(cells)
        if n == 0:
            return NO_CELLS
        unshared = self.token_count == self.used
        self.token_count -= n
        span = self._spans[seq]
        if span.fresh and n == span.count:
            self._spans[seq] = Span()
        span.doubt()
        freed = cells
        if not unshared:
            self.owners[seq >> 6][cells] &= ~np.uint64(1 << (seq & 63))
            parts = [words[cells] == 0 for words in self.owners]
            freed = cells_where(cells, np.logical_and.reduce(parts))
        self._wipe(freed)
        return freed

    def _free(self, cells: Cells) -> None:
        if cell_count(cells):
            for seq in self._owners_among(cells):
                self._spans[seq].doubt()
            unshared = self.token_count == self.used
            n = cell_count(cells) if unshared else count_owners(self.owners[:, cells])
            self.token_count -= n
            self._wipe(cells)

    def _wipe(self, cells: Cells) -> None:
        self.positions[cells] = -1
        if self._shifted:
            self.pending[cells] = 0
        self.tokens[cells] = -1
        for words in self.owners:
            words[cells] = 0
        self.used -= cell_count(cells)
