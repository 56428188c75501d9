"""A sliding cache against whole texts: whatever is done, what a token sees is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.cache import CheckpointBudget
from kvcellar.testing.machine import RewindMachine, in_use
from kvcellar.testing.signs import SIGNED_LAYERS, SignedStore
from kvcellar.testing.sliding_duel import N_SEQ, SlidingDuel
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import CacheSpec, KVType
from tests.profiles import examples

SEQS = st.integers(0, N_SEQ - 1)
BOUNDS = st.integers(-1, 12)
_with_checkpoints = precondition(
    lambda machine: any(machine.duel.cache.checkpoints(seq) for seq in range(N_SEQ))
)


class SlidingMachine(RewindMachine):
    """Decodes that succeed and fail, forks, edits, checkpoints, transactions."""

    wrap: ClassVar[Callable[[CacheSpec], SignatureStore]] = SignatureStore
    seqs, bounds, shared = SEQS, BOUNDS, BOUNDS
    moves = st.tuples(st.integers(0, 9), st.just(-1), st.integers(-3, 3))

    def is_crowded(self) -> bool:
        """Whether it is full."""
        return bool(self.duel.cache.used == self.duel.cache.spec.size)

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

    @in_use
    @rule(seq=SEQS, p0=BOUNDS, n=st.integers(1, 3))
    def cut_out(self, seq: int, p0: int, n: int) -> None:
        """Remove from the middle and close the gap."""
        self.duel.cut_out(seq, max(p0, 0), max(p0, 0) + n)

    @_with_checkpoints
    @rule(seq=SEQS, n=st.integers(1, 6), which=st.integers(0, 3), off=st.integers(-1, 1))
    def go_on_and_back(self, seq: int, n: int, which: int, off: int) -> None:
        """Decode token by token, then go back to a checkpoint, or beside it."""
        for _ in range(n):
            self.duel.decode([[seq]])
        if ends := self.duel.cache.checkpoints(seq):
            self.duel.seq_rm(seq, max(0, ends[which % len(ends)] + off), -1)

    @rule(seq=SEQS)
    def checkpoint(self, seq: int) -> None:
        """Make one."""
        self.duel.checkpoint(seq)

    @in_use
    @rule()
    def defrag(self) -> None:
        """Compact."""
        self.duel.cache.defrag()
        self.duel.cache.update()


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
TestSlidingCache.settings = examples(60, steps=30)
TestSlidingBytes = SignedSlidingMachine.TestCase
TestSlidingBytes.settings = examples(20, steps=20)
