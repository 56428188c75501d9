"""An attention cache and its naive oracle, driven side by side.

Every method of a duel does one thing to both and raises AssertionError where they differ; ``check``
compares everything. :class:`CacheDuel` is what duels of all kinds of caches share.

1. A call that fails changes nothing: no byte, no cell, no head (invariant 5 of caches).
2. Each used cell holds the rows of its content, K rotated to its position (invariant 6).
3. Rows that were not rotated stay the same bit for bit (invariant 7).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NoReturn, Protocol, TypeVar

import numpy as np

from kvcellar.backends.base import Part
from kvcellar.batch import Batch
from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.base import Cache, OnShared, Transaction
from kvcellar.cache.placement import Placement
from kvcellar.errors import (
    AllocationError,
    BatchError,
    CacheError,
    CacheFull,
    PositionError,
    SequenceIdError,
)
from kvcellar.testing.naive import NaiveCache, NaiveCell, NaiveToken, naive_mask
from kvcellar.testing.signs import Setup, check_rows, fill
from kvcellar.types import MAX_POSITION, Int64Array

N_SEQ = 4
PARTS: tuple[Part, ...] = ("k", "v")


def snapshot(cache: AttentionCache, *, only_used: bool = False) -> tuple[object, ...]:
    """All that a failed operation must leave as it was, rows of free cells too if wanted."""
    table, store = cache.table, cache.store
    cells = np.flatnonzero(table.positions >= 0) if only_used else np.arange(table.size)
    layers = range(len(store.spec.layers))
    rows = [store.read_raw(i, part, cells).tobytes() for i in layers for part in PARTS]
    saved = table.save()
    arrays = [array.tobytes() for array in saved.arrays]
    return (table.size, *rows, *arrays, saved.head, saved.used, saved.token_count)


def check_agreement(cache: AttentionCache, naive: NaiveCache) -> None:
    """Raise AssertionError where cache and oracle differ, InvariantError if the cache is broken.

    Rows that the oracle knows must be the same bit for bit (invariant 7); rows that were written
    or rotated since must be the right ones (invariant 6), and are known from then on.
    """
    cache.check()
    _check_cells(cache, naive)
    _check_sequences(cache, naive)
    _check_bytes(cache, naive)
    view = cache.view(2)
    assert view.sequences == tuple(tuple(sorted(c.owners)[:2]) for c in naive.cells)
    runs = "".join("#" if cell.owners else "." for cell in naive.cells).split("#")
    assert view.max_contiguous == max(map(len, runs))


def _check_cells(cache: AttentionCache, naive: NaiveCache) -> None:
    table = cache.table
    assert cache.spec.size == cache.store.spec.size == table.size == len(naive.cells)
    for i, cell in enumerate(naive.cells):
        state = (table.positions[i], table.pending[i], table.tokens[i], {*table.owners_of(i)})
        assert state == (cell.pos, cell.pending, cell.token, cell.owners), f"cell {i}"
    assert table.head == naive.head
    assert (table.used, table.token_count) == (naive.used, naive.token_count)
    assert (table.cell_max(), table.n_free()) == (naive.cell_max, naive.n_free)


def _check_sequences(cache: AttentionCache, naive: NaiveCache) -> None:
    table = cache.table
    for seq in range(N_SEQ):
        positions = naive.positions(seq)
        assert table.positions[table.cells_of(seq)].tolist() == positions
        assert table.seq_count(seq) == len(positions)
        assert cache.seq_pos_min(seq) == naive.pos_min(seq)
        assert cache.seq_pos_max(seq) == naive.pos_max(seq)


def _check_bytes(cache: AttentionCache, naive: NaiveCache) -> None:
    used = [i for i, cell in enumerate(naive.cells) if cell.owners]
    cells, layers = np.array(used, np.int64), range(len(cache.store.spec.layers))
    k, v = ([cache.store.read_raw(i, part, cells) for i in layers] for part in PARTS)
    unknown: list[tuple[int, NaiveCell]] = []
    for n, i in enumerate(used):
        cell = naive.cells[i]
        k_rows = tuple(rows[n].tobytes() for rows in k)
        v_rows = tuple(rows[n].tobytes() for rows in v)
        if cell.k_rows is None:
            unknown.append((i, cell))
        assert cell.k_rows in (None, k_rows), f"K of cell {i} has changed"
        assert cell.v_rows in (None, v_rows), f"V of cell {i} has changed"
        cell.k_rows, cell.v_rows = k_rows, v_rows
    facts = [(i, cell.content, cell.rotation, cell.turns) for i, cell in unknown]
    check_rows(cache.store, *np.array(facts, np.int64).reshape(-1, 4).T)


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt while a batch is computed."""


def closed_range(p0: int, p1: int) -> tuple[int, int]:
    """A range of positions without open bounds."""
    return max(p0, 0), MAX_POSITION if p1 < 0 else p1


