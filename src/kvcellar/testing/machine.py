"""A Hypothesis machine that drives an attention cache and its naive oracle side by side.

After every step the two must agree on everything, the cache must pass ``check()``, and each used
cell must hold the right bytes (invariants 6 and 7). Failed operations change neither.

Use it as a test case::

    TestAttentionCache = AttentionMachine.TestCase
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvcellar.batch import Batch
from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.base import OnShared
from kvcellar.cache.placement import Placement
from kvcellar.errors import BatchError, CacheFull, PositionError, SequenceIdError
from kvcellar.testing.naive import NaiveCache, NaiveToken, naive_mask
from kvcellar.testing.stores import SignatureStore
from kvcellar.testing.strategies import BOUNDS, SEQ_IDS, TOKEN_OWNERS, attention_spec
from kvcellar.types import MAX_POSITION, Int64Array


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt while a batch is computed."""


# Verbs that would find an empty cache, and those that leave little of a full one, wait: else most
# steps of most runs happen in an empty cache.
_in_use = precondition(lambda machine: machine.naive.used > 0)
_pending = precondition(lambda machine: any(cell.pending for cell in machine.naive.cells))
_with_holes = precondition(lambda machine: machine.naive.cell_max > machine.naive.used)
_mostly_used = precondition(lambda machine: 2 * machine.naive.used > len(machine.naive.cells))


