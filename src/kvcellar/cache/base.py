"""What every cache offers: llama.cpp's verbs, placing batches, and a view.

A failed call changes nothing (invariant 5). Ranges of positions are half open and a negative bound
is open; a ``seq_id`` of -1 is accepted by ``seq_rm`` only, where it means every sequence.

Older states that are kept to go back to, and when.

A state cannot forget a token, so a sequence can only go back to where a state of it was kept. Since
no state is ever changed in its row, keeping one means not to fill its row again: it costs a row,
but no copy and no time.

Kept without being asked for are the states before and after every batch that had several tokens of
a sequence, as they are where prompts, turns and drafts begin and end; and, while tokens come one by
one, a state each ``every`` tokens. Beyond the budget the oldest goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from kvcellar.batch import Batch, MicroBatch, Rows
from kvcellar.cache.placement import CellPart, Placement, StatePart
from kvcellar.cache.transaction import Remember, Undoable
from kvcellar.cache.view import CacheView
from kvcellar.errors import OptionError
from kvcellar.types import CacheSpec, Int32Array


@dataclass(frozen=True, slots=True)
class CheckpointBudget:
    """How many checkpoints a cache may keep, and in how many bytes; 0 of either: none at all."""

    n_max: int = 8
    max_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        for name, value in (("n_max", self.n_max), ("max_bytes", self.max_bytes)):
            if value < 0:
                raise OptionError(f"{name} is {value}: 0 for no checkpoints, or more")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A row that holds the state after the first ``n`` tokens of a sequence."""

    n: int
    row: int
    serial: int  # the later it was made, the larger


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """How many states may be kept, and after how many tokens one is.

    Attributes:
        budget: how many, and in how many bytes; 0 of either: none at all, so that a sequence can
            only be removed as a whole.
        every: how many tokens that come one by one lie between two.
    """

    budget: CheckpointBudget = field(default_factory=CheckpointBudget)
    every: int = 256

    def __post_init__(self) -> None:
        if self.every < 1:
            raise OptionError(f"every is {self.every}: it must be at least 1")

    def limit(self, row_bytes: int) -> int:
        """How many states of that size may be kept."""
        return min(self.budget.n_max, self.budget.max_bytes // max(row_bytes, 1))


OnShared: TypeAlias = Literal["copy", "move"]
"""What add and div do with a cell that others own too: give the sequence a copy, or move all."""

Coupled: TypeAlias = Literal["same", "any"]
"""Whether a token's owners must hold the same cells; "any" is for replaying what llama.cpp did."""


P = TypeVar("P", bound=CellPart | StatePart, covariant=True)


class Part(Protocol[P]):
    """What a cache offers to one that is made of several kinds, beside llama.cpp's verbs."""

    def check_rows(self, rows: Rows, coupled: Coupled) -> None:
        """Raise if a batch that is well formed cannot be placed; changes nothing."""

    def take(self, micros: Sequence[MicroBatch]) -> P:
        """Take what microbatches need that were checked, or raise and take nothing."""


class Cache(Protocol):
    """The cache of one context."""

    @property
    def spec(self) -> CacheSpec:
        """The shape that the cache was made for."""

    @property
    def can_shift(self) -> bool:
        """Whether positions can be moved."""

    @property
    def used(self) -> int:
        """How many cells have an owner."""

    @property
    def token_count(self) -> int:
        """The sum of owners over cells: a shared cell counts once for each."""

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Drop a sequence, or every one (-1), from the range; False if the cache cannot."""

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let dst share what src holds in the range."""

    def seq_keep(self, seq_id: int) -> None:
        """Drop every other sequence."""

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions in the range."""

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions in the range, truncating."""

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position held, -1 when the sequence is empty."""

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position held, -1 when the sequence is empty."""

    def n_free(self) -> int:
        """How many more tokens fit."""

    def seq_count(self, seq_id: int) -> int:
        """How many tokens of a sequence are held."""

    def seq_tokens(self, seq_id: int) -> Int32Array:
        """Their ids in the order of their positions; -1 where an embedding was decoded."""

    def seq_positions(self, seq_id: int) -> Int32Array:
        """Where they stand, ascending."""

    def rewind(self, seq_id: int, p0: int) -> int:
        """Drop a sequence from p0 on, and as much before it as has to go too.

        A state cannot be cut, only exchanged for an older one that was kept. Returns the position
        from which the sequence has to be decoded again: p0 where it could be cut there, 0 where
        nothing older was kept.
        """

    def clear(self, data: bool = True) -> None:
        """Empty the cache; ``data`` says whether the buffers are zeroed too."""

    def defrag(self, max_moves: int | None = None) -> None:
        """Ask for compaction at the next update."""

    def update(self) -> None:
        """Apply what is pending: first rotate K, then compact."""

    def transaction(self) -> Undoable:
        """What happens from here on can be taken back."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""

    def watch(self, remember: Remember) -> None:
        """Let transactions take back what belongs to the cache but lies outside of it."""

    def resize(self, size: int) -> None:
        """Have so many cells, whatever is in them."""

    def place(
        self,
        batch: Batch,
        n_ubatch: int,
        *,
        n_vocab: int | None = None,
        n_embd: int | None = None,
        coupled: Coupled = "same",
    ) -> Placement:
        """Take cells for every microbatch of a batch, or raise and take none."""

    def view(self, n_seq_max: int | None = None) -> CacheView:
        """The state of all cells as a value."""

    def check(self) -> None:
        """Prove the invariants by brute force."""


class CellCache(Cache, Part[CellPart], Protocol):
    """A cache of K and V that may be one of several."""


class StateCache(Cache, Part[StatePart], Protocol):
    """A cache of recurrent states that may stand beside caches of K and V."""


@runtime_checkable
class KeepsCheckpoints(Protocol):
    """A cache that cannot go back anywhere, but to where something was kept."""

    def checkpoint(self, seq_id: int) -> bool:
        """Keep what a sequence knows now; False if there is nothing to keep, or no budget."""
