"""A sliding cache against whole texts: whatever is done, what a token sees is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.cache import CheckpointBudget
from kvcellar.testing.signs import SIGNED_LAYERS, SignedStore
from kvcellar.testing.sliding_duel import N_SEQ, SlidingDuel
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import CacheSpec, KVType
from tests.profiles import examples

SEQS = st.integers(0, N_SEQ - 1)
BOUNDS = st.integers(-1, 12)
_in_use = precondition(lambda machine: machine.duel.cache.used > 0)
_with_checkpoints = precondition(
    lambda machine: any(machine.duel.cache.checkpoints(seq) for seq in range(N_SEQ))
)
_full = precondition(lambda machine: machine.duel.cache.used == machine.duel.cache.spec.size)
_inside = precondition(lambda machine: machine.duel.open)


class SlidingMachine(RuleBasedStateMachine):
    """Decodes that succeed and fail, forks, edits, checkpoints, transactions."""

    wrap: ClassVar[Callable[[CacheSpec], SignatureStore]] = SignatureStore

    def __init__(self) -> None:
        super().__init__()
        self.duel = SlidingDuel(2, 1)

    @initialize(
        window=st.integers(1, 4),
        n_ubatch=st.integers(1, 3),
        padding=st.integers(1, 3),
        extra=st.sampled_from([0, 0, 0, 3, -3]),
        n_checkpoints=st.sampled_from([0, 1, 4]),
    )
    def start(
        self, window: int, n_ubatch: int, padding: int, extra: int, n_checkpoints: int
    ) -> None:
        """A cache in which something has slid out, or soon will."""
        budget = CheckpointBudget(n_checkpoints)
        wrap = type(self).wrap
        self.duel = SlidingDuel(
            window, n_ubatch, padding=padding, extra=extra, budget=budget, wrap=wrap
        )
        for seq in range(N_SEQ):
            self.duel.decode([[seq]] * 3)

    def teardown(self) -> None:
        """Give the store back."""
        self.duel.store.close()

    @rule(seq=SEQS, n=st.integers(1, 9), fail_at=st.none() | st.integers(0, 4))
    def prompt(self, seq: int, n: int, fail_at: int | None) -> None:
        """Several tokens of one sequence."""
        self.duel.decode([[seq]] * n, fail_at=fail_at)

    @rule(
        seqs=st.lists(SEQS, min_size=1, max_size=6),
        gaps=st.lists(st.integers(0, 1), max_size=2),
        fail_at=st.none() | st.integers(0, 4),
    )
    def decode(self, seqs: list[int], gaps: list[int], fail_at: int | None) -> None:
        """Tokens of several sequences."""
        self.duel.decode([[seq] for seq in seqs], gaps, fail_at)

    @rule(src=SEQS, dst=SEQS, n=st.integers(1, 4))
    def fork_and_share(self, src: int, dst: int, n: int) -> None:
        """Tokens that two sequences share, then one of each."""
        if src != dst:
            self.duel.seq_rm(dst, -1, -1)
            self.duel.seq_cp(src, dst, -1, -1)
            self.duel.decode([[src, dst]] * n + [[src], [dst]])

    @_in_use
    @rule(seq=SEQS | st.just(-1), p0=BOUNDS, p1=BOUNDS)
    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        """Remove a range."""
        self.duel.seq_rm(seq, p0, p1)

    @_in_use
    @rule(seq=SEQS, back=st.integers(1, 4))
    def take_back(self, seq: int, back: int) -> None:
        """Remove the last tokens."""
        self.duel.seq_rm(seq, max(0, self.duel.texts.end(seq) - back), -1)

    @_in_use
    @rule(seq=SEQS, p0=BOUNDS, n=st.integers(1, 3))
    def cut_out(self, seq: int, p0: int, n: int) -> None:
        """Remove from the middle and close the gap."""
        self.duel.cut_out(seq, max(p0, 0), max(p0, 0) + n)

    @_in_use
    @rule(seq=SEQS, p0=st.integers(0, 12))
    def rewind(self, seq: int, p0: int) -> None:
        """Go back."""
        self.duel.rewind(seq, p0)

    @_with_checkpoints
    @rule(seq=SEQS, n=st.integers(1, 6), which=st.integers(0, 3), off=st.integers(-1, 1))
    def go_on_and_back(self, seq: int, n: int, which: int, off: int) -> None:
        """Decode token by token, then go back to a checkpoint, or beside it."""
        for _ in range(n):
            self.duel.decode([[seq]])
        if ends := self.duel.cache.checkpoints(seq):
            self.duel.seq_rm(seq, max(0, ends[which % len(ends)] + off), -1)

    @_in_use
    @rule(src=SEQS, dst=SEQS, p0=BOUNDS, p1=BOUNDS)
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Share a range."""
        self.duel.seq_cp(src, dst, p0, p1)

    @_full
    @rule(seq=SEQS)
    def seq_keep(self, seq: int) -> None:
        """Keep one sequence."""
        self.duel.seq_keep(seq)

    @_in_use
    @rule(seq=SEQS, p0=st.integers(0, 9), delta=st.integers(-3, 3))
    def seq_add(self, seq: int, p0: int, delta: int) -> None:
        """Move the end of a sequence."""
        self.duel.seq_add(seq, p0, delta)

    @rule(seq=SEQS)
    def checkpoint(self, seq: int) -> None:
        """Make one."""
        assert self.duel.cache.checkpoint(seq) in (True, False)

    @_full
    @rule()
    def clear(self) -> None:
        """Empty the cache."""
        self.duel.clear()

    @_in_use
    @rule()
    def defrag(self) -> None:
        """Compact."""
        self.duel.cache.defrag()
        self.duel.cache.update()

    @precondition(lambda machine: len(machine.duel.open) < 3)
    @rule()
    def begin(self) -> None:
        """Begin a transaction."""
        self.duel.begin()

    @_inside
    @rule()
    def commit(self) -> None:
        """Keep what happened in it."""
        self.duel.commit()

    @_inside
    @rule(depth=st.integers(0, 2))
    def rollback(self, depth: int) -> None:
        """Take back what happened."""
        self.duel.rollback(min(depth, len(self.duel.open) - 1))

    @invariant()
    def holds(self) -> None:
        """Cache and texts agree."""
        self.duel.check()


def _signed(spec: CacheSpec) -> SignedStore:
    layers = tuple(replace(layer, window=spec.window) for layer in SIGNED_LAYERS)
    real = replace(spec, layers=layers, type_k=KVType.F32, type_v=KVType.F32)
    return SignedStore(NumpyStore(real))


class SignedSlidingMachine(SlidingMachine):
    """The same over real bytes."""

    wrap = _signed

    @invariant()
    def bytes_hold(self) -> None:
        """Every row is what the record says."""
        store = self.duel.store
        if isinstance(store, SignedStore):
            store.check_rows()


TestSlidingCache = SlidingMachine.TestCase
TestSlidingCache.settings = examples(120, steps=30)
TestSlidingBytes = SignedSlidingMachine.TestCase
TestSlidingBytes.settings = examples(20, steps=20)
