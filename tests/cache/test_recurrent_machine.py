"""A cache of states against lists of tokens: whatever is done, every state is that of its text."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvcellar.testing.machine import RewindMachine, in_use
from kvcellar.testing.recurrent_duel import N_SEQ, RecurrentDuel
from tests.profiles import examples

SEQS = st.integers(0, N_SEQ - 1)
MOSTLY_OPEN = st.just(-1) | st.integers(-1, 9)  # so that verbs often succeed
OWNERS = st.frozensets(SEQS, min_size=1, max_size=2)
_kept = precondition(lambda machine: any(one.kept for one in machine.duel.naive.of.values()))


class RecurrentMachine(RewindMachine):
    """Decodes that succeed, fail and are refused, verbs, checkpoints, transactions."""

    n_rows: ClassVar[int | None] = None
    seqs, bounds, shared = SEQS, MOSTLY_OPEN, MOSTLY_OPEN
    moves = st.tuples(MOSTLY_OPEN, MOSTLY_OPEN, st.integers(-3, 3))

    def is_crowded(self) -> bool:
        return len(self.duel.naive.of) == N_SEQ

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

    @in_use
    @rule(data=st.data(), n=st.integers(1, 3))
    def decode_for_all_that_share(self, data: st.DataObject, n: int) -> None:
        naive = self.duel.naive
        mark = naive.mark(data.draw(st.sampled_from(sorted(naive.of))))
        owners = frozenset(seq for seq in naive.of if naive.mark(seq) == mark)
        self.duel.decode([owners] * n, 2)

    @rule(seq=SEQS, gap=st.integers(1, 3))
    def decode_behind_a_gap(self, seq: int, gap: int) -> None:
        self.duel.decode([frozenset({seq})] * 2, 2, gap=gap)

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

    @in_use
    @rule(seq=SEQS, p0=MOSTLY_OPEN, p1=MOSTLY_OPEN, d=st.integers(1, 3))
    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        self.duel.seq_div(seq, p0, p1, d)

    @in_use
    @rule(seq=SEQS)
    def checkpoint(self, seq: int) -> None:
        self.duel.checkpoint(seq)


class ScarceMachine(RecurrentMachine):
    """Hardly more rows than sequences: checkpoints have to make room, and batches are refused."""

    n_rows = N_SEQ + 1


TestRecurrent = RecurrentMachine.TestCase
TestRecurrent.settings = examples(60, steps=30)
TestScarce = ScarceMachine.TestCase
TestScarce.settings = examples(30, steps=30)
