"""The arrays of a cell table, the questions one can ask, and the few primitive changes.

``cells.py`` states the invariants. Whatever changes ownership or positions keeps ``used``,
``token_count``, ``_bound`` and the sequences' spans true; verbs are written in these steps only.
"""

from __future__ import annotations

import operator

import numpy as np

from kvcellar._cellcheck import check_cells
from kvcellar._cellsets import (
    NO_CELLS,
    Cells,
    Span,
    cell_count,
    cell_numbers,
    cells_from_mask,
    cells_where,
    clamp_range,
)
from kvcellar.errors import OptionError, SequenceIdError
from kvcellar.types import (
    MAX_POSITION,
    BoolArray,
    Int32Array,
    Int64Array,
    OwnerBits,
    count_owners,
    owner_words,
    unpack_owners,
)

_SCAN = 4096


def padded_n_kv(cell_max: int, padding: int, size: int) -> int:
    """How many cells attention looks at when those from ``cell_max`` on do not matter."""
    return min(size, max(padding, -(-cell_max // padding) * padding))


class CellState:
    """Arrays over ``size`` cells, and what is derived from them for ``n_seq_max`` sequences."""

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
        try:
            number = operator.index(seq_id)
        except TypeError:
            number = -1
        if not 0 <= number < self.n_seq_max:
            raise SequenceIdError(
                f"seq_id {seq_id!r} is outside [0, {self.n_seq_max}): "
                "use an id in that range or a larger n_seq_max"
            )
        return number

    def check(self) -> None:
        """Prove invariants 1 to 4 by brute force.

        Raises:
            InvariantError: one does not hold; the message cites its number.
        """
        check_cells(self, self._bound, self._shifted, self._spans)

    # -- steps

    def _owned(self, seq: int, lo: int, hi: int) -> BoolArray:
        word: OwnerBits = self.owners[seq >> 6, lo:hi]
        mine: BoolArray = np.not_equal(word & np.uint64(1 << (seq & 63)), 0)
        return mine

    def _select(self, seq: int, p0: int, p1: int) -> Cells:
        span = self._spans[seq]
        lo, hi = span.lo, span.hi
        whole = span.fresh and p0 <= span.pos_min and span.pos_max < p1
        if span.is_dense and (whole or hi == lo):
            return slice(lo, hi)
        mask = None if span.is_dense else self._owned(seq, lo, hi)
        if not whole:
            at = self.positions[lo:hi]
            mask = at >= p0 if mask is None else np.logical_and(mask, at >= p0, out=mask)
            if p1 < MAX_POSITION:
                mask &= at < p1
        return cells_from_mask(np.asarray(mask), lo)

    def _known(self, seq: int) -> Span:
        span = self._spans[seq]
        if not span.fresh:
            cells = cells_from_mask(self._owned(seq, span.lo, span.hi), span.lo)
            span = self._spans[seq] = Span.measure(cells, self.positions)
        return span

    def _owners_among(self, cells: Cells) -> list[int]:
        bits = np.bitwise_or.reduce(self.owners[:, cells], axis=1, keepdims=True)
        return [int(seq) for seq in unpack_owners(bits)[1]]

    def _shift(self, cells: Cells, change: int | Int32Array) -> None:
        if cell_count(cells):
            self.positions[cells] += change
            self.pending[cells] += change
            self._shifted = True
            for seq in self._owners_among(cells):
                self._spans[seq].fresh = False

    def _drop(self, seq: int, cells: Cells) -> Cells:
        n = cell_count(cells)
        if n == 0:
            return NO_CELLS
        unshared = self.token_count == self.used
        self.owners[seq >> 6][cells] &= ~np.uint64(1 << (seq & 63))
        self.token_count -= n
        span = self._spans[seq]
        if span.fresh and n == span.count:
            self._spans[seq] = Span()
        span.fresh = False
        freed = cells
        if not unshared:
            freed = cells_where(cells, np.asarray(~self.owners[:, cells].any(axis=0), np.bool_))
        self._wipe(freed)
        return freed

    def _free(self, cells: Cells) -> None:
        if cell_count(cells):
            for seq in self._owners_among(cells):
                self._spans[seq].fresh = False
            unshared = self.token_count == self.used
            n = cell_count(cells) if unshared else count_owners(self.owners[:, cells])
            self.token_count -= n
            self._wipe(cells)

    def _wipe(self, cells: Cells) -> None:
        self.positions[cells] = -1
        self.pending[cells] = 0
        self.tokens[cells] = -1
        self.owners[:, cells] = 0
        self.used -= cell_count(cells)
