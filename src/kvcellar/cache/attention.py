"""The attention cache: one cell a token, over a table of cells and a store of K and V rows.

The table says who owns which cell, the store holds the bytes, and this class keeps the two
together: what a verb does to positions is applied to K rows by ``update``, which ``take`` calls.
What that means for the bytes is in ``rows.py``, and how it is taken back in ``transaction.py``.

* Invariant 5: a failed operation changes nothing; see ``changes.py``.
* Invariant 6: the K row of a cell is the key rotated to ``position - pending``; after ``update``,
  to ``position``. V is never touched by a shift.
* Invariant 9: rows of freed cells are zeroed before attention looks at them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvcellar.backends.base import KVStore
from kvcellar.batch import MicroBatch, Rows
from kvcellar.cache.base import Cache, Coupled, OnShared
from kvcellar.cache.changes import Changes, Remember, Undo, atomic
from kvcellar.cache.content import NO_TOKENS, CellData, RowBytes, SequenceData
from kvcellar.cache.placement import (
    CellPart,
    CellPlacement,
    check_coupled,
    find_cells,
    require_free,
)
from kvcellar.cache.rows import StoreSync
from kvcellar.cache.transaction import CellSavepoint
from kvcellar.cache.view import CacheView
from kvcellar.cells import CellTable, check_moved
from kvcellar.cellsets import (
    NO_CELLS,
    Cells,
    cell_bounds,
    cell_count,
    cells_where,
    clamp_delta,
    clamp_divisor,
    clamp_range,
    pack_owners,
)
from kvcellar.errors import (
    CacheFull,
    ShiftUnsupported,
    SnapshotMismatch,
    check_bool,
    check_choice,
    check_kind,
)
from kvcellar.types import MAX_POSITION, CacheSpec, Int32Array, Int64Array


class AttentionCache(Cache):
    """Every verb of llama.cpp's cache.

    Args:
        spec: the shape; ``spec.size`` cells for ``spec.n_seq_max`` sequences.
        store: the K and V rows of as many cells.
        on_shared: what ``seq_add`` and ``seq_div`` do with a cell that others own too.
        defrag_threshold: the share of holes below ``cell_max`` beyond which ``update`` compacts
            unasked, a few runs of cells at a time; caches that reach less than 128 cells count as
            compact. None: only :meth:`defrag` asks for it.
    """

    def __init__(
        self,
        spec: CacheSpec,
        store: KVStore,
        on_shared: OnShared = "copy",
        *,
        defrag_threshold: float | None = None,
    ) -> None:
        check_kind("spec", spec, CacheSpec)
        check_kind("store.spec", getattr(store, "spec", None), CacheSpec, made="a store of K and V")
        check_choice("on_shared", on_shared, ("copy", "move"))
        super().__init__()
        self.spec = spec
        self.store = store
        self.on_shared = on_shared
        self._padding, self._window = spec.padding, spec.window
        self.table = CellTable(spec.size, spec.n_seq_max)
        self._sync = StoreSync(self.table, store, defrag_threshold)
        self._nest = self._sync.journal.open
        self.watch(self._sync.remember_request)
        self.join(self.changes)

    def join(self, changes: Changes) -> None:
        """Take part in these changes from now on."""
        super().join(changes)
        self._sync.join(changes)

    # -- questions

    @property
    def can_shift(self) -> bool:
        """Whether positions can be moved."""
        return self.store.can_shift or not self._sync.has_rope

    @property
    def used(self) -> int:
        """How many cells have an owner."""
        self.changes.settle()
        return self.table.used

    @property
    def token_count(self) -> int:
        """The sum of owners over cells: a shared cell counts once for each."""
        self.changes.settle()
        return self.table.token_count

    @property
    def store_specs(self) -> tuple[CacheSpec]:
        """The shape of the store."""
        return (self.store.spec,)

    @property
    def head(self) -> int:
        """Where the next search for free cells starts."""
        return self.table.head

    def cell_max(self) -> int:
        """The index behind the last used cell."""
        return self.table.cell_max()

    def n_free(self) -> int:
        """How many cells may be filled."""
        self.changes.settle()
        return self.table.n_free()

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position of a sequence, -1 when it is empty."""
        return self.table.span(seq_id).pos_min

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position of a sequence, -1 when it is empty."""
        return self.table.span(seq_id).pos_max

    def seq_count(self, seq_id: int) -> int:
        """How many tokens of a sequence are held."""
        return self.table.span(seq_id).count

    def seq_tokens(self, seq_id: int) -> Int32Array:
        """Their ids in the order of their positions; -1 where an embedding was decoded."""
        return self.table.tokens_of(seq_id)

    def seq_positions(self, seq_id: int) -> Int32Array:
        """Where they stand, ascending."""
        at: Int32Array = self.table.positions[self.table.cells_of(seq_id)]
        return at

    def makes_room(self, seq_id: int, start: int, stop: int, *, in_place: bool = True) -> bool:
        """Whether removing tokens leaves more cells than moving or decoding others takes."""
        self._check_removal(seq_id, start, stop, in_place)
        cells = self.table.cells_of(seq_id)
        if stop > len(cells):
            return True
        if in_place and self.can_shift:
            copied = NO_CELLS if self.on_shared == "move" else self.table.shared(cells[stop:])
            return self._n_freed(cells[start:stop]) > cell_count(copied)
        return self._n_freed(cells[start:]) > len(cells) - stop

    def view(self, n_seq_max: int | None = None) -> CacheView:
        """The state of all cells as a value, with at most n_seq_max owners shown a cell."""
        self.changes.settle()
        return CacheView.of(self.table, n_seq_max)

    def check(self) -> None:
        """Prove invariants 1 to 4; see :mod:`kvcellar.cells`."""
        self.changes.settle()
        self.table.check()

    # -- llama.cpp's verbs

    @atomic
    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Drop a sequence (-1: every one) from the range; always True here."""
        self.require_idle()
        return self.table.seq_rm(seq_id, p0, p1)

    @atomic
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Share src's cells in the range with dst, in place of what dst had there."""
        self.require_idle()
        self.table.seq_cp(src, dst, p0, p1)

    @atomic
    def seq_keep(self, seq_id: int) -> None:
        """Drop every other sequence."""
        self.require_idle()
        self.table.seq_keep(seq_id)

    @atomic
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions in the range by delta; cells driven below 0 are freed.

        Raises:
            PositionError: a position would pass the largest one.
            ShiftUnsupported: K rows would have to be rotated and the store cannot.
            CacheFull, NotSupported: shared cells cannot be copied.
        """
        self.require_idle()
        table, seq = self.table, self.table.checked(seq_id)
        (lo, hi), delta = clamp_range(p0, p1), clamp_delta(delta)
        if hi <= lo:
            return
        cells, freed = table.cells_between(seq, lo, hi), NO_CELLS
        if cell_count(cells) and delta:
            at = table.positions[cells]
            check_moved(at, delta)
            stays = at >= -delta
            moving = cells_where(cells, stays)
            self._require_shift("seq_add", cell_count(moving) > 0)
            if self.on_shared == "move":
                table.seq_add(seq, lo, hi, delta)
                return
            if self._copy_shared(seq, moving):
                moving = table.cells_between(seq, max(lo, -delta), hi)
            freed = table.drop(seq, cells_where(cells, ~stays))
            table.shift(seq, moving, table.positions[moving], delta)
        table.head = cell_bounds(freed)[0] if cell_count(freed) else 0

    @atomic
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions in the range by d, truncating; raises as :meth:`seq_add` does."""
        self.require_idle()
        d, seq, (lo, hi) = clamp_divisor(d), self.table.checked(seq_id), clamp_range(p0, p1)
        cells = self.table.cells_between(seq, lo, hi)
        if cell_count(cells) and d > 1:
            moving = cells_where(cells, self.table.positions[cells] > 0)
            self._require_shift("seq_div", cell_count(moving) > 0)
            if self.on_shared == "copy":
                self._copy_shared(seq, moving)
            self.table.seq_div(seq, lo, hi, d)

    @atomic
    def clear(self, data: bool = True) -> None:
        """Empty the cache; ``data=False`` leaves the buffers as they are."""
        self.require_idle()
        self._sync.clear(check_bool("data", data))

    @atomic
    def defrag(self, max_moves: int | None = None) -> None:
        """Ask for compaction at the next update, of at most ``max_moves`` runs of cells."""
        self.require_idle()
        self._sync.request(max_moves)

    @atomic
    def update(self) -> None:
        """Apply what is pending: first rotate K rows, then compact.

        If a row cannot be copied, rows that were rotated stay so and compaction stays asked for.
        """
        self.require_idle()
        self._sync.update(self._remember)

    # -- beyond llama.cpp's

    @atomic
    def rewind(self, seq_id: int, p0: int) -> int:
        """Drop a sequence from p0 on; returns p0, or what follows the last position if lower."""
        seq, (lo, _) = self.table.checked(seq_id), clamp_range(p0, -1)
        self.seq_rm(seq, lo, -1)
        return min(lo, self.seq_pos_max(seq) + 1)

    @atomic
    def seq_cut(self, seq_id: int, p0: int, p1: int) -> bool:
        """Drop a range and close the gap; what could fail in the second step is tried first."""
        if not self.keeps_every_token:  # the first step may fail: take it back
            return super().seq_cut(seq_id, p0, p1)
        self.require_idle()
        if not self.can_shift:
            return False
        table, seq = self.table, self.table.checked(seq_id)
        lo, hi = clamp_range(p0, p1)
        if hi <= lo:
            return True
        doomed = table.cells_between(seq, lo, hi)
        moving = table.cells_between(seq, hi, MAX_POSITION)
        shared = NO_CELLS if self.on_shared == "move" else table.shared(moving)
        if needed := cell_count(shared):
            self._sync.require_copy("moving the positions of shared cells")
            if needed > (free := table.n_free() + self._n_freed(doomed)):
                hint = "cells shared with others have to be copied to move"
                raise CacheFull(needed, free, hint)
        freed = table.drop(seq, doomed)
        if needed:
            if cell_count(freed):
                table.head = min(table.head, cell_bounds(freed)[0])
            self._sync.copy_shared(seq, shared)
            moving = table.cells_between(seq, hi, MAX_POSITION)
        table.shift(seq, moving, table.positions[moving], lo - hi)
        table.head = 0
        return True

    def export(self, seq_ids: Sequence[int], lo: int, hi: int, checkpoints: bool) -> SequenceData:
        """Copy what sequences hold in a range of positions; nothing may be pending."""
        cells = self._export_cells(seq_ids, lo, hi, checkpoints)
        return SequenceData(len(seq_ids), (cells,), start=lo)

    @atomic
    def import_(self, content: SequenceData, seq_ids: Sequence[int], shift: int) -> None:
        """Put sound content into free cells; the caller takes back what fails half way.

        Raises:
            SnapshotMismatch: some of it was evicted from a window, and this cache keeps everything.
        """
        (group,) = content.groups
        self._import_cells(group, seq_ids, shift)

    # -- decoding

    def check_rows(self, rows: Rows, coupled: Coupled) -> None:
        """Raise if a batch that is well formed cannot be placed; see :meth:`place`."""
        if coupled == "same":
            check_coupled(self.table, rows.owners)
        require_free(self.table, len(rows.positions))

    def _take(self, micros: Sequence[MicroBatch]) -> tuple[list[CellPart], None]:
        """Take cells for microbatches that were checked; what is pending is applied first."""
        self._sync.update(self._remember)
        taken = CellPlacement(self.table, self._padding, self._window, micros, self._sync.wipe)
        self._sync.before_writing(taken.cells)
        self._sync.wipe_freed(taken.n_kv)
        return [taken], None

    # -- steps

    def _remember(self) -> Undo:
        spec, rows = self.spec, self._sync.remember()

        def undo() -> None:
            self.spec = spec
            rows()

        return undo

    def _begin(self, watchers: Sequence[Remember]) -> CellSavepoint:
        return CellSavepoint(self, self._sync.journal, watchers)

    def _resize(self, size: int) -> None:
        self._sync.resize(size)
        self.spec = replace(self.spec, size=size)

    def _n_freed(self, cells: Cells) -> int:
        """How many cells dropping these would make free to be filled."""
        reserved = self.table.reserved
        if reserved is not None:
            cells = cells_where(cells, ~reserved[cells])
        return cell_count(cells) - cell_count(self.table.shared(cells))

    def _copy_shared(self, seq: int, cells: Cells) -> bool:
        """Give a sequence its own copies of those cells that it shares; False: there are none."""
        shared = self.table.shared(cells)
        if cell_count(shared):
            self._sync.copy_shared(seq, shared)
            return True
        return False

    def _require_shift(self, verb: str, needed: bool) -> None:
        if needed and not self.can_shift:
            raise ShiftUnsupported(
                f"{verb} would move positions, but the K rows of this cache cannot be rotated: "
                "remove the cells and decode their tokens again"
            )

    def _export_cells(
        self,
        seq_ids: Sequence[int],
        lo: int,
        hi: int,
        checkpoints: bool,  # noqa: ARG002  (there are none here)
    ) -> CellData:
        table = self.table
        mine = [table.cells_of(seq) for seq in seq_ids]
        mine = [cells[_within(table.positions[cells], lo, hi)] for cells in mine]
        cells, numbers = _distinct(mine, table.positions)
        seqs = np.repeat(np.arange(len(mine)), [len(one) for one in mine])
        return CellData(
            positions=table.positions[cells],
            tokens=table.tokens[cells],
            owners=np.stack((numbers, seqs)).astype(np.int64),
            rows=read_rows(self.store, cells),
            evicted=(NO_TOKENS,) * len(mine),
        )

    def _import_cells(self, group: CellData, seq_ids: Sequence[int], shift: int) -> None:
        if any(evicted.shape[1] for evicted in group.evicted):
            hint = "load it into a cache whose windows slide, or decode the text again"
            raise SnapshotMismatch("swa_full", False, True, hint)
        self._fill(group, seq_ids, shift)

    def _fill(self, content: CellData, seq_ids: Sequence[int], shift: int) -> None:
        n, table = len(content.positions), self.table
        if shift and n and not self.can_shift:
            raise ShiftUnsupported(
                "the K rows of this cache cannot be rotated: load at the positions they stand at"
            )
        if n == 0:
            return
        cells = self._cells_for(n)
        self._sync.before_writing(cells)
        write_rows(self.store, cells, content.rows)
        owners = np.asarray(seq_ids, np.int64)[content.owners[1]]
        bits = pack_owners(content.owners[0], owners, n, len(table.owners))
        table.place(cells, content.positions + np.int32(shift), bits, content.tokens, shift)

    def _cells_for(self, n: int) -> Int64Array:
        """Free cells for n tokens."""
        return find_cells(self.table, n)


def read_rows(store: KVStore, cells: Int64Array) -> RowBytes:
    """Copies of the rows of cells."""
    layers = range(len(store.spec.layers))
    k = tuple(store.read_raw(i, "k", cells) for i in layers)
    return RowBytes(k, tuple(store.read_raw(i, "v", cells) for i in layers))


def write_rows(store: KVStore, cells: Int64Array, rows: RowBytes) -> None:
    """Write rows into cells."""
    for i, (k, v) in enumerate(zip(rows.k, rows.v, strict=True)):
        store.write_raw(i, "k", cells, k)
        store.write_raw(i, "v", cells, v)


def _within(at: Int32Array, lo: int, hi: int) -> slice:
    """Which of ascending positions lie in a range."""
    return slice(int(np.searchsorted(at, lo)), int(np.searchsorted(at, hi)))


def _distinct(mine: list[Int64Array], positions: Int32Array) -> tuple[Int64Array, Int64Array]:
    """All cells by their positions, each once; and the index of each cell of ``mine`` in these."""
    every = np.concatenate([np.empty(0, np.int64), *mine])
    by_number, which = np.unique(every, return_inverse=True)
    order = np.argsort(positions[by_number], kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return by_number[order], rank[which]
