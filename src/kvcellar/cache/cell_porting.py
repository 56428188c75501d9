"""Cells of K and V taken out of a cache, and put into one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcellar.backends.base import KVStore
from kvcellar.cache.content import NO_TOKENS, CellContent, RowBytes
from kvcellar.cache.search import find_cells
from kvcellar.cache.upkeep import Upkeep
from kvcellar.cells import CellTable
from kvcellar.cellsets import pack_owners
from kvcellar.errors import ShiftUnsupported, SnapshotMismatch
from kvcellar.types import Int32Array, Int64Array


class PortsCells:
    """What a cache of cells needs for :mod:`kvcellar.cache.porting`."""

    table: CellTable
    store: KVStore
    _upkeep: Upkeep

    @property
    def can_shift(self) -> bool:
        """Whether positions can be moved."""
        raise NotImplementedError

    def port_out(
        self,
        seq_ids: Sequence[int],
        lo: int,
        hi: int,
        checkpoints: bool,  # noqa: ARG002  (there are none here)
    ) -> CellContent:
        """What sequences hold in a range of positions; nothing may be pending."""
        table = self.table
        mine = [table.cells_of(seq) for seq in seq_ids]
        mine = [cells[_within(table.positions[cells], lo, hi)] for cells in mine]
        cells, numbers = _distinct(mine, table.positions)
        seqs = np.repeat(np.arange(len(mine)), [len(one) for one in mine])
        return CellContent(
            positions=table.positions[cells],
            tokens=table.tokens[cells],
            owners=np.stack((numbers, seqs)).astype(np.int64),
            rows=read_rows(self.store, cells),
            slid=(NO_TOKENS,) * len(mine),
        )

    def port_in(self, content: CellContent, seq_ids: Sequence[int], shift: int) -> None:
        """Put sound content into free cells; whoever calls takes back what fails half way.

        Raises:
            SnapshotMismatch: some of it slid out of a window, and this cache keeps everything.
        """
        if any(slid.shape[1] for slid in content.slid):
            hint = "load it into a cache whose windows slide, or decode the text again"
            raise SnapshotMismatch("swa_full", False, True, hint)
        self._fill(content, seq_ids, shift)

    def _fill(self, content: CellContent, seq_ids: Sequence[int], shift: int) -> None:
        n, table = len(content.positions), self.table
        if shift and n and not self.can_shift:
            raise ShiftUnsupported(
                "the K rows of this cache cannot be rotated: load at the positions they stand at"
            )
        if n == 0:
            return
        cells = self._cells_for(n)
        self._upkeep.mark(cells)
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
    """Let cells have these rows."""
    for i, (k, v) in enumerate(zip(rows.k, rows.v, strict=True)):
        store.write_raw(i, "k", cells, k)
        store.write_raw(i, "v", cells, v)


def _within(at: Int32Array, lo: int, hi: int) -> slice:
    """Which of ascending positions lie in a range."""
    return slice(int(np.searchsorted(at, lo)), int(np.searchsorted(at, hi)))


def _distinct(mine: list[Int64Array], positions: Int32Array) -> tuple[Int64Array, Int64Array]:
    """All cells by their positions, each once; and of each mention which of them it is."""
    every = np.concatenate([np.empty(0, np.int64), *mine])
    by_number, which = np.unique(every, return_inverse=True)
    order = np.argsort(positions[by_number], kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return by_number[order], rank[which]
