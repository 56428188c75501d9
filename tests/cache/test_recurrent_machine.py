"""A cache of states against lists of tokens: whatever is done, every state is that of its text."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvcellar.testing.recurrent_duel import N_SEQ, RecurrentDuel
from tests.profiles import examples

SEQS = st.integers(0, N_SEQ - 1)
BOUNDS = st.just(-1) | st.integers(-1, 9)  # mostly open, so that verbs often succeed
OWNERS = st.frozensets(SEQS, min_size=1, max_size=2)
_in_use = precondition(lambda machine: machine.duel.naive.of)
_full = precondition(lambda machine: len(machine.duel.naive.of) == N_SEQ)
_inside = precondition(lambda machine: machine.duel.open)
_shallow = precondition(lambda machine: len(machine.duel.open) < 3)
_kept = precondition(lambda machine: any(one.kept for one in machine.duel.naive.of.values()))


class RecurrentMachine(RuleBasedStateMachine):
    """Decodes that succeed, fail and are refused, verbs, checkpoints, transactions."""

    n_rows: ClassVar[int | None] = None

    @initialize(limit=st.integers(0, 4), every=st.integers(1, 3))
    def start(self, limit: int, every: int) -> None:
        self.duel = RecurrentDuel(limit, every, self.n_rows)
        self.duel.decode([frozenset({0})] * 3, 2)

    @rule(
        owners=st.lists(OWNERS, min_size=1, max_size=6),
        n_ubatch=st.integers(1, 4),
        fail_at=st.none() | st.integers(0, 3),
    )
    def decode(self, owners: list[frozenset[int]], n_ubatch: int, fail_at: int | None) -> None:
        self.duel.decode(owners, n_ubatch, fail_at)

    @rule(seqs=st.lists(SEQS, min_size=1, max_size=6), n_ubatch=st.integers(1, 4))
    def decode_single_owners(self, seqs: list[int], n_ubatch: int) -> None:
        self.duel.decode([frozenset({seq}) for seq in seqs], n_ubatch)

    @_in_use
    @rule(data=st.data(), n=st.integers(1, 3))
    def decode_for_all_that_share(self, data: st.DataObject, n: int) -> None:
        naive = self.duel.naive
        mark = naive.mark(data.draw(st.sampled_from(sorted(naive.of))))
        owners = frozenset(seq for seq in naive.of if naive.mark(seq) == mark)
        self.duel.decode([owners] * n, 2)

    @rule(seq=SEQS, gap=st.integers(1, 3))
    def decode_behind_a_gap(self, seq: int, gap: int) -> None:
        self.duel.decode([frozenset({seq})] * 2, 2, gap=gap)

    @_in_use
    @rule(seq=SEQS | st.just(-1), p0=BOUNDS, p1=BOUNDS)
    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        self.duel.seq_rm(seq, p0, p1)

    @_kept
    @rule(data=st.data(), rewinds=st.booleans())
    def go_back_to_a_checkpoint(self, data: st.DataObject, rewinds: bool) -> None:
        naive = self.duel.naive
        seq = data.draw(st.sampled_from([seq for seq, one in naive.of.items() if one.kept]))
        n = data.draw(st.sampled_from(sorted(naive.of[seq].kept)))
        p0 = naive.of[seq].positions[n - 1] + 1
        if rewinds:
            self.duel.rewind(seq, p0)
        else:
            self.duel.seq_rm(seq, p0, -1)

    @_in_use
    @rule(seq=SEQS, p0=BOUNDS)
    def rewind(self, seq: int, p0: int) -> None:
        self.duel.rewind(seq, p0)

    @_in_use
    @rule(src=SEQS, dst=SEQS, p0=BOUNDS, p1=BOUNDS)
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        self.duel.seq_cp(src, dst, p0, p1)

    @_full
    @rule(seq=SEQS)
    def seq_keep(self, seq: int) -> None:
        self.duel.seq_keep(seq)

    @_in_use
    @rule(seq=SEQS, p0=BOUNDS, p1=BOUNDS, delta=st.integers(-3, 3))
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self.duel.seq_add(seq, p0, p1, delta)

    @_in_use
    @rule(seq=SEQS, p0=BOUNDS, p1=BOUNDS, d=st.integers(1, 3))
    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        self.duel.seq_div(seq, p0, p1, d)

    @_in_use
    @rule(seq=SEQS)
    def checkpoint(self, seq: int) -> None:
        self.duel.checkpoint(seq)

    @_full
    @rule(data=st.booleans())
    def clear(self, data: bool) -> None:
        self.duel.clear(data)

    @_shallow
    @rule()
    def begin(self) -> None:
        self.duel.begin()

    @_inside
    @rule()
    def commit(self) -> None:
        self.duel.commit()

    @_inside
    @rule(back=st.integers(1, 3))
    def rollback(self, back: int) -> None:
        self.duel.rollback(max(0, len(self.duel.open) - back))

    @invariant()
    def agree(self) -> None:
        self.duel.check()


class ScarceMachine(RecurrentMachine):
    """Hardly more rows than sequences: checkpoints have to make room, and batches are refused."""

    n_rows = N_SEQ + 1


TestRecurrent = RecurrentMachine.TestCase
TestRecurrent.settings = examples(120, steps=30)
TestScarce = ScarceMachine.TestCase
TestScarce.settings = examples(60, steps=30)
