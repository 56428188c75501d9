"""Where the tokens of a batch go, and what becomes of them.

A :class:`Placement` holds what a whole batch takes of a cache, taken before any of it is computed:
``commit`` leaves head behind the last cell; ``release`` frees exactly these cells and puts head
back, so that a decode which fails or is interrupted, at whatever microbatch, changes nothing. What
it wrote into them is wiped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import numpy as np

from kvcellar.batch import MicroBatch
from kvcellar.cache.changes import Changes, Handle, Lasting, Leave, atomic, forward
from kvcellar.cache.state_placement import StatePlacement
from kvcellar.cells import CellTable, padded_n_kv
from kvcellar.cellsets import unpack_owners
from kvcellar.errors import BatchError, CacheError, CacheFull, not_copied
from kvcellar.plan import CellPlan, Plan, attention_mask, cell_lists
from kvcellar.types import Float16Array, Int64Array, OwnerBits

_CHUNK = 2048


class Placement(Handle["Placement"]):
    """The cells and rows that a batch takes, from ``place`` until ``commit`` or ``release``.

    As a context manager it commits when every plan has been taken and the block ends without an
    error, and releases otherwise. One that nobody can end any more is released::

        with cache.place(batch, n_ubatch) as placement:
            for plan in placement.plans():
                run(plan)
    """

    __reduce_ex__ = not_copied("a placement", "commit or release it, and place the batch again")

    def __init__(self, batch: OpenBatch, grip: Leave | None = None) -> None:
        super().__init__(batch, grip)
        self._batch = batch
        self.micros = batch.micros
        self.groups = batch.groups
        self.states = batch.states

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or released."""
        return self._batch.is_open

    @property
    def cells(self) -> Int64Array:
        """The first group's cells of the batch's tokens, microbatch after microbatch."""
        return self.groups[0].cells

    def plans(
        self, mask_buffer: Float16Array | None = None, lists: Sequence[bool] = ()
    ) -> Iterator[Plan]:
        """The plan of each microbatch, made when it is asked for.

        Args:
            mask_buffer: where masks of the first group are built, ``[>= n_ubatch, >= n_kv]``; a
                plan's mask is then good until the next plan is taken.
            lists: for each group, whether its tokens get lists of cells, not a mask; the groups
                that none is said for get masks.
        """
        for i in range(self._batch.n_planned, len(self.micros)):
            plan = self._batch.plan(i, mask_buffer, lists)
            self._batch.n_planned = i + 1
            yield plan

    def commit(self) -> None:
        """Keep what was taken: everything has been computed."""
        self._batch.commit()

    def release(self) -> None:
        """Give back exactly what was taken; a second time does nothing."""
        if self._batch.is_open:
            self._batch.take_back()


