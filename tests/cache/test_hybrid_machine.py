"""Random edits and decodes of a cache of several parts, against a list of tokens a sequence.

After every step each part knows exactly the listed tokens; what a token may attend to is read from
the cells that the masks show. Whether a verb is done is what all parts, asked alone, say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvcellar.batch import Batch
from kvcellar.cache import AttentionCache
from kvcellar.cache.base import Cache, CheckpointBudget, CheckpointPolicy
from kvcellar.cache.hybrid import HybridCache
from kvcellar.cache.recurrent import RecurrentCache, state_rows
from kvcellar.cellsets import unpack_owners
from kvcellar.errors import CacheFull, InvariantError
from kvcellar.plan import Plan
from kvcellar.testing.duel import CacheDuel, Interrupted
from kvcellar.testing.machine import RewindMachine, in_use
from kvcellar.testing.state_conformance import HistoryStore
from kvcellar.testing.stores import SignatureStore
from tests.cache.toy_parts import Text, group, sliding, texts
from tests.profiles import examples

N_SEQ, WINDOW, N_KEPT = 3, 4, 6


def alone(part: Cache, ask: Callable[[Cache], int]) -> int:
    """What a part would answer if it were the only one; nothing changes."""
    with part.transaction() as t:
        answer = ask(part)
        t.rollback()
    return answer


class HybridDuel(CacheDuel[list[Text]]):
    """A cache with a full group and others, and the texts that it should hold.

    Attributes:
        naive: the text of each sequence.
    """

    def __init__(self, *, with_states: bool, slides: bool) -> None:
        super().__init__()
        window = group(24, window=WINDOW, stubborn=True, n_seq_max=N_SEQ)
        if slides:
            window = sliding(WINDOW, N_SEQ)
        states = None
        if with_states:
            self.store = HistoryStore(state_rows(N_SEQ, N_KEPT), N_SEQ)
            policy = CheckpointPolicy(CheckpointBudget(N_KEPT), every=2)
            states = RecurrentCache(self.store, policy)
        self.cache: HybridCache = HybridCache([group(24, n_seq_max=N_SEQ), window], states)
        self.naive = [[] for _ in range(N_SEQ)]
        self._tokens = itertools.count(100)

    def state(self) -> object:
        return [texts(self.cache, seq) for seq in range(N_SEQ)]

    # -- decoding

    def decode(self, seqs: Sequence[int], n_ubatch: int, stop_at: int | None) -> None:
        batch, after = Batch(), deepcopy(self.naive)
        for seq in seqs:
            token, at = next(self._tokens), after[seq][-1][1] + 1 if after[seq] else 0
            batch.add(token, at, seq)
            after[seq].append((token, at))
        try:
            with self.cache.place(batch, n_ubatch) as placement:
                for i, plan in enumerate(placement.plans()):
                    self._compute(plan, after)
                    if i == stop_at:
                        raise Interrupted
            self.naive = after
        except (Interrupted, CacheFull):
            pass

    def _compute(self, plan: Plan, after: list[Text]) -> None:
        tokens = plan.micro.tokens
        assert tokens is not None
        owners = unpack_owners(plan.micro.owners)[1].tolist()
        if plan.states is not None:
            self.store.absorb(plan)
        for cells, part in zip(plan.groups, self.cache.groups, strict=True):
            assert isinstance(part, AttentionCache)
            store, window = part.store, part.spec.window
            assert isinstance(store, SignatureStore)
            store.fill(cells.cells, tokens.astype(np.int64), plan.micro.positions)
            for row, seq in enumerate(owners):
                seen = store.content[: cells.n_kv][cells.mask[row] == 0]
                at = int(plan.micro.positions[row])
                first = at - window + 1 if window else 0
                wanted = [token for token, where in after[seq] if first <= where <= at]
                assert sorted(seen.tolist()) == wanted

    # -- verbs

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        possible = all(alone(part, lambda p: p.seq_rm(seq, p0, p1)) for part in self.cache.parts)
        assert self.cache.seq_rm(seq, p0, p1) == possible
        if possible:
            for one in range(N_SEQ) if seq == -1 else [seq]:
                self.naive[one] = [
                    (token, at)
                    for token, at in self.naive[one]
                    if at < p0 or (p1 >= 0 and at >= p1)
                ]

    def rewind(self, seq: int, p0: int) -> None:
        end = max([at for _, at in self.naive[seq]], default=-1) + 1
        common = min(max(p0, 0), end)
        while not self._can_go_back_to(seq, common):
            common -= 1
        assert self.cache.rewind(seq, p0) == common
        self.naive[seq] = [(token, at) for token, at in self.naive[seq] if at < common]

    def _can_go_back_to(self, seq: int, p0: int) -> bool:
        return all(alone(part, lambda p: p.rewind(seq, p0)) == p0 for part in self.cache.parts)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        assert p0 == p1 == -1
        self.cache.seq_cp(src, dst)
        self.naive[dst] = list(self.naive[src])

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        assert p0 == p1 == -1
        try:
            self.cache.seq_add(seq, p0, p1, delta)
        except CacheFull:
            return
        self.naive[seq] = [(token, at + delta) for token, at in self.naive[seq]]

    def defrag(self) -> None:
        self.cache.defrag()
        self.cache.update()

    def seq_keep(self, seq: int) -> None:
        self.cache.seq_keep(seq)
        self.naive = [text if i == seq else [] for i, text in enumerate(self.naive)]

    def clear(self, data: bool) -> None:
        self.cache.clear(data=data)
        self.naive = [[] for _ in range(N_SEQ)]

    # -- what must hold

    def check(self) -> None:
        self.cache.check()
        self._check_texts()
        self._check_rows()
        self._check_states()

    def _check_texts(self) -> None:
        for seq, text in enumerate(self.naive):
            assert texts(self.cache, seq) == [text] * len(self.cache.parts)
            assert self.cache.seq_pos_max(seq) == (text[-1][1] if text else -1)
            assert self.cache.seq_count(seq) == len(text)

    def _check_rows(self) -> None:
        for part in self.cache.groups:
            assert isinstance(part, AttentionCache)
            assert isinstance(part.store, SignatureStore)
            table, used = part.table, part.table.positions >= 0
            assert np.array_equal(part.store.content[used], table.tokens[used])
            stands = table.positions[used] - table.pending[used]
            assert np.array_equal(part.store.rotation[used], stands)

    def _check_states(self) -> None:
        states = self.cache.states
        if states is None:
            return
        assert isinstance(states, RecurrentCache)
        for held, text in zip(states.states.of, self.naive, strict=True):
            if held is not None:
                tokens = tuple(token for token, _ in text)
                assert self.store.text(held.row) == tokens
                for kept in held.checkpoints:
                    assert self.store.text(kept.row) == tokens[: kept.n]


class Edits(RewindMachine):
    """A full group, a stubborn one, and states."""

    with_states, slides = True, False
    seqs, bounds, shared = st.integers(0, N_SEQ - 1), st.integers(-1, 14), st.just(-1)
    moves = st.tuples(st.just(-1), st.just(-1), st.integers(0, 3))

    def is_crowded(self) -> bool:
        return all(self.duel.naive)

    @initialize()
    def start(self) -> None:
        self.duel = HybridDuel(with_states=self.with_states, slides=self.slides)

    @rule(
        seqs=st.lists(st.integers(0, N_SEQ - 1), min_size=1, max_size=7),
        n_ubatch=st.integers(1, 4),
        stop_at=st.none() | st.integers(0, 2),
    )
    def decode(self, seqs: list[int], n_ubatch: int, stop_at: int | None) -> None:
        self.duel.decode(seqs, n_ubatch, stop_at)

    @in_use
    @rule()
    def defrag(self) -> None:
        self.duel.defrag()


class EditsOfGroups(Edits):
    """The same without states."""

    with_states = False


class EditsOfAll(Edits):
    """With states, and a window that slides."""

    slides = True


class EditsOfWindows(Edits):
    """A full group, and a window that slides."""

    with_states, slides = False, True


SETTINGS = examples(30, steps=25)
for machine in (Edits, EditsOfGroups, EditsOfAll, EditsOfWindows):
    machine.TestCase.settings = SETTINGS
TestEdits = Edits.TestCase
TestEditsOfGroups = EditsOfGroups.TestCase
TestEditsOfAll = EditsOfAll.TestCase
TestEditsOfWindows = EditsOfWindows.TestCase


def test_the_machine_notices_a_part_that_is_left_behind() -> None:
    machine = Edits()
    machine.start()
    machine.decode([0, 0, 0], 4, None)
    machine.agree()
    assert machine.duel.cache.groups[0].seq_rm(0, 2, -1)
    with pytest.raises(InvariantError, match="different"):
        machine.agree()
