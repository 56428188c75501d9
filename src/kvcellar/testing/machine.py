"""Hypothesis machines that drive a cache and its oracle side by side.

After every step the two must agree on everything, bytes included; see :mod:`kvcellar.testing.duel`.
:class:`CacheMachine` has the rules of all kinds of caches, :class:`RewindMachine` those of caches
that can only go back to where something of them was kept. Use a machine as a test case, an
:class:`AttentionMachine` over any store::

    TestAttentionCache = AttentionMachine.TestCase
    TestMyStore = machine_over(Setup(MyStore)).TestCase

The strategies draw tiny numbers, so that rare cases become common.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcellar.cache.base import OnShared
from kvcellar.testing.duel import Duel
from kvcellar.testing.signs import Setup
from kvcellar.types import CacheSpec, LayerSpec, RopeSpec

SEQ_IDS = st.integers(0, 3)
"""Ids of a cache with four sequences."""

BOUNDS = st.integers(-1, 9)
"""Bounds of a range of positions; negative ones are open."""

TOKEN_OWNERS = st.frozensets(SEQ_IDS, min_size=1, max_size=2)
"""Owners of a token: mostly one sequence, sometimes two."""


def attention_spec(
    size: int, n_seq_max: int = 4, padding: int = 1, *, rope: bool = True
) -> CacheSpec:
    """A cache of one tiny layer."""
    layer = LayerSpec(1, 2, 2, RopeSpec("normal", 2) if rope else None)
    return CacheSpec(size, n_seq_max, (layer,), padding=padding)


MAX_DEPTH = 3


def of_machine(name: str) -> st.SearchStrategy[Any]:
    """Draw from the strategy that the machine has under this name."""
    return st.runner().flatmap(lambda machine: getattr(machine, name))


# Verbs that would find an empty cache, and those that leave little of a full one, wait: else most
# steps of most runs happen in an empty cache.
in_use = precondition(lambda machine: machine.duel.cache.used > 0)
crowded = precondition(lambda machine: machine.is_crowded())
_inside = precondition(lambda machine: machine.duel.depth > 0)
_shallow = precondition(lambda machine: machine.duel.depth < MAX_DEPTH)


class CacheMachine(RuleBasedStateMachine):
    """The verbs and transactions of all caches; a subclass decodes, and says what is drawn.

    Attributes:
        seqs: ids of sequences.
        bounds: bounds of a range that is removed.
        shared: bounds of a range that is copied.
        moves: a range, and how far its positions are moved.
        duel: what is driven; a subclass makes it when a run starts.
    """

    seqs: ClassVar[st.SearchStrategy[int]] = SEQ_IDS
    bounds: ClassVar[st.SearchStrategy[int]] = BOUNDS
    shared: ClassVar[st.SearchStrategy[int]] = BOUNDS
    moves: ClassVar[st.SearchStrategy[tuple[int, int, int]]]
    duel: Any

    def is_crowded(self) -> bool:
        """Whether verbs that remove much leave something to see."""
        return bool(2 * self.duel.cache.used > self.duel.cache.spec.size)

    @in_use
    @rule(seq=of_machine("seqs") | st.just(-1), p0=of_machine("bounds"), p1=of_machine("bounds"))
    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        """Remove a range."""
        self.duel.seq_rm(seq, p0, p1)

    @in_use
    @rule(
        src=of_machine("seqs"),
        dst=of_machine("seqs"),
        p0=of_machine("shared"),
        p1=of_machine("shared"),
    )
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Share a range."""
        self.duel.seq_cp(src, dst, p0, p1)

    @crowded
    @rule(seq=of_machine("seqs"))
    def seq_keep(self, seq: int) -> None:
        """Keep one sequence."""
        self.duel.seq_keep(seq)

    @in_use
    @rule(seq=of_machine("seqs"), move=of_machine("moves"))
    def seq_add(self, seq: int, move: tuple[int, int, int]) -> None:
        """Move a range, if there is room for copies of shared cells."""
        self.duel.seq_add(seq, *move)

    @crowded
    @rule(data=st.booleans())
    def clear(self, data: bool) -> None:
        """Empty the cache."""
        self.duel.clear(data)

    @_shallow
    @rule()
    def begin(self) -> None:
        """Begin a transaction."""
        self.duel.begin()

    @_inside
    @rule()
    def commit(self) -> None:
        """Keep what happened in the innermost transaction."""
        self.duel.commit()

    @_inside
    @rule(back=st.integers(1, MAX_DEPTH))
    def rollback(self, back: int) -> None:
        """Take back the innermost transactions."""
        self.duel.rollback(max(0, self.duel.depth - back))

    @invariant()
    def agree(self) -> None:
        """Cells, counts, sequences, bytes, view: all that the duel compares."""
        self.duel.check()