OracleT = TypeVar("OracleT", bound="Oracle")


class Oracle(Protocol):
    """What an oracle of whatever kind can do: a transaction is a copy."""

    def copy(self: OracleT) -> OracleT:
        """Return an independent copy."""


class CacheDuel(ABC, Generic[OracleT]):
    """Transactions and refusals, which are the same whatever is driven.

    Attributes:
        cache: what is proved.
        naive: its oracle.
    """

    cache: Cache
    naive: OracleT

    def __init__(self) -> None:
        self._open: list[tuple[Transaction, OracleT, object]] = []

    @property
    def depth(self) -> int:
        """How many transactions are open."""
        return len(self._open)

    @abstractmethod
    def state(self) -> object:
        """Return all that a rollback brings back, and a call that fails must leave as it was."""

    def untouched(self) -> object:
        """Return what a call must leave as it was that is refused before it did anything."""
        return self.state()

    @abstractmethod
    def check(self) -> None:
        """Compare all there is."""

    def begin(self) -> None:
        """Begin a transaction, within those that are open."""
        self._open.append((self.cache.transaction(), self.naive.copy(), self.state()))

    def commit(self) -> None:
        """Keep what happened in the innermost one; an outer one has to wait."""
        if self.depth > 1:
            self.refused(CacheError, self._open[0][0].commit)
        self._open.pop()[0].commit()

    def rollback(self, depth: int) -> None:
        """Take back all but the outermost ``depth`` transactions."""
        transaction, self.naive, before = self._open[depth]
        transaction.rollback()
        assert not any(inner.is_open for inner, *_ in self._open[depth:])
        assert self.state() == before, "something has changed that was to be taken back"
        del self._open[depth:]

    def refused(self, error: type[Exception], call: Callable[[], object]) -> None:
        """Call what must raise this error and change nothing."""
        before = self.untouched()
        try:
            call()
        except error:
            assert self.untouched() == before, f"{error.__name__} changed something"
        else:
            raise AssertionError(f"{error.__name__} was not raised")