class OpenBatch(Lasting[Placement]):
    """What the cache knows of a batch that is placed and neither committed nor released.

    Args:
        changes: those of the cache.
        micros: the batch.
        groups: what it has of each group.
        states: what it has of the states.

    Attributes:
        n_planned: how many microbatches have had their plan taken.
    """

    def __init__(
        self,
        changes: Changes,
        micros: Sequence[MicroBatch],
        groups: Sequence[CellPart],
        states: StatePlacement | None = None,
    ) -> None:
        self.changes = changes
        self.micros = tuple(micros)
        self.groups = tuple(groups)
        self.states = states
        self.n_planned = 0
        self._parts: list[CellPart | StatePlacement] = [*self.groups]
        if states is not None:
            self._parts.append(states)

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or released."""
        return self in self.changes.lasting

    def handle(self) -> Placement:
        """Return a placement that ends it."""
        return Placement(self)

    def leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,  # noqa: ARG002
        traceback: TracebackType | None = None,  # noqa: ARG002
    ) -> None:
        """Commit it if every plan has been taken without an exception; release it otherwise."""
        if not self.is_open:
            return
        if kind is None and self.n_planned == len(self.micros):
            self.commit()
        else:
            self.take_back()

    @atomic
    def plan(self, i: int, mask_buffer: Float16Array | None, lists: Sequence[bool]) -> Plan:
        """The plan of microbatch i; see :meth:`Placement.plans`."""
        self._require_open()
        groups = []
        for number, group in enumerate(self.groups):
            as_lists = number < len(lists) and lists[number]
            groups.append(group.plan(i, None if number else mask_buffer, as_lists))
        states = None if self.states is None else self.states.plan(i)
        return Plan(self.micros[i], tuple(groups), states)

    @atomic
    def commit(self) -> None:
        """Keep what was taken: everything has been computed."""
        self._require_open()
        for part in self._parts:
            part.commit()
        self.changes.lasting.remove(self)

    @forward
    def take_back(self) -> None:
        """Give back exactly what was taken."""
        for part in reversed(self._parts):
            part.release()
        self.changes.lasting.remove(self)

    def _require_open(self) -> None:
        if not self.is_open:
            raise CacheError("this placement has been committed or released already")


class CellPart(ABC):
    """A batch's cells in one cache of K and V, taken and neither committed nor released."""

    @property
    @abstractmethod
    def cells(self) -> Int64Array:
        """The cells of the batch's tokens, microbatch after microbatch."""

    @abstractmethod
    def plan(self, i: int, mask_buffer: Float16Array | None, as_lists: bool) -> CellPlan:
        """What microbatch i reads and writes; asked for in order, before it is computed."""

    @abstractmethod
    def commit(self) -> None:
        """Keep the cells: everything has been computed."""

    @abstractmethod
    def release(self) -> None:
        """Put everything back as it was before."""


class CellPlacement(CellPart):
    """The cells of one batch in a table, all taken at once.

    Args:
        table: where they are.
        padding: what the number of cells that attention looks at is rounded up to.
        window: how many positions a token sees, its own included; 0: all.
        micros: what is placed.
        wipe: zeroes the rows of cells that have been freed.

    Attributes:
        n_kv: how many cells attention looks at for the last of them.
    """

    def __init__(
        self,
        table: CellTable,
        padding: int,
        window: int,
        micros: Sequence[MicroBatch],
        wipe: Callable[[Int64Array], None],
    ) -> None:
        self._table = table
        self._padding = padding
        self._window = window
        self._micros = micros
        self._wipe = wipe
        self._head = table.head
        self._cells: list[Int64Array] = []
        self._tops: list[int] = []  # cell_max as each microbatch sees it
        self._taken = 0
        top = table.cell_max()
        for micro in micros:
            cells = find_cells(table, len(micro.positions))
            table.place(cells, micro.positions, micro.owners, micro.tokens)
            table.head = (int(cells[-1]) + 1) % table.size
            self._cells.append(cells)
            top = max(top, int(cells.max()) + 1)
            self._tops.append(top)
        self.n_kv = padded_n_kv(top, padding, table.size)

    @property
    def cells(self) -> Int64Array:
        """The cells of the batch's tokens, microbatch after microbatch."""
        return np.concatenate(self._cells)

    def plan(self, i: int, mask_buffer: Float16Array | None, as_lists: bool) -> CellPlan:
        """What microbatch i reads and writes."""
        self._taken = max(self._taken, i + 1)
        table, micro, cells, top = self._table, self._micros[i], self._cells[i], self._tops[i]
        n_kv = 0 if as_lists else padded_n_kv(top, self._padding, table.size)
        return cell_plan(table, micro, cells, top, n_kv, self._window, mask_buffer)

    def commit(self) -> None:
        """Keep the cells, which they are."""

    def release(self) -> None:
        """Free exactly the cells that were placed, put head back, and wipe what was computed."""
        for cells in self._cells:
            self._table.release(cells)
        self._table.head = self._head
        if self._taken:
            # A failed computation may have left NaN, which a mask cannot hide (invariant 9).
            self._wipe(np.concatenate(self._cells[: self._taken]))