class RewindMachine(CacheMachine):
    """Going back, for caches that lose tokens on their own."""

    @in_use
    @rule(seq=of_machine("seqs"), back=st.integers(1, 6))
    def take_back(self, seq: int, back: int) -> None:
        """Remove the last tokens."""
        self.duel.seq_rm(seq, max(0, self.duel.cache.seq_pos_max(seq) + 1 - back), -1)

    @in_use
    @rule(seq=of_machine("seqs"), p0=of_machine("bounds"))
    def rewind(self, seq: int, p0: int) -> None:
        """Go back to a position, or as far as it has to be."""
        self.duel.rewind(seq, p0)


_pending = precondition(lambda machine: any(cell.pending for cell in machine.duel.naive.cells))
_with_holes = precondition(lambda m: m.duel.naive.cell_max > m.duel.naive.used)


class AttentionMachine(CacheMachine):
    """Decodes that succeed, fail and are interrupted, stores that fail, sizes that change."""

    setup_: ClassVar[Setup] = Setup()
    moves = st.tuples(BOUNDS, BOUNDS, st.integers(-4, 4))

    def __init__(self) -> None:
        super().__init__()
        self.duel = Duel(self.setup_, 1)

    @initialize(
        size=st.integers(3, 8),
        padding=st.integers(1, 4),
        on_shared=st.sampled_from(["copy", "move"]),
    )
    def start(self, size: int, padding: int, on_shared: OnShared) -> None:
        """A cache with three tokens of two sequences."""
        self.duel.close()
        self.duel = Duel(self.setup_, size, padding, on_shared)
        self.duel.decode([frozenset({0})] * 2 + [frozenset({1})], [0, 0, 0], 2)

    def teardown(self) -> None:
        """Close the store."""
        self.duel.close()

    @rule(
        owners=st.lists(TOKEN_OWNERS, min_size=1, max_size=5),
        gaps=st.lists(st.integers(0, 1), min_size=5, max_size=5),
        n_ubatch=st.integers(1, 4),
        fail_at=st.none() | st.integers(0, 4),
    )
    def decode(
        self, owners: list[frozenset[int]], gaps: list[int], n_ubatch: int, fail_at: int | None
    ) -> None:
        """Decode, or be interrupted at a microbatch."""
        self.duel.decode(owners, gaps, n_ubatch, fail_at)

    @rule(owners=TOKEN_OWNERS, back=st.integers(0, 2))
    def decode_at_a_position_that_is_taken(self, owners: frozenset[int], back: int) -> None:
        """Positions that do not rise are refused."""
        self.duel.decode_at_a_position_that_is_taken(owners, back)

    @rule(owners=TOKEN_OWNERS)
    def decode_a_token_of_sequences_that_differ(self, owners: frozenset[int]) -> None:
        """A shared token is refused unless its owners hold the same cells."""
        self.duel.decode_a_token_of_sequences_that_differ(owners)

    @in_use
    @rule(seq=SEQ_IDS, p0=BOUNDS, p1=BOUNDS, d=st.integers(1, 4))
    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Divide a range, if there is room for copies of shared cells."""
        self.duel.seq_div(seq, p0, p1, d)

    @_pending
    @rule()
    def update(self) -> None:
        """Rotate what is pending."""
        self.duel.update()

    @_with_holes
    @rule(max_moves=st.integers(1, 3))
    def defrag(self, max_moves: int) -> None:
        """Compact."""
        self.duel.defrag(max_moves)

    @crowded
    @rule(seq=st.sampled_from([-2, 4, 64]))
    def unknown_sequence(self, seq: int) -> None:
        """Ids out of range are refused by every verb."""
        self.duel.unknown_sequence(seq)

    @rule(size=st.integers(1, 10))
    def resize(self, size: int) -> None:
        """Grow or shrink."""
        self.duel.resize(size)

    @rule(method=st.sampled_from([None, "copy", "rotate", "resize", "read_raw"]))
    def the_store_fails(self, method: str | None) -> None:
        """From here on operations meet a store that fails at first."""
        self.duel.broken = method


def machine_over(setup: Setup) -> type[AttentionMachine]:
    """The machine over another store, or other types."""
    return type("AttentionMachine", (AttentionMachine,), {"setup_": setup})