class AttentionMachine(RuleBasedStateMachine):
    """Verbs, decodes that succeed, fail and are interrupted, updates and compaction."""

    def __init__(self) -> None:
        super().__init__()
        self.naive = NaiveCache(1)

    @initialize(
        size=st.integers(3, 8),
        padding=st.integers(1, 4),
        on_shared=st.sampled_from(["copy", "move"]),
    )
    def start(self, size: int, padding: int, on_shared: OnShared) -> None:
        """A cache with three tokens of two sequences."""
        spec = attention_spec(size, n_seq_max=4, padding=padding)
        self.store = SignatureStore(spec)
        self.cache = AttentionCache(spec, self.store, on_shared)
        self.naive = NaiveCache(size, on_shared)
        self.contents = itertools.count()
        self.decode([frozenset({0})] * 2 + [frozenset({1})], [0, 0, 0], 2, None)

    # -- decoding

    def _tokens(self, owners: list[frozenset[int]], gaps: list[int]) -> list[NaiveToken]:
        last = {seq: self.naive.pos_max(seq) for seq in range(4)}
        tokens = []
        for group, gap in zip(owners, gaps, strict=False):
            pos = max(last[seq] for seq in group) + 1 + gap
            last.update(dict.fromkeys(group, pos))
            content = next(self.contents)
            tokens.append(NaiveToken(content % 7, pos, group, content))
        return tokens

    @rule(
        owners=st.lists(TOKEN_OWNERS, min_size=1, max_size=5),
        gaps=st.lists(st.integers(0, 1), min_size=5, max_size=5),
        n_ubatch=st.integers(1, 4),
        fail_at=st.none() | st.integers(0, 4),
    )
    def decode(
        self, owners: list[frozenset[int]], gaps: list[int], n_ubatch: int, fail_at: int | None
    ) -> None:
        """Decode; or be interrupted at a microbatch, which leaves everything as it was."""
        room = len(self.naive.cells) - self.naive.used
        tokens = self._tokens(owners[: room + 1], gaps)
        batch = Batch()
        for token in tokens:
            batch.add(token.token, token.pos, sorted(token.owners))
        after = self.naive.copy()
        try:
            after.place(tokens, n_ubatch)
        except CacheFull:
            after = self.naive
        rotated = self.naive.copy()
        rotated.update()
        try:
            with self.cache.place(batch, n_ubatch, coupled="any") as placement:
                self._compute(placement, tokens, after, fail_at)
            self.naive = after
        except CacheFull:
            if after is not self.naive:
                raise
        except Interrupted:
            self.naive = rotated

    def _compute(
        self,
        placement: Placement,
        tokens: list[NaiveToken],
        after: NaiveCache,
        fail_at: int | None,
    ) -> None:
        for i, plan in enumerate(placement.plans()):
            if i == fail_at:
                raise Interrupted
            part = [tokens[row] for row in plan.micro.rows]
            contents: Int64Array = np.array([token.content for token in part], np.int64)
            self.store.fill(plan.cells, contents, plan.micro.positions)
            want = naive_mask(part, after.cells, plan.n_kv)
            np.testing.assert_array_equal(plan.mask, want)
            assert plan.n_kv == self.cache.spec.size or plan.n_kv % self.cache.spec.padding == 0

    @rule(owners=TOKEN_OWNERS, back=st.integers(0, 2))
    def decode_at_a_position_that_is_taken(self, owners: frozenset[int], back: int) -> None:
        """Positions that do not rise are refused."""
        pos = max(self.naive.pos_max(seq) for seq in owners) - back
        if pos >= 0:
            self._refused(PositionError, lambda: self._place(0, pos, owners))

    @rule(owners=TOKEN_OWNERS)
    def decode_a_token_of_sequences_that_differ(self, owners: frozenset[int]) -> None:
        """A shared token is refused unless its owners hold the same cells."""
        if not self.naive.is_coupled(owners):
            pos = max(self.naive.pos_max(seq) for seq in owners) + 1
            self._refused(BatchError, lambda: self._place(0, pos, owners))

    def _place(self, token: int, pos: int, owners: frozenset[int]) -> None:
        self.cache.place(Batch().add(token, pos, sorted(owners)), 4)

    # -- verbs

    @_in_use
    @rule(seq=SEQ_IDS | st.just(-1), p0=BOUNDS, p1=BOUNDS)
    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        """Remove a range."""
        assert self.cache.seq_rm(seq, p0, p1) is True
        self.naive.seq_rm(seq, *_closed(p0, p1))

    @_in_use
    @rule(src=SEQ_IDS, dst=SEQ_IDS, p0=BOUNDS, p1=BOUNDS)
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Share a range."""
        self.cache.seq_cp(src, dst, p0, p1)
        self.naive.seq_cp(src, dst, *_closed(p0, p1))

    @_mostly_used
    @rule(seq=SEQ_IDS)
    def seq_keep(self, seq: int) -> None:
        """Keep one sequence."""
        self.cache.seq_keep(seq)
        self.naive.seq_keep(seq)

    @_in_use
    @rule(seq=SEQ_IDS, p0=BOUNDS, p1=BOUNDS, delta=st.integers(-4, 4))
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move a range, if there is room for copies of shared cells."""
        self._both(
            lambda: self.cache.seq_add(seq, p0, p1, delta),
            lambda naive: naive.seq_add(seq, *_closed(p0, p1), delta),
        )

    @_in_use
    @rule(seq=SEQ_IDS, p0=BOUNDS, p1=BOUNDS, d=st.integers(1, 4))
    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Divide a range, if there is room for copies of shared cells."""
        self._both(
            lambda: self.cache.seq_div(seq, p0, p1, d),
            lambda naive: naive.seq_div(seq, *_closed(p0, p1), d),
        )

    @_mostly_used
    @rule()
    def clear(self) -> None:
        """Empty the cache."""
        self.cache.clear()
        self.naive.clear()

    @_pending
    @rule()
    def update(self) -> None:
        """Rotate what is pending."""
        self.cache.update()
        self.naive.update()

    @_with_holes
    @rule(max_moves=st.integers(1, 3))
    def defrag(self, max_moves: int) -> None:
        """Compact."""
        self.cache.defrag(max_moves)
        self.cache.update()
        self.naive.update()
        self.naive.defrag(max_moves)

    @_mostly_used
    @rule(seq=st.sampled_from([-2, 4, 64]))
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
            self._refused(SequenceIdError, call)

    # -- comparing

    def _both(self, real: Callable[[], None], naive: Callable[[NaiveCache], None]) -> None:
        after = self.naive.copy()
        try:
            naive(after)
        except CacheFull:
            self._refused(CacheFull, real)
        else:
            real()
            self.naive = after

    def _refused(self, error: type[Exception], call: Callable[[], object]) -> None:
        """The call raises; the invariants below see to it that nothing has changed."""
        try:
            call()
        except error:
            return
        raise AssertionError(f"{error.__name__} was not raised")

    @invariant()
    def cells_agree(self) -> None:
        """Every cell, the head and the counts."""
        table, naive = self.cache.table, self.naive
        table.check()
        for i, cell in enumerate(naive.cells):
            state = (table.positions[i], table.pending[i], table.tokens[i], {*table.owners_of(i)})
            assert state == (cell.pos, cell.pending, cell.token, cell.owners), f"cell {i}"
            if cell.owners:
                held = (self.store.content[i], self.store.rotation[i])
                assert held == (cell.content, cell.rotation), f"bytes of cell {i}"
        assert table.head == naive.head
        assert (table.used, table.token_count) == (naive.used, naive.token_count)
        assert table.cell_max() == naive.cell_max

    @invariant()
    def sequences_agree(self) -> None:
        """Counts and positions of every sequence."""
        for seq in range(4):
            positions = self.naive.positions(seq)
            cells = self.cache.table.cells_of(seq)
            assert self.cache.table.positions[cells].tolist() == positions
            assert self.cache.table.seq_count(seq) == len(positions)
            assert self.cache.seq_pos_min(seq) == self.naive.pos_min(seq)
            assert self.cache.seq_pos_max(seq) == self.naive.pos_max(seq)

    @invariant()
    def view_agrees(self) -> None:
        """The view shows what is there."""
        view = self.cache.view(2)
        shown = tuple(tuple(sorted(cell.owners)[:2]) for cell in self.naive.cells)
        assert view.sequences == shown
        runs = "".join("#" if cell.owners else "." for cell in self.naive.cells).split("#")
        assert view.max_contiguous == max(map(len, runs))


def _closed(p0: int, p1: int) -> tuple[int, int]:
    return max(p0, 0), MAX_POSITION if p1 < 0 else p1
