"""A cache of states and its oracle, driven side by side.

Every method does one thing to both and raises AssertionError where they differ; what is refused
must change nothing. Where rows are short, within transactions or because there are fewer than
:func:`~kvcellar.cache.recurrent.state_rows` says, checkpoints may go before their budget says so,
and a batch may find no row; nothing else may differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvcellar.batch import Batch
from kvcellar.cache.base import CheckpointBudget, CheckpointPolicy
from kvcellar.cache.recurrent import RecurrentCache, state_rows
from kvcellar.errors import BatchError, CacheFull, KVCellarError, PositionError
from kvcellar.testing.duel import CacheDuel, Interrupted, closed_range
from kvcellar.testing.naive_recurrent import NaiveStates
from kvcellar.testing.state_conformance import HistoryStore

N_SEQ = 3


class RecurrentDuel(CacheDuel[NaiveStates]):
    """One cache, what it should know, and a store of histories.

    Args:
        limit: how many checkpoints there may be.
        every: how many tokens that come one by one lie between two.
        n_rows: of the store; as many as it should have, if that is not given.
    """

    def __init__(self, limit: int, every: int, n_rows: int | None = None) -> None:
        super().__init__()
        self.store = HistoryStore(n_rows or state_rows(N_SEQ, limit), N_SEQ)
        policy = CheckpointPolicy(CheckpointBudget(limit), every)
        self.cache: RecurrentCache = RecurrentCache(self.store, policy)
        self.naive = NaiveStates(limit, every)
        self._scarce = n_rows is not None
        self._tokens = itertools.count(100)

    # -- decoding

    def decode(
        self,
        owners: Sequence[frozenset[int]],
        n_ubatch: int,
        fail_at: int | None = None,
        gap: int = 0,
    ) -> None:
        """Decode tokens where they follow, the first behind a gap, or fail at a microbatch."""
        last = {seq: self.naive.last(seq) for seq in range(N_SEQ)}
        last.update({seq: last[seq] + gap for seq in owners[0]})
        rows = []
        for group in owners:
            at = last[min(group)] + 1
            rows.append((next(self._tokens), at, group))
            last.update(dict.fromkeys(group, at))
        before = self.state()
        try:
            self._compute(rows, n_ubatch, fail_at)
        except Interrupted:
            assert self.state() == before
        except CacheFull:
            assert self._scarce or self.depth, "a row should have been found"
            assert self.state() == before
        except (BatchError, PositionError):
            assert not self._follows(rows)
            assert self.state() == before
        else:
            assert self._follows(rows)
            self.naive.absorb(rows)

    def _compute(
        self, rows: Sequence[tuple[int, int, frozenset[int]]], n_ubatch: int, fail_at: int | None
    ) -> None:
        batch = Batch()
        for token, at, group in rows:
            batch.add(token, at, sorted(group))
        with self.cache.place(batch, n_ubatch) as placement:
            left = self._kept()
            for i, plan in enumerate(placement.plans()):
                if i == fail_at:
                    self.store.spoil(plan)
                    raise Interrupted
                self.store.absorb(plan)
        self._evict(left)

    def _kept(self) -> list[list[int]]:
        """For each sequence: how many tokens its checkpoints have absorbed."""
        return [
            [kept.n for kept in held.checkpoints] if held else [] for held in self.cache.states.of
        ]

    def _evict(self, left: Sequence[Sequence[int]]) -> None:
        """Drop all but these checkpoints from the oracle; only a lack of rows may take any."""
        for seq, state in self.naive.of.items():
            if self._scarce or self.depth:
                assert state.kept.keys() >= set(left[seq])
                state.kept = {n: mark for n, mark in state.kept.items() if n in left[seq]}

    def _follows(self, rows: Sequence[tuple[int, int, frozenset[int]]]) -> bool:
        last = {seq: self.naive.last(seq) for seq in range(N_SEQ)}
        for _, at, group in rows:
            if any(last[seq] not in (-1, at - 1) for seq in group):
                return False
            last.update(dict.fromkeys(group, at))
        return self.naive.can_share([group for _, _, group in rows])

    # -- verbs

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        """Remove a range, if the state can."""
        before = self.state()
        done = self.cache.seq_rm(seq, p0, p1)
        assert done == self.naive.seq_rm(seq, *closed_range(p0, p1))
        assert done or self.state() == before

    def rewind(self, seq: int, p0: int) -> None:
        """Go back."""
        assert self.cache.rewind(seq, p0) == self.naive.rewind(seq, max(p0, 0))

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Share."""
        self.cache.seq_cp(src, dst, p0, p1)
        self.naive.seq_cp(src, dst)

    def seq_keep(self, seq: int) -> None:
        """Keep one sequence."""
        self.cache.seq_keep(seq)
        self.naive.seq_keep(seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move positions, if the tokens keep their order."""
        self._move(
            seq, p0, p1, lambda at: at + delta, lambda: self.cache.seq_add(seq, p0, p1, delta)
        )

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Divide positions, if the tokens keep their order."""
        self._move(seq, p0, p1, lambda at: at // d, lambda: self.cache.seq_div(seq, p0, p1, d))

    def _move(
        self, seq: int, p0: int, p1: int, change: Callable[[int], int], verb: Callable[[], None]
    ) -> None:
        before, (lo, hi) = self.state(), closed_range(p0, p1)
        moved = (
            {at: change(at) for at in self.naive.of[seq].positions} if seq in self.naive.of else {}
        )
        can = self.naive.move(seq, lo, hi, moved)
        try:
            verb()
        except KVCellarError:
            assert not can
            assert self.state() == before
        else:
            assert can

    def checkpoint(self, seq: int) -> None:
        """Keep a state."""
        assert self.cache.checkpoint(seq) == self.naive.checkpoint(seq)

    def clear(self, data: bool) -> None:
        """Empty the cache."""
        self.cache.clear(data)
        self.naive.clear()
        if data and not self.depth:
            assert all(self.store.text(row) == () for row in range(self.store.spec.n_rows))

    # -- agreement

    def state(self) -> tuple[object, ...]:
        """Return values that never change, and their rows."""
        held = [one for one in self.cache.states.of if one]
        return (*self.cache.states.of, *(self.store.text(row) for one in held for row in one.rows))

    def check(self) -> None:
        """Compare everything, each row's history included."""
        cache, naive = self.cache, self.naive
        cache.check()
        marks = [naive.mark(seq) for seq in sorted(naive.of)]
        assert (cache.used, cache.token_count) == (len(set(marks)), len(marks))
        assert shared_groups(cache) == naive.shared
        for seq in range(N_SEQ):
            self._check_sequence(seq)
        view = cache.view()
        assert (view.used_cells, view.token_count) == (cache.used, cache.token_count)

    def _check_sequence(self, seq: int) -> None:
        cache, state = self.cache, self.naive.of.get(seq)
        tokens = state.tokens if state else []
        assert cache.seq_pos_min(seq) == cache.seq_pos_max(seq) == self.naive.last(seq)
        assert cache.seq_count(seq) == len(tokens)
        assert cache.seq_tokens(seq).tolist() == tokens
        assert cache.seq_positions(seq).tolist() == (state.positions if state else [])
        held = cache.states.of[seq]
        if held is None or state is None:
            assert held is None
            assert state is None
            assert cache.checkpoints(seq) == ()
            return
        assert self.store.text(held.row) == tuple(tokens), "the state is of another text"
        for kept in held.checkpoints:
            assert self.store.text(kept.row) == tuple(tokens[: kept.n]), "a checkpoint is not"
        ends = [kept.n for kept in held.checkpoints]
        assert cache.checkpoints(seq) == tuple(state.positions[n - 1] for n in ends)
        assert ends == sorted(state.kept)


def shared_groups(cache: RecurrentCache) -> list[list[int]]:
    """The groups of sequences that share a row."""
    users: dict[int, list[int]] = {}
    for seq, held in enumerate(cache.states.of):
        if held is not None:
            users.setdefault(held.row, []).append(seq)
    return sorted(group for group in users.values() if len(group) > 1)