class Duel(CacheDuel[NaiveCache]):
    """One cache, one oracle; ``broken`` names a method of the store that fails at first."""

    def __init__(
        self, setup: Setup, size: int, padding: int = 1, on_shared: OnShared = "copy"
    ) -> None:
        super().__init__()
        spec = setup.spec(size, padding, N_SEQ)
        self.store = setup.store(spec)
        self.cache: AttentionCache = AttentionCache(spec, self.store, on_shared)
        self.naive = NaiveCache(size, on_shared)
        self.broken: str | None = None
        self._contents = itertools.count()

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def state(self) -> object:
        """Return cells and the rows of those in use."""
        return snapshot(self.cache, only_used=True)

    def untouched(self) -> object:
        """Return the rows of free cells too."""
        return snapshot(self.cache)

    # -- decoding

    def decode(
        self,
        owners: Sequence[frozenset[int]],
        gaps: Sequence[int],
        n_ubatch: int,
        fail_at: int | None = None,
    ) -> None:
        """Decode; or be interrupted at a microbatch, which leaves everything as it was."""
        tokens = self._tokens(owners[: self.naive.n_free + 1], gaps)
        batch = Batch()
        for token in tokens:
            batch.add(token.token, token.pos, sorted(token.owners))
        after, rotated = self.naive.copy(), self.naive.copy()
        try:
            after.place(tokens, n_ubatch)
        except CacheFull:
            self.refused(CacheFull, lambda: self.cache.place(batch, n_ubatch, coupled="any"))
            return
        rotated.update()
        try:
            with self.cache.place(batch, n_ubatch, coupled="any") as placement:
                self._compute(placement, tokens, after, fail_at)
            self.naive = after
        except Interrupted:
            self.naive = rotated

    def _tokens(self, owners: Sequence[frozenset[int]], gaps: Sequence[int]) -> list[NaiveToken]:
        last = {seq: self.naive.pos_max(seq) for seq in range(N_SEQ)}
        tokens = []
        for group, gap in zip(owners, gaps, strict=False):
            pos = max(last[seq] for seq in group) + 1 + gap
            last.update(dict.fromkeys(group, pos))
            content = next(self._contents)
            tokens.append(NaiveToken(content % 7, pos, group, content))
        return tokens

    def _compute(
        self,
        placement: Placement,
        tokens: Sequence[NaiveToken],
        after: NaiveCache,
        fail_at: int | None,
    ) -> None:
        for i, plan in enumerate(placement.plans()):
            part = [tokens[row] for row in plan.micro.rows]
            contents: Int64Array = np.array([token.content for token in part], np.int64)
            fill(self.store, plan.cells, contents, plan.micro.positions)
            if i == fail_at:
                raise Interrupted
            want = naive_mask(part, after.cells, plan.n_kv)
            np.testing.assert_array_equal(plan.mask, want)
            assert plan.n_kv == self.cache.spec.size or plan.n_kv % self.cache.spec.padding == 0

    def decode_at_a_position_that_is_taken(self, owners: frozenset[int], back: int) -> None:
        """Positions that do not rise are refused."""
        pos = max(self.naive.pos_max(seq) for seq in owners) - back
        if pos >= 0:
            self.refused(PositionError, lambda: self._place(pos, owners))

    def decode_a_token_of_sequences_that_differ(self, owners: frozenset[int]) -> None:
        """A shared token is refused unless its owners hold the same cells."""
        if not self.naive.is_coupled(owners):
            pos = max(self.naive.pos_max(seq) for seq in owners) + 1
            self.refused(BatchError, lambda: self._place(pos, owners))

    def _place(self, pos: int, owners: frozenset[int]) -> None:
        self.cache.place(Batch().add(0, pos, sorted(owners)), 4)

    # -- verbs

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        """Remove a range."""
        assert self.cache.seq_rm(seq, p0, p1) is True
        self.naive.seq_rm(seq, *closed_range(p0, p1))

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Share a range."""
        self.cache.seq_cp(src, dst, p0, p1)
        self.naive.seq_cp(src, dst, *closed_range(p0, p1))

    def seq_keep(self, seq: int) -> None:
        """Keep one sequence."""
        self.cache.seq_keep(seq)
        self.naive.seq_keep(seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move a range, if there is room for copies of shared cells."""
        self._both(
            lambda: self.cache.seq_add(seq, p0, p1, delta),
            lambda naive: naive.seq_add(seq, *closed_range(p0, p1), delta),
        )

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Divide a range, if there is room for copies of shared cells."""
        self._both(
            lambda: self.cache.seq_div(seq, p0, p1, d),
            lambda naive: naive.seq_div(seq, *closed_range(p0, p1), d),
        )

    def clear(self, data: bool = True) -> None:
        """Empty the cache."""
        self.cache.clear(data)
        self.naive.clear()

    def update(self) -> None:
        """Rotate what is pending."""
        self._both(self.cache.update, NaiveCache.update)

    def defrag(self, max_moves: int) -> None:
        """Compact."""
        self.update()
        self.cache.defrag(max_moves)
        self._both(self.cache.update, lambda naive: naive.defrag(max_moves))

    def resize(self, size: int) -> None:
        """Grow or shrink, if what is used fits and no transaction is open."""
        if self._open:
            self.refused(CacheError, lambda: self.cache.resize(size))
        else:
            self._both(lambda: self.cache.resize(size), lambda naive: naive.resize(size))

    def unknown_sequence(self, seq: int) -> None:
        """Ids out of range are refused by every verb."""
        for call in (
            lambda: self.cache.seq_rm(seq),
            lambda: self.cache.seq_cp(seq, 0),
            lambda: self.cache.seq_cp(0, seq),
            lambda: self.cache.seq_keep(seq),
            lambda: self.cache.seq_add(seq, 0, -1, 1),
            lambda: self.cache.seq_div(seq, 0, -1, 2),
            lambda: self.cache.seq_pos_max(seq),
        ):
            self.refused(SequenceIdError, call)

    # -- transactions

    def begin(self) -> None:
        """Begin a transaction; cells in use are not filled until it ends."""
        super().begin()
        self.naive.reserve()

    def commit(self) -> None:
        """Keep what happened in the innermost one."""
        reserved = self._open[-1][1].reserved
        super().commit()
        self.naive.reserved = reserved

    # -- failures

    def _both(self, real: Callable[[], None], naive: Callable[[NaiveCache], None]) -> None:
        after = self.naive.copy()
        try:
            naive(after)
        except CacheFull:
            self.refused(CacheFull, real)
            return
        if not self._survives_broken_store(real):
            real()
        self.naive = after

    def _survives_broken_store(self, call: Callable[[], None]) -> bool:
        """Whether the call works although a method of the store fails; else nothing changed."""
        if self.broken is None:
            return False
        before = self.state()
        try:
            with self._breaking(self.broken):
                call()
        except AllocationError:
            assert self.state() == before, "something has changed that was to be taken back"
            return False
        return True

    @contextmanager
    def _breaking(self, method: str) -> Iterator[None]:
        works = getattr(self.store, method)

        def fail(*args: Int64Array) -> NoReturn:
            if method == "copy":
                works(*args)  # the worst case: it fails when all of it is done
            raise AllocationError("a test", 1)

        setattr(self.store, method, fail)
        try:
            yield
        finally:
            setattr(self.store, method, works)

    def check(self) -> None:
        """Compare all there is."""
        check_agreement(self.cache, self.naive)
