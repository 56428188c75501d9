"""Trying something in a cache and taking it back.

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

What every transaction is: something to be kept or taken back, usable in a with block.

Transactions nest: what an inner one commits, the outer one can still take back. Ending an outer
one by a rollback ends those within it; it cannot be committed while one is open. That much is the
same for every cache, and :class:`Nested` has it.

Between ``place`` and its end a cache can neither be edited nor decode another batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Protocol, TypeAlias, TypeVar

from kvcellar.backends.base import KVStore, Part
from kvcellar.cells import CellTable
from kvcellar.errors import AllocationError, CacheError
from kvcellar.types import BoolArray, ByteArray, Int64Array

U = TypeVar("U", bound="Undoable")

Undo: TypeAlias = Callable[[], None]
Remember: TypeAlias = Callable[[], Undo]
"""Called when a transaction begins; what it returns is called if that is rolled back."""


class NestHost(Protocol):
    """What every transaction needs of its cache."""

    @property
    def is_decoding(self) -> bool:
        """Whether a batch has been placed and neither committed nor released."""

    def abandon(self) -> None:
        """Release what that batch took."""


class Undoable(Protocol):
    """What happens to a cache from here on, to be kept or taken back.

    As a context manager it commits when the block ends, and rolls back when it ends by an
    exception. After a :meth:`rollback` within the block, the rest of it stands on its own.
    """

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or rolled back."""

    def commit(self) -> None:
        """Keep what happened; an outer transaction can still take it back.

        Raises:
            CacheError: it has ended already, an inner one is open, or a batch is being decoded.
        """

    def rollback(self) -> None:
        """Take back what happened, what inner transactions committed included.

        A batch that is being decoded is released. A second time does nothing.

        Raises:
            CacheError: it was committed.
        """

    def __enter__(self: U) -> U:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            if self.is_open:
                self.rollback()
            return
        try:
            if self.is_open:
                self.commit()
        except BaseException:
            self.rollback()
            raise


class Nested(Undoable):
    """A transaction within those that are open.

    Args:
        host: the cache.
        nest: the open transactions, the innermost last; whoever makes this one appends it.
        watchers: those outside of the cache that take part.
    """

    def __init__(
        self, host: NestHost, nest: Sequence[Nested], watchers: Sequence[Remember] = ()
    ) -> None:
        self._host = host
        self._nest = nest
        self._undos = [remember() for remember in watchers]
        self._state: Literal["open", "committed", "rolled back"] = "open"

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or rolled back."""
        return self._state == "open"

    def commit(self) -> None:
        """Keep what happened; see :meth:`Undoable.commit`."""
        if self._state != "open":
            raise CacheError(f"this transaction is {self._state} already")
        if self._nest[-1] is not self:
            raise CacheError("a transaction within this one is open: end that one first")
        if self._host.is_decoding:
            raise CacheError("a batch is being decoded: commit or release its placement first")
        self._keep()
        self._state = "committed"
        self._ended(kept=True)

    def rollback(self) -> None:
        """Take back what happened; see :meth:`Undoable.rollback`."""
        if self._state == "committed":
            raise CacheError("this transaction is committed and cannot be taken back")
        if self._state == "rolled back":
            return
        self._host.abandon()
        while self._nest[-1] is not self:
            self._nest[-1].rollback()
        self._take_back()
        self._state = "rolled back"
        self._ended(kept=False)
        for undo in reversed(self._undos):
            undo()

    # -- what each kind does besides

    def _keep(self) -> None:
        """What has to be done before it counts as committed."""

    def _take_back(self) -> None:
        """Let everything be as it was."""
        raise NotImplementedError

    def _ended(self, *, kept: bool) -> None:
        """Leave the nest; what was kept may still be taken back by an outer one."""
        raise NotImplementedError


class Taken(Protocol):
    """What a batch took of a cache."""

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or released."""

    def release(self) -> None:
        """Let everything be as it was before; a second time does nothing."""


class Decoding:
    """Knows whether a batch is being decoded; whoever places one sets ``_open``."""

    _open: Taken | None = None

    @property
    def is_decoding(self) -> bool:
        """Whether a batch has been placed and neither committed nor released."""
        return self._open is not None and self._open.is_open

    def abandon(self) -> None:
        """Release what a batch that is being decoded took."""
        if self._open is not None:
            self._open.release()

    def _require_idle(self) -> None:
        if self.is_decoding:
            raise CacheError("a batch is being decoded: commit or release its placement first")
        self._open = None


class Host(NestHost, Protocol):
    """What a transaction needs of its cache."""

    def zero_freed(self) -> None:
        """Zero what free cells still hold."""


class Transaction(Nested):
    """Everything that happens to a cache from its begin to its end, to be kept or taken back."""

    def __init__(self, journal: Journal, outer: Transaction | None) -> None:
        super().__init__(journal.host, journal.open, journal.watchers)
        table, store = journal.table, journal.store
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
            journal.host.zero_freed()


class Journal:
    """The open transactions of one cache, the innermost last."""

    def __init__(self, host: Host, table: CellTable, store: KVStore) -> None:
        self.host = host
        self.table = table
        self.store = store
        self.open: list[Transaction] = []
        self.watchers: list[Remember] = []

    def begin(self) -> Transaction:
        """A new transaction within those that are open."""
        transaction = Transaction(self, self.open[-1] if self.open else None)
        self.open.append(transaction)
        self.table.reserved = transaction.reserved
        return transaction

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
            self.table.reserved[cells] = False


def stored_parts(store: KVStore) -> tuple[list[tuple[int, Part]], list[tuple[int, Part]]]:
    """Which rows of a cell a rotation touches, by layer and part, and which others there are."""
    layers = list(enumerate(store.spec.layers))
    rotated: list[tuple[int, Part]] = [(i, "k") for i, layer in layers if layer.rope is not None]
    others: list[tuple[int, Part]] = [(i, "k") for i, layer in layers if layer.rope is None]
    return rotated, [*others, *((i, "v") for i, layer in layers if layer.n_embd_v)]


class KeptRows:
    """Rows of cells as they are stored, those of each wanted cell at most once.

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
        """Let every row stand as it was kept."""
        for cells, rows in self._pieces:
            for (layer, part), kept in zip(self._parts, rows, strict=True):
                self._store.write_raw(layer, part, cells, kept)

    def _add(self, cells: Int64Array, rows: list[ByteArray]) -> None:
        self._wanted[cells] = False
        self._pieces.append((cells, rows))
