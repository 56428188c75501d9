"""Random edits and decodes of a cache of several parts, against a list of tokens a sequence.

After every step each part knows exactly the listed tokens; what a token may attend to is read from
the cells that the masks show. Whether a verb is done is what all parts, asked alone, say.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcellar.batch import Batch
from kvcellar.cache import AttentionCache
from kvcellar.cache.base import Cache, CheckpointBudget, CheckpointPolicy
from kvcellar.cache.hybrid import HybridCache
from kvcellar.cache.recurrent import RecurrentCache, state_rows
from kvcellar.cache.transaction import Undoable
from kvcellar.cellsets import unpack_owners
from kvcellar.errors import CacheFull, InvariantError
from kvcellar.plan import Plan
from kvcellar.testing.state_conformance import HistoryStore
from kvcellar.testing.stores import SignatureStore
from tests.cache.toy_parts import Text, group, sliding, texts
from tests.profiles import examples

N_SEQ, WINDOW, N_KEPT = 3, 4, 6
SEQS = st.integers(0, N_SEQ - 1)
POSITIONS = st.integers(-1, 14)


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt while a batch is computed."""


def alone(part: Cache, ask: Callable[[Cache], int]) -> int:
    """What a part would answer if it were the only one; nothing changes."""
    with part.transaction() as t:
        answer = ask(part)
        t.rollback()
    return answer


