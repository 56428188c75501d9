"""What every cache offers: llama.cpp's verbs, placing batches, and a view.

A failed call changes nothing (invariant 5). Ranges of positions are half open and a negative bound
is open; a ``seq_id`` of -1 is accepted by ``seq_rm`` only, where it means every sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from kvcellar.batch import Batch, MicroBatch, Rows
from kvcellar.cache.placement import CellPart, Placement, StatePart
from kvcellar.cache.undoable import Remember, Undoable
from kvcellar.cache.view import CacheView
from kvcellar.types import CacheSpec, Int32Array

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
