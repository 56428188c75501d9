"""Eviction from windows: cells that left every window are used again.

Free cells come first. Only when they run short are cells reused: those a transaction keeps for its
rollback, then those that left the window of every owner, the farthest behind first. What a sequence
loses is always its oldest: cells that others still need lose it as an owner, so that what it holds
stays dense.

A cell at p has left a sequence that reaches q when ``p <= q - n_kept(window)``. The next token
needs one cell less than that keeps: the last token can always be taken back.

The next token of a sequence, at q, attends to ``q - window + 1 … q - 1``. A sequence is *whole*
while no evicted token is among those: then decoding on gives what a full cache would give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from kvcellar.backends.base import KVStore
from kvcellar.batch import MicroBatch
from kvcellar.cache.content import n_kept
from kvcellar.cache.placement import CellPart, cell_plan, find_cells
from kvcellar.cache.rows import StoreSync
from kvcellar.cache.transaction import Journal, KeptRows, stored_parts
from kvcellar.cells import CellTable, SavedCells, padded_n_kv
from kvcellar.cellsets import cell_count, cell_numbers
from kvcellar.errors import (
    CacheFull,
    check_range,
)
from kvcellar.plan import CellPlan
from kvcellar.types import MAX_POSITION, BoolArray, Float16Array, Int32Array, Int64Array

Positions: TypeAlias = "Int32Array | Int64Array"

Move: TypeAlias = Callable[[Int64Array], Int64Array]
"""Where positions go."""

_NONE = np.empty((2, 0), np.int32)


class WindowEviction:
    """Finds cells for tokens, and remembers what each sequence lost for that.

    Attributes:
        table: who owns which cell.
        store: the rows.
        parts: which rows of a cell there are, by layer and part.
        evicted: for each sequence, what it holds no more.
        window: how many positions a token sees, its own included.
    """

    def __init__(self, table: CellTable, store: KVStore, journal: Journal, window: int) -> None:
        self.table = table
        self.store = store
        rotated, others = stored_parts(store)
        self.parts = (*rotated, *others)
        self.evicted = [EvictedTokens() for _ in range(table.n_seq_max)]
        self.window = window
        self._journal = journal
        self._n_kept = n_kept(window)

    def take(self, n: int, kept: KeptRows | None = None) -> Int64Array:
        """Cells that n tokens may fill, in the order in which the tokens take them.

        Args:
            n: how many.
            kept: keeps the rows of what is evicted, as open transactions do; None: the cells are
                not going to be filled.

        Raises:
            CacheFull: there are fewer; nothing has changed.
            AllocationError: no memory for what is kept; :meth:`load` what was saved.
        """
        table = self.table
        if (lack := n - table.n_free()) > 0:
            spare = self._spare()[:lack]
            left = self._evictable()
            if len(spare) + len(left) < lack:
                raise CacheFull(n, n - lack + len(spare) + len(left))
            freed = np.concatenate((spare, self._evict_cells(left[: lack - len(spare)])))
            if kept is not None:
                kept.keep(freed)
                self._journal.before_reuse(freed)
            elif table.reserved is not None:
                table.set_reserved(freed, False)
        cells = find_cells(table, n)
        if kept is not None:
            kept.keep(cells)  # those that were freed before in the same change
        return cells

    def n_free(self) -> int:
        """How many tokens fit at once."""
        return self.table.n_free() + len(self._spare()) + len(self._evictable())

    def evict(self, n: int) -> None:
        """Evict n cells that left every window, or as many as there are."""
        self._evict_cells(self._evictable()[:n])

    def put(self, micro: MicroBatch, cells: Int64Array) -> None:
        """Place a microbatch into these cells."""
        self.table.place(cells, micro.positions, micro.owners, micro.tokens)
        self.table.head = (int(cells[-1]) + 1) % self.table.size

    def require(self, micros: Sequence[MicroBatch]) -> None:
        """Raise CacheFull unless microbatches fit one after the other; changes nothing."""
        n = 0
        for micro in micros:
            n += len(micro.positions)
        if n <= self.table.n_free():
            return
        if len(micros) > 1:
            self.rehearse(micros)
        elif n > (free := self.n_free()):
            raise CacheFull(n, free)

    def rehearse(self, micros: Sequence[MicroBatch]) -> list[Int64Array]:
        """The cells that microbatches, one after the other, are going to get.

        Raises:
            CacheFull: one of them would not fit.
        """
        found = []
        table, saved = self.table, self.save()
        reserved, n_logged = table.reserved, len(table.log or ())
        table.reserved = None if reserved is None else reserved.copy()
        try:
            for micro in micros:
                found.append(self.take(micro.n_tokens))
                self.put(micro, found[-1])
        finally:
            self.load(saved)
            table.reserved = reserved
            del (table.log or [])[n_logged:]
        return found

    def save(self) -> SavedEviction:
        """What :meth:`load` puts back."""
        return SavedEviction(self.table.save(), list(self.evicted))

    def load(self, saved: SavedEviction) -> None:
        """Put cells and sequences back as they were when saved."""
        self.table.load(saved.cells)
        self.evicted[:] = saved.evicted

    def kept_rows(self) -> KeptRows:
        """An empty place to keep rows of the cells that are held, or were until this change."""
        held, before = self.table.positions >= 0, self.table.held_before()
        return KeptRows(self.store, held if before is None else held | before, self.parts)

    # -- steps

    def _spare(self) -> Int64Array:
        """Free cells that may not be filled before a transaction has kept their rows."""
        if self.table.reserved is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.table.reserved & (self.table.positions < 0))

    def _evictable(self) -> Int64Array:
        """The cells that have left every window, the farthest behind first."""
        table, top = self.table, self.table.cell_max()
        behind: Int32Array = np.full(top, np.iinfo(np.int32).max, np.int32)
        for seq in range(table.n_seq_max):
            if (last := table.seq_pos_max(seq)) >= 0:
                cells = table.select(seq)
                left = last - self._n_kept - table.positions[cells]
                behind[cells] = np.minimum(behind[cells], left)
        behind[table.positions[:top] < 0] = -1
        left_all = np.flatnonzero(behind >= 0)
        return left_all[np.argsort(-behind[left_all], kind="stable")]

    def _evict_cells(self, chosen: Int64Array) -> Int64Array:
        """Free cells and whatever their owners hold that is older; return all that became free."""
        table = self.table
        was_held = table.positions >= 0
        is_chosen = np.zeros(table.size, np.bool_)
        is_chosen[chosen] = True
        for seq in range(table.n_seq_max):
            mine = cell_numbers(table.select(seq))
            lost = mine[is_chosen[mine]]
            if len(lost):
                self._evict_before(seq, int(table.positions[lost].max()) + 1)
        return np.flatnonzero(was_held & (table.positions < 0))

    def _evict_before(self, seq: int, end: int) -> None:
        table = self.table
        cells = table.select(seq, 0, end)
        numbers = cell_numbers(cells)
        numbers = numbers[np.argsort(table.positions[numbers], kind="stable")]
        if cell_count(cells):
            at, tokens = table.positions[numbers], table.tokens[numbers]
            self.evicted[seq] = self.evicted[seq].grown(at, tokens)
            table.drop(seq, cells)


class SavedEviction(NamedTuple):
    """A table of cells, and what had been evicted."""

    cells: SavedCells
    evicted: list[EvictedTokens]


@dataclass(frozen=True, slots=True)
class EvictedTokens:
    """The tokens of one sequence that left its window, in the order of their positions; a value.

    ``pieces`` are positions over token ids, ``[2, n]`` each, none more than half as long as the
    one before it: growing is cheap, and so is keeping an older value.
    """

    pieces: tuple[Int32Array, ...] = ()

    @classmethod
    def of(cls, positions: Positions, tokens: Int32Array) -> EvictedTokens:
        """These tokens, in the order of their positions."""
        order = np.argsort(positions, kind="stable")
        rows = np.stack((positions[order], tokens[order])).astype(np.int32)
        return cls((rows,) if len(order) else ())

    def __len__(self) -> int:
        return sum(piece.shape[1] for piece in self.pieces)

    @property
    def positions(self) -> Int32Array:
        """Where they stood, or would stand after later edits."""
        at: Int32Array = self._rows()[0]
        return at

    @property
    def tokens(self) -> Int32Array:
        """Their ids."""
        tokens: Int32Array = self._rows()[1]
        return tokens

    def grown(self, positions: Int32Array, tokens: Int32Array) -> EvictedTokens:
        """Append tokens behind them, in the order of their positions."""
        new = np.stack((positions, tokens)).astype(np.int32)
        pieces = list(self.pieces)
        while pieces and pieces[-1].shape[1] < 2 * new.shape[1]:
            new = np.concatenate((pieces.pop(), new), axis=1)
        return EvictedTokens((*pieces, new))

    def inside(self, lo: int, hi: int) -> EvictedTokens:
        """Those whose positions lie in the range."""
        return self._where(within(self.positions, lo, hi))

    def outside(self, lo: int, hi: int) -> EvictedTokens:
        """Those whose positions do not lie in the range."""
        return self._where(~within(self.positions, lo, hi))

    def joined(self, other: EvictedTokens) -> EvictedTokens:
        """Merge with others, in the order of their positions."""
        at, tokens = np.concatenate((self._rows(), other._rows()), axis=1)
        return EvictedTokens.of(at, tokens)

    def moved(self, lo: int, hi: int, move: Move) -> EvictedTokens:
        """Move those in the range; drop positions below 0. Itself if nothing moves."""
        old = self.positions.astype(np.int64)
        new = np.where(within(old, lo, hi), move(old), old)
        if bool((new == old).all()):
            return self
        return EvictedTokens.of(new[new >= 0], self.tokens[new >= 0])

    def _where(self, mask: BoolArray) -> EvictedTokens:
        return (
            self if bool(mask.all()) else EvictedTokens.of(self.positions[mask], self.tokens[mask])
        )

    def _rows(self) -> Int32Array:
        return np.concatenate((_NONE, *self.pieces), axis=1)


def is_whole(evicted: Positions, held: Positions, window: int) -> bool:
    """Whether a sequence with these positions is whole, evicted ones before held ones."""
    if not len(evicted):
        return True
    if not len(held):
        return False
    last = int(evicted.max())
    return last < int(held.min()) and last <= int(held.max()) + 1 - window


def within(positions: Positions, lo: int, hi: int) -> BoolArray:
    """Which of the positions lie in the range."""
    inside: BoolArray = (positions >= lo) & (positions < hi)
    return inside


def closed(positions: Positions, lo: int, hi: int, shift: int) -> Positions:
    """Positions without those in the range; those behind it move up by ``shift``."""
    left = positions[~within(positions, lo, hi)]
    return np.where(left < lo, left, left - shift)


class SlidingPlacement(CellPart):
    """The cells of one batch, taken a microbatch at a time.

    A microbatch may fill cells that the one before it wrote, and still reads. So that all fit is
    tried out first, and each gets its cells when its plan is asked for, before it is computed: its
    mask shows the table as of then. Rows of cells that were held when the batch began are kept
    before they are evicted, and a release writes them back (invariant 5).

    Args:
        eviction: where cells come from; it has been asked whether all fit.
        padding: what the number of cells that attention looks at is rounded up to.
        micros: what is placed.
        sync: what keeps rows in step with the table.
        committed: called after the batch has been committed.
    """

    def __init__(
        self,
        eviction: WindowEviction,
        padding: int,
        micros: Sequence[MicroBatch],
        sync: StoreSync,
        committed: Callable[[Sequence[MicroBatch]], None],
    ) -> None:
        self._eviction = eviction
        self._table = eviction.table
        self._padding = padding
        self._micros = micros
        self._cells: list[Int64Array] = []
        self._sync = sync
        self._committed = committed
        self._ended = False
        self._saved = eviction.save()
        self._kept = eviction.kept_rows()
        sync.changes.log.append(self._kept.write_back)
        self._place_up_to(0)

    @property
    def cells(self) -> Int64Array:
        """The cells of the batch's tokens, microbatch after microbatch."""
        rest = () if self._ended else self._micros[len(self._cells) :]
        return np.concatenate((*self._cells, *(self._eviction.rehearse(rest) if rest else ())))

    def plan(self, i: int, mask_buffer: Float16Array | None, as_lists: bool) -> CellPlan:
        """What microbatch i reads and writes; asked for in order, before it is computed."""
        self._place_up_to(i)
        table, micro, cells = self._table, self._micros[i], self._cells[i]
        top = table.cell_max()
        n_kv = 0 if as_lists else padded_n_kv(top, self._padding, table.size)
        return cell_plan(table, micro, cells, top, n_kv, self._eviction.window, mask_buffer)

    def commit(self) -> None:
        """Keep the cells: everything has been computed."""
        self._place_up_to(len(self._micros) - 1)
        self._ended = True
        self._committed(self._micros)

    def release(self) -> None:
        """Put everything back as it was, rows included."""
        self._ended = True
        self._eviction.load(self._saved)
        self._kept.write_back()
        self._sync.mark_held()
        # A failed computation may have left NaN, which a mask cannot hide (invariant 9).
        self._sync.changes.afterwards(self._sync.zero_freed)

    def _place_up_to(self, last: int) -> None:
        n_placed = len(self._cells)
        if n_placed <= last:
            self._sync.changes.remember(partial(self._forget_from, n_placed))
        for micro in self._micros[n_placed : last + 1]:
            cells = self._eviction.take(len(micro.positions), self._kept)
            self._eviction.put(micro, cells)
            self._cells.append(cells)
            self._sync.mark(cells)
            self._sync.changes.log.append(partial(self._eviction.store.wipe, cells))
            self._sync.wipe_freed(self._table.n_kv(self._padding))

    def _forget_from(self, n_cells: int) -> None:
        del self._cells[n_cells:]
        self._ended = False


def sliding_size(
    window: int, n_seq_max: int, n_ubatch: int, padding: int = 1, n_ctx: int | None = None
) -> int:
    """How many cells a :class:`SlidingCache` needs so that every batch fits.

    Args:
        window: how many tokens a token attends to, itself included.
        n_seq_max: for how many sequences.
        n_ubatch: how many tokens are computed at once.
        padding: the size is a multiple of it.
        n_ctx: with that many cells nothing is ever evicted; no more are needed.
    """
    sizes = {"window": window, "n_seq_max": n_seq_max, "n_ubatch": n_ubatch, "padding": padding}
    for name, value in sizes.items():
        check_range(name, value, 1, MAX_POSITION)
    size = -(-(n_kept(window) * n_seq_max + n_ubatch) // padding) * padding
    return size if n_ctx is None else min(size, n_ctx)