class Edits(RuleBasedStateMachine):
    """A cache with a full group and others, and the texts that it should hold."""

    with_states, slides = True, False

    def make(self) -> HybridCache:
        window = group(24, window=WINDOW, stubborn=True, n_seq_max=N_SEQ)
        if self.slides:
            window = sliding(WINDOW, N_SEQ)
        groups = [group(24, n_seq_max=N_SEQ), window]
        if not self.with_states:
            return HybridCache(groups)
        self.store = HistoryStore(state_rows(N_SEQ, N_KEPT), N_SEQ)
        policy = CheckpointPolicy(CheckpointBudget(N_KEPT), every=2)
        return HybridCache(groups, RecurrentCache(self.store, policy))

    @initialize()
    def start(self) -> None:
        self.cache = self.make()
        self.text: list[Text] = [[] for _ in range(N_SEQ)]
        self.open: list[tuple[Undoable, list[Text]]] = []
        self.next_token = 100

    # -- decoding

    @rule(
        seqs=st.lists(SEQS, min_size=1, max_size=7),
        n_ubatch=st.integers(1, 4),
        stop_at=st.none() | st.integers(0, 2),
    )
    def decode(self, seqs: list[int], n_ubatch: int, stop_at: int | None) -> None:
        batch, after = Batch(), deepcopy(self.text)
        for seq in seqs:
            at = after[seq][-1][1] + 1 if after[seq] else 0
            batch.add(self.next_token, at, seq)
            after[seq].append((self.next_token, at))
            self.next_token += 1
        try:
            with self.cache.place(batch, n_ubatch) as placement:
                for i, plan in enumerate(placement.plans()):
                    self.compute(plan, after)
                    if i == stop_at:
                        raise Interrupted
            self.text = after
        except (Interrupted, CacheFull):
            pass

    def compute(self, plan: Plan, after: list[Text]) -> None:
        tokens = plan.micro.tokens
        assert tokens is not None
        owners = unpack_owners(plan.micro.owners)[1].tolist()
        if self.with_states:
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

    # -- edits

    @rule(seq=SEQS | st.just(-1), p0=POSITIONS, p1=POSITIONS)
    def remove(self, seq: int, p0: int, p1: int) -> None:
        possible = all(alone(part, lambda p: p.seq_rm(seq, p0, p1)) for part in self.cache.parts)
        assert self.cache.seq_rm(seq, p0, p1) == possible
        if possible:
            for one in range(N_SEQ) if seq == -1 else [seq]:
                self.text[one] = [
                    (token, at) for token, at in self.text[one] if at < p0 or (p1 >= 0 and at >= p1)
                ]

    @rule(seq=SEQS, back=st.integers(1, 6))
    def remove_the_end(self, seq: int, back: int) -> None:
        self.remove(seq, max(0, self.cache.seq_pos_max(seq) + 1 - back), -1)

    @rule(seq=SEQS, p0=POSITIONS)
    def rewind(self, seq: int, p0: int) -> None:
        end = max([at for _, at in self.text[seq]], default=-1) + 1
        common = min(max(p0, 0), end)
        while not self.can_go_back_to(seq, common):
            common -= 1
        assert self.cache.rewind(seq, p0) == common
        self.text[seq] = [(token, at) for token, at in self.text[seq] if at < common]

    def can_go_back_to(self, seq: int, p0: int) -> bool:
        parts = self.cache.parts
        return all(alone(part, lambda p: p.rewind(seq, p0)) == p0 for part in parts)

    @rule(src=SEQS, dst=SEQS)
    def share(self, src: int, dst: int) -> None:
        self.cache.seq_cp(src, dst)
        self.text[dst] = list(self.text[src])

    @rule(seq=SEQS, delta=st.integers(0, 3))
    def move(self, seq: int, delta: int) -> None:
        try:
            self.cache.seq_add(seq, -1, -1, delta)
        except CacheFull:
            return
        self.text[seq] = [(token, at + delta) for token, at in self.text[seq]]

    @rule(what=st.sampled_from(["compact", "compact", "keep", "clear"]), seq=SEQS)
    def tidy(self, what: str, seq: int) -> None:
        if what == "compact":
            self.cache.defrag()
            self.cache.update()
        elif what == "keep":
            self.cache.seq_keep(seq)
            self.text = [text if i == seq else [] for i, text in enumerate(self.text)]
        else:
            self.cache.clear(data=bool(seq))
            self.text = [[] for _ in range(N_SEQ)]

    # -- transactions

    @precondition(lambda self: len(self.open) < 2)
    @rule()
    def begin(self) -> None:
        self.open.append((self.cache.transaction(), deepcopy(self.text)))

    @precondition(lambda self: self.open)
    @rule()
    def commit(self) -> None:
        self.open.pop()[0].commit()

    @precondition(lambda self: self.open)
    @rule(outermost=st.booleans())
    def roll_back(self, outermost: bool) -> None:
        transaction, self.text = self.open[0 if outermost else -1]
        transaction.rollback()
        del self.open[0 if outermost else -1 :]

    # -- what must hold

    @invariant()
    def every_part_knows_the_texts(self) -> None:
        self.cache.check()
        for seq, text in enumerate(self.text):
            assert texts(self.cache, seq) == [text] * len(self.cache.parts)
            assert self.cache.seq_pos_max(seq) == (text[-1][1] if text else -1)
            assert self.cache.seq_count(seq) == len(text)

    @invariant()
    def every_row_is_that_of_its_token(self) -> None:
        for part in self.cache.groups:
            assert isinstance(part, AttentionCache)
            assert isinstance(part.store, SignatureStore)
            table, used = part.table, part.table.positions >= 0
            assert np.array_equal(part.store.content[used], table.tokens[used])
            stands = table.positions[used] - table.pending[used]
            assert np.array_equal(part.store.rotation[used], stands)

    @invariant()
    def every_state_is_that_of_its_text(self) -> None:
        if not self.with_states:
            return
        states = self.cache.states
        assert isinstance(states, RecurrentCache)
        for held, text in zip(states.states.of, self.text, strict=True):
            if held is not None:
                tokens = tuple(token for token, _ in text)
                assert self.store.text(held.row) == tokens
                for kept in held.checkpoints:
                    assert self.store.text(kept.row) == tokens[: kept.n]


class EditsOfGroups(Edits):
    """The same without states."""

    with_states = False


class EditsOfAll(Edits):
    """With states, and a window that slides."""

    slides = True


class EditsOfWindows(Edits):
    """A full group, and a window that slides."""

    with_states, slides = False, True


SETTINGS = examples(60, steps=25)
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
    machine.every_part_knows_the_texts()
    assert machine.cache.groups[0].seq_rm(0, 2, -1)
    with pytest.raises(InvariantError, match="different"):
        machine.every_part_knows_the_texts()
