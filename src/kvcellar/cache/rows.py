"""K and V rows in step with the table of cells: rotated, compacted, copied, wiped and resized.

* A row is written before the table says that it is there: if the store fails, the table is as it
  was, and only rows of free cells have changed (invariant 5).
* Rows of cells that were held when a change began are kept before they are overwritten, and left
  alone when what is free is wiped: the change may be taken back.
* Invariant 9: rows of freed cells are zeroed before attention looks at them again; those that a
  transaction keeps hold what was computed once, and are no worse than cells of other sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvcellar.backends.base import KVStore, Part
from kvcellar.cache.changes import Changes, Remember, Undo
from kvcellar.cache.placement import find_cells
from kvcellar.cache.transaction import Journal, KeptRows, stored_parts
from kvcellar.cells import Cells, CellTable
from kvcellar.cellsets import cell_numbers
from kvcellar.errors import (
    CacheFull,
    NotSupported,
    OptionError,
    check_range,
    check_real,
)
from kvcellar.types import MAX_POSITION, BoolArray, Int64Array

_WORTHWHILE = 128  # cells below which compaction never pays
AUTOMATIC_MOVES = 256
"""How many runs of cells a compaction that was not requested may move at a time."""
_ROTATED = 64 << 20  # bytes of K rows that are kept while they are rotated


class StoreSync:
    """Keeps a store of K and V rows in step with a table of cells.

    Args:
        table: who owns which cell.
        store: the rows.
        defrag_threshold: the share of holes from which on compaction is wanted; None: never.
    """

    def __init__(self, table: CellTable, store: KVStore, defrag_threshold: float | None) -> None:
        defrag_threshold = check_threshold(defrag_threshold)
        self._table = table
        self._store = store
        self._threshold = defrag_threshold
        self.has_rope = any(layer.rope is not None for layer in store.spec.layers)
        self.journal = Journal(table, store, self.zero_freed)
        self.changes = Changes()
        self._rotated, others = stored_parts(store)
        self._parts = (*self._rotated, *others)
        self._request: int | None = None  # runs that may be moved, once compaction is asked for
        self._written: BoolArray = np.zeros(table.size, np.bool_)  # rows that may not be zero
        if defrag_threshold is not None:
            self.require_copy("defrag_threshold")

    def join(self, changes: Changes) -> None:
        """Log what is changed there."""
        self.changes, self._table.log = changes, changes.log

    def remember(self) -> Undo:
        """Return what puts back all but cells and rows, which are logged."""
        table, journal = self._table.remember(), self.journal.remember()
        request, written = self._request, self._written

        def undo() -> None:
            table()
            journal()
            self._request, self._written = request, written
            self.mark_held()

        return undo

    def require_copy(self, what: str) -> None:
        """Raise NotSupported if the store cannot copy cells."""
        if not self._store.can_copy:
            raise NotSupported(f"{what} needs a store that can copy cells; this one cannot")

    def request(self, max_moves: int | None) -> None:
        """Ask for compaction at the next update."""
        self.require_copy("defrag")
        if max_moves is not None:
            max_moves = check_range("max_moves", max_moves, 1, MAX_POSITION)
        self._request = self._table.size if max_moves is None else max_moves

    def update(self, remember: Remember) -> None:
        """Rotate K rows whose shifts are pending, then compact if requested or worthwhile.

        Args:
            remember: that of the cache. What it holds is the same afterwards, so what has been
                done stays done, unless the change had begun with something else.
        """
        begins, table = self.changes.is_fresh, self._table
        if table.shifted:
            for piece in self._pieces(table.pending_cells()):
                if self.has_rope:
                    self.journal.before_rotation(piece)
                    self._keep_rows(piece, self._rotated)
                    self._store.rotate(piece, table.pending[piece])
                table.settle(piece)
                if begins:
                    self.changes.keep_so_far(remember)
            table.shifted = False
        if self._request is not None:
            self._compact(self._request)
            self._request = None
        elif self._threshold is not None and self._is_fragmented(self._threshold):
            self._compact(AUTOMATIC_MOVES)
        if begins and not self.changes.is_fresh:
            self.changes.keep_so_far(remember)

    def copy_shared(self, seq: int, shared: Cells) -> None:
        """Give a sequence its own copies of cells that it shares, at least one.

        Raises:
            CacheFull, NotSupported: that cannot be; nothing has changed.
        """
        self.require_copy("moving the positions of shared cells")
        src = cell_numbers(shared)
        dst = find_cells(self._table, len(src))
        self.before_writing(dst)
        self._store.copy(src, dst)
        self._table.split(seq, src, dst)

    def wipe_freed(self, n_kv: int) -> None:
        """Zero what the freed of ``n_kv`` cells still hold.

        A mask adds -inf, which hides no NaN (invariant 9). Cells that were filled again at once are
        left alone, so taking back a draft costs nothing.
        """
        taken = self._table.taken(0, n_kv)
        stale = self._written[:n_kv] > taken  # written, but not taken
        if stale.any():
            self._wipe(stale)
        self._written[:n_kv] |= taken

    def clear(self, data: bool) -> None:
        """Empty the table and, with ``data``, zero the rows; those a transaction keeps, later."""
        self._table.clear()
        self._request = None
        if data and self.journal.open:
            self.journal.open[-1].zero_later = True
            self.changes.afterwards(self.zero_freed)
        elif data:
            self.changes.afterwards(self._zero)

    def zero_freed(self) -> None:
        """Zero what free cells still hold, but for those that a transaction keeps."""
        self._wipe(self._written & ~self._table.taken(0, self._table.size))

    def wipe(self, cells: Int64Array) -> None:
        """Zero the rows of cells that have been freed, once the change has happened."""
        self.mark(cells)
        is_stale = np.zeros(self._table.size, np.bool_)
        is_stale[cells] = True
        self.changes.afterwards(partial(self._wipe, is_stale))

    def before_writing(self, cells: Int64Array) -> None:
        """Get free cells ready to be filled: keep rows that the change may have to put back."""
        held = self._table.held_before()
        if held is not None:
            self._keep_rows(cells[held[cells]], self._parts)
        self.mark(cells)
        self.changes.log.append(partial(self._store.wipe, cells))  # before kept rows come back

    def mark(self, cells: Int64Array) -> None:
        """Mark cells as written: what they hold has to be wiped once they are free."""
        self._written[cells] = True

    def mark_held(self) -> None:
        """Mark every held cell as written."""
        self._written |= self._table.positions >= 0

    def resize(self, size: int) -> None:
        """Resize store and table to ``size`` cells; compact first if they would not fit otherwise.

        Raises:
            CacheFull: more cells are used; nothing has changed.
            AllocationError: the new buffers cannot be had; nothing has changed.
        """
        table = self._table
        if table.used > size:
            hint = f"resize({size}) has no room for what is held; remove sequences first"
            raise CacheFull(table.used, size, hint)
        used = np.flatnonzero(table.positions >= 0)
        goal = used.copy()
        moves = None
        if table.cell_max() > size:
            moves = plan_moves(table.positions >= 0)
            goal[np.searchsorted(used, moves.src)] = moves.dst
        self.changes.log.append(partial(self._resize_back, self._store.spec.size, goal, used))
        self._store.resize(size, used, goal)
        if moves is not None:
            table.move(moves.src, moves.dst)
            table.head = table.used
        table.resize(size)
        written = np.zeros(size, np.bool_)
        written[goal] = True
        self._written = written

    # -- steps

    def _resize_back(self, size: int, src: Int64Array, dst: Int64Array) -> None:
        if self._store.spec.size != size:
            self._store.resize(size, src, dst)

    def _pieces(self, cells: Int64Array) -> Iterator[Int64Array]:
        """Cells, as many at a time as their K rows may be kept of."""
        spec = self._store.spec
        n_bytes = sum(spec.type_k.row_bytes(spec.layers[i].n_embd_k) for i, _ in self._rotated)
        n = max(512, _ROTATED // max(1, n_bytes))
        return (cells[i : i + n] for i in range(0, len(cells), n))

    def _keep_rows(self, cells: Int64Array, parts: Sequence[tuple[int, Part]]) -> None:
        """Have rows put back if the change is taken back."""
        if len(cells):
            kept = KeptRows(self._store, np.ones(self._table.size, np.bool_), parts)
            kept.keep(cells)
            self.changes.log.append(kept.write_back)

    def _zero(self) -> None:
        if self._table.used:  # filled again within the same change
            self.zero_freed()
        else:
            self._store.zero()
            self._written.fill(False)

    def _wipe(self, is_stale: BoolArray) -> None:
        held = self._table.held_before()
        if held is not None:
            is_stale = is_stale & ~held[: len(is_stale)]
        stale = np.flatnonzero(is_stale)
        if len(stale):
            self._store.wipe(stale)
            self._written[stale] = False

    def _is_fragmented(self, threshold: float) -> bool:
        top = self._table.cell_max()
        held = int(np.count_nonzero(self._table.taken(0, top)))
        return fragmentation(top, held) > threshold

    def _compact(self, max_moves: int) -> None:
        table, top = self._table, self._table.cell_max()
        fixed = None if table.reserved is None else table.reserved[:top]
        moves = plan_moves(table.positions[:top] >= 0, max_moves, fixed)
        if moves.n_runs:
            self.before_writing(moves.dst)
            self._store.copy(moves.src, moves.dst)
            table.move(moves.src, moves.dst)
            table.head = int(np.count_nonzero(table.taken(0, top)))

    def remember_request(self) -> Undo:
        """Return what puts the request for compaction back; see :meth:`Cache.watch`."""
        return partial(self._recall, self._request)

    def _recall(self, request: int | None) -> None:
        self._request = request
        self.mark_held()


def check_threshold(defrag_threshold: float | None) -> float | None:
    """Return the share of holes from which on compaction is wanted; None stays.

    Raises:
        OptionError: it is no number in [0, 1).
    """
    if defrag_threshold is None:
        return None
    if (share := check_real("defrag_threshold", defrag_threshold, 0.0, 1.0)) == 1.0:
        raise OptionError("defrag_threshold=1: must be below 1")
    return share


def fragmentation(cell_max: int, used: int) -> float:
    """The share of holes below ``cell_max``, from 0 to 1; small caches count as compact."""
    return 1.0 - used / cell_max if cell_max >= _WORTHWHILE else 0.0


class Moves(NamedTuple):
    """Cell ``src[i]`` goes to ``dst[i]``, src ascending; ``n_runs`` runs of neighbours move."""

    src: Int64Array
    dst: Int64Array
    n_runs: int


def plan_moves(
    occupied: BoolArray, max_moves: int | None = None, fixed: BoolArray | None = None
) -> Moves:
    """The moves that compact a cache, or the first ``max_moves`` of them.

    Each hole among the first ``used`` cells is filled, from the left, with exactly as many used
    cells as it has room for, taken from the end of the cache; the cells of a hole keep their order.
    A run of neighbours counts as one move. Cells only move to the left, and none is both source and
    target. Fixed cells, which a transaction keeps, are neither holes nor moved: the others close up
    around them.

    Args:
        occupied: whether each cell is used.
        max_moves: how many runs may be moved at most; None moves all.
        fixed: whether each cell, used or not, has to be left as it is; None: no cell.
    """
    if max_moves is not None:
        check_range("max_moves", max_moves, 1, MAX_POSITION)
    held = occupied if fixed is None else occupied | fixed
    used = int(np.count_nonzero(held))
    movable = occupied if fixed is None else occupied & ~fixed
    tail = np.flatnonzero(movable[used:]) + used
    n = len(tail)
    dst = np.flatnonzero(~held[:used])[:n]
    if n == 0:
        return Moves(dst, tail, 0)
    starts = np.flatnonzero(np.diff(dst, prepend=-2) != 1)  # where each hole begins in dst
    sizes = np.diff(np.append(starts, n))
    # Hole k holds dst[starts[k] : starts[k] + sizes[k]] and takes as many cells from the end of
    # what earlier holes have left of the tail.
    first = np.repeat(n - starts - sizes, sizes)
    src = tail[first + np.arange(n) - np.repeat(starts, sizes)]
    is_start = np.diff(src, prepend=-2) != 1
    is_start[starts] = True
    run = np.cumsum(is_start)
    kept = n if max_moves is None else int(np.searchsorted(run, max_moves, side="right"))
    order = np.argsort(src[:kept])
    return Moves(src[order], dst[order], int(run[kept - 1]))
