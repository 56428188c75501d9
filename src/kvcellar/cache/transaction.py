"""Taking back what happened to cells of K and V, bit for bit.

::

    with cache.transaction() as t:
        ...                             # decodes, edits, shifts, compaction
        t.rollback()                    # as an exception would

A rollback restores the cells, positions, owners, tokens, pending shifts, head, a request for
compaction, and the map (sequence, position) → (K, V) bit for bit (invariant 7), every row in the
cell where it was. It needs no copy of the rows: cells that were held when a transaction began are
*reserved* until it ends, and nothing but a rotation touches their bytes:

1. Freed inside, they are neither filled again nor wiped. ``CacheFull`` counts them as not free.
   A cache that reuses cells may fill them once their rows, K and V, have been kept.
2. Compaction neither moves nor fills them; cells that were placed inside do move.
3. Before their K rows are rotated, the rows are kept as they are stored, and a rollback writes them
   back: exact for every type, where rotating back would be within rounding. That costs memory: at
   most the K rows of the cells held when the transaction began.
4. ``clear`` frees them; that their bytes are zeroed waits until the outermost transaction ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcellar.backends.base import KVStore, Part
from kvcellar.cache.base import Cache, Savepoint
from kvcellar.cache.changes import Remember, Undo
from kvcellar.cells import CellTable
from kvcellar.errors import AllocationError
from kvcellar.types import BoolArray, ByteArray, Int64Array


class CellSavepoint(Savepoint):
    """What a transaction on a cache of K and V takes back."""

    def __init__(self, cache: Cache, journal: Journal, watchers: Sequence[Remember]) -> None:
        super().__init__(cache, journal.open, watchers)
        table, store = journal.table, journal.store
        outer = journal.open[-1] if journal.open else None
        held: BoolArray = table.positions >= 0
        self.reserved: BoolArray = held.copy() if outer is None else held | outer.reserved
        self.zero_later = False
        self.held = held
        rotated, others = stored_parts(store)
        self.rows = KeptRows(store, held, rotated)
        self.rest = KeptRows(store, held, others)
        self._journal = journal
        self._outer = outer
        self._saved = table.save()
        journal.open.append(self)
        table.reserved = self.reserved

    def _take_back(self) -> None:
        self.rows.write_back()
        self.rest.write_back()
        self._journal.table.load(self._saved)

    def _ended(self, *, kept: bool) -> None:
        journal, outer = self._journal, self._outer
        journal.open.pop()
        journal.table.reserved = None if outer is None else outer.reserved
        if not kept:
            return
        if outer is not None:
            outer.rows.take(self.rows)
            outer.rest.take(self.rest)
            outer.zero_later |= self.zero_later
        elif self.zero_later:
            self.changes.afterwards(journal.zero_freed)


class Journal:
    """The open transactions of one cache of K and V, and what they want kept of its rows.

    Args:
        table: who owns which cell.
        store: the rows.
        zero_freed: zeroes what free cells still hold.

    Attributes:
        open: the transactions, the innermost last.
    """

    def __init__(self, table: CellTable, store: KVStore, zero_freed: Callable[[], None]) -> None:
        self.table = table
        self.store = store
        self.zero_freed = zero_freed
        self.open: list[CellSavepoint] = []

    def remember(self) -> Undo:
        """Return what makes those open that are open now."""
        kept = [(savepoint, savepoint.zero_later) for savepoint in self.open]

        def undo() -> None:
            self.open[:] = [savepoint for savepoint, _ in kept]
            for savepoint, zero_later in kept:
                savepoint.zero_later = zero_later

        return undo

    def before_rotation(self, cells: Int64Array) -> None:
        """Keep the K rows of these cells, as far as an open transaction may want them back.

        Raises:
            AllocationError: there is no memory for them.
        """
        if self.open:
            self.open[-1].rows.keep(cells)

    def before_reuse(self, cells: Int64Array) -> None:
        """Keep all rows of these cells that an open transaction may want; they may be filled then.

        Raises:
            AllocationError: there is no memory for them.
        """
        left = cells
        for transaction in reversed(self.open):
            transaction.rows.keep(left)
            transaction.rest.keep(left)
            left = left[~transaction.held[left]]  # an inner one answers for what it found held
        if self.table.reserved is not None:
            self.table.set_reserved(cells, False)


def stored_parts(store: KVStore) -> tuple[list[tuple[int, Part]], list[tuple[int, Part]]]:
    """Which rows of a cell a rotation touches, by layer and part, and which others there are."""
    layers = list(enumerate(store.spec.layers))
    rotated: list[tuple[int, Part]] = [(i, "k") for i, layer in layers if layer.rope is not None]
    others: list[tuple[int, Part]] = [(i, "k") for i, layer in layers if layer.rope is None]
    return rotated, [*others, *((i, "v") for i, layer in layers if layer.n_embd_v)]


class KeptRows:
    """Rows of cells as they are stored, at most once per wanted cell.

    Args:
        store: where they are.
        wanted: the cells that matter.
        parts: which rows of a cell, by layer and part.
    """

    def __init__(
        self, store: KVStore, wanted: BoolArray, parts: Sequence[tuple[int, Part]]
    ) -> None:
        self._store = store
        self._wanted = wanted.copy()  # not kept yet
        self._parts = tuple(parts)
        self._pieces: list[tuple[Int64Array, list[ByteArray]]] = []

    def keep(self, cells: Int64Array) -> None:
        """Keep the rows of those cells that are wanted and not kept yet."""
        cells = cells[self._wanted[cells]]
        if len(cells):
            try:
                rows = [self._store.read_raw(i, part, cells) for i, part in self._parts]
            except MemoryError:
                n_bytes = self._store.spec.bytes_per_cell * len(cells)
                raise AllocationError("the rows that a rollback needs", n_bytes) from None
            self._add(cells, rows)

    def take(self, inner: KeptRows) -> None:
        """Keep what an inner transaction kept: it stood so when the inner one began, and before."""
        for cells, rows in inner._pieces:
            mine = self._wanted[cells]
            if mine.any():
                self._add(cells[mine], [part[mine] for part in rows])

    def write_back(self) -> None:
        """Write every kept row back, those that were kept first last."""
        for cells, rows in reversed(self._pieces):
            for (layer, part), kept in zip(self._parts, rows, strict=True):
                self._store.write_raw(layer, part, cells, kept)

    def _add(self, cells: Int64Array, rows: list[ByteArray]) -> None:
        self._pieces.append((cells, rows))  # first: rows kept twice do no harm, lost ones would
        self._wanted[cells] = False