def cell_plan(
    table: CellTable,
    micro: MicroBatch,
    cells: Int64Array,
    top: int,
    n_kv: int,
    window: int,
    mask_buffer: Float16Array | None,
) -> CellPlan:
    """Return which cells a microbatch in these cells may read.

    Args:
        table: who owns which cell.
        micro: the microbatch.
        cells: where it was put.
        top: cells from here on are not read.
        n_kv: how many cells a mask is about; 0: lists of cells, not a mask.
        window: how many positions a token sees, its own included; 0: all.
        mask_buffer: where to build the mask.
    """
    if n_kv == 0:
        lists = cell_lists(micro, table.positions[:top], table.owners[:, :top], window)
        return CellPlan(cells, np.empty((len(cells), 0), np.float16), lists)
    positions, owners = table.positions[:n_kv], table.owners[:, :n_kv]
    return CellPlan(cells, attention_mask(micro, positions, owners, mask_buffer, window=window))


def find_cells(table: CellTable, n: int) -> Int64Array:
    """Free cells for n tokens, in the order in which the tokens take them.

    They are searched from ``head`` on: first n free neighbours, wrapping once past the end (a run
    itself never wraps), else n free cells in order. The search changes nothing.

    Raises:
        CacheFull: fewer than n cells are free.
    """
    # Far behind everything that is used: better to look at the start again.
    head = 0 if table.head > table.used + 2 * n else table.head
    top = table.cell_max() if table.reserved is None else table.size  # from here on all are free
    stop = table.size - n + 1
    if top <= head < stop:
        return np.arange(head, head + n)
    require_free(table, n)
    for lo, hi in ((head, stop), (0, min(head, stop))):
        start = _find_run(table, lo, hi, n, top)
        if start is not None:
            return np.arange(start, start + n)
    ahead = np.flatnonzero(~table.taken(head, table.size))[:n] + head
    behind = np.flatnonzero(~table.taken(0, head))[: n - len(ahead)]
    return np.concatenate((ahead, behind))


def require_free(table: CellTable, n: int) -> None:
    """Raise CacheFull, saying why, unless n cells may be filled."""
    if (free := table.n_free()) < n:
        kept = table.size - table.used - free
        hint = f"{kept} more are kept until the transaction ends" if kept else ""
        raise CacheFull(n, free, hint)


def _find_run(table: CellTable, lo: int, hi: int, n: int, top: int) -> int | None:
    """The first start in ``[lo, hi)`` of n free neighbours; all cells from ``top`` on are free."""
    chunk = _CHUNK
    run = at = lo  # cells run .. at are known to be free
    while run < hi:
        if at - run >= n or at >= top:
            return run
        end = min(at + chunk, top)
        busy = table.taken(at, end)
        if n == 1:
            first = int(busy.argmin())
            run = end if busy[first] else at + first
        else:
            edges = np.flatnonzero(busy) + at
            starts = np.concatenate(([run], edges + 1))
            wide = np.flatnonzero(edges - starts[:-1] >= n)
            run = int(starts[wide[0] if len(wide) else -1])
        at, chunk = end, chunk * 4
    return None


def check_coupled(table: CellTable, row_owners: OwnerBits) -> None:
    """Refuse tokens whose owners do not hold the same cells: their contexts would be mixed.

    Raises:
        BatchError: names such a token and its owners.
    """
    several = (row_owners & (row_owners - np.uint64(1))).any(axis=0)
    if len(row_owners) > 1:
        several |= np.count_nonzero(row_owners, axis=0) > 1
    if not several.any():
        return
    cell_owners = table.owners[:, : table.cell_max()]
    last_row = {row_owners[:, row].tobytes(): int(row) for row in np.flatnonzero(several)}
    for row in last_row.values():
        wanted = row_owners[:, [row]]
        for held in (cell_owners, row_owners[:, :row]):
            common = held & wanted
            if (common.any(axis=0) & (common != wanted).any(axis=0)).any():
                seq_ids = unpack_owners(wanted)[1].tolist()
                raise BatchError(
                    f"token {row} is shared by sequences {seq_ids}, which do not hold the same "
                    "cells: give each its own token, or seq_cp one to the others first"
                )
