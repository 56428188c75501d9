"""What every cache is: llama.cpp's verbs, placing batches, and transactions that take both back.

A failed call changes nothing, an interrupted one neither (:mod:`kvcellar.cache.changes`). Ranges of
positions are half open and a negative bound
is open; a ``seq_id`` of -1 is accepted by ``seq_rm`` only, where it means every sequence. While a
batch is placed and neither committed nor released, a cache can neither be edited nor decode another
one; while a transaction is open, it cannot be resized.

Transactions nest: what an inner one commits, the outer one can still take back. Ending an outer one
by a rollback ends those within it; it cannot be committed while one is open. One that nobody can
end any more, as its block ended where it could not be ended itself, is rolled back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Literal, TypeAlias

import numpy as np

from kvcellar.batch import Batch, MicroBatch, Rows, micro_batches, split_equal, split_simple
from kvcellar.cache.changes import Changes, Handle, Lasting, Leave, Remember, Undo, atomic, forward
from kvcellar.cache.content import SequenceData
from kvcellar.cache.placement import CellPart, OpenBatch, Placement
from kvcellar.cache.state_placement import StatePlacement
from kvcellar.cache.view import CacheView
from kvcellar.cellsets import checked_id, clamp_range
from kvcellar.errors import (
    CacheError,
    check_bool,
    check_choice,
    check_kind,
    check_range,
    not_copied,
)
from kvcellar.types import MAX_POSITION, CacheSpec, Int32Array, StateSpec

OnShared: TypeAlias = Literal["copy", "move"]
"""What add and div do with a cell that others own too: give the sequence a copy, or move all."""

Coupled: TypeAlias = Literal["same", "any"]
"""Whether a token's owners must hold the same cells; "any" is for replaying what llama.cpp did."""


class Cache(ABC):
    """The cache of one context.

    Attributes:
        spec: the shape that the cache has.
        changes: the change that is being made to it; shared by its parts.
        parts: the caches that it is made of, the one that knows the most first; itself if it is of
            one piece.
        has_states: whether it holds recurrent states.
        keeps_every_token: whether each token stays until it is removed, and any can be. A state
            absorbs its tokens, a window loses them.
    """

    __reduce_ex__ = not_copied(
        "a cache", "make another, and copy sequences with seq_cp, or with state_get and state_set"
    )

    spec: CacheSpec
    parts: tuple[Cache, ...]
    has_states: bool = False
    keeps_every_token: bool = True
    _nest: Sequence[Savepoint]  # the open transactions, the innermost last

    def __init__(self) -> None:
        self.parts = (self,)
        self._watchers: list[Remember] = []
        self.changes = Changes()

    def join(self, changes: Changes) -> None:
        """Take part in these changes from now on; what the cache of several parts calls."""
        self.changes = changes
        changes.join(self._remember)

    # -- questions

    @property
    @abstractmethod
    def can_shift(self) -> bool:
        """Whether positions can be moved."""

    @property
    @abstractmethod
    def used(self) -> int:
        """How many cells have an owner."""

    @property
    @abstractmethod
    def token_count(self) -> int:
        """The sum of owners over cells: a shared cell counts once for each."""

    @property
    @abstractmethod
    def store_specs(self) -> tuple[CacheSpec | StateSpec, ...]:
        """The shapes of the stores, part by part."""

    @abstractmethod
    def n_free(self) -> int:
        """How many more tokens fit."""

    @abstractmethod
    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position held, -1 when the sequence is empty."""

    @abstractmethod
    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position held, -1 when the sequence is empty."""

    @abstractmethod
    def seq_count(self, seq_id: int) -> int:
        """How many tokens of a sequence are held."""

    @abstractmethod
    def seq_tokens(self, seq_id: int) -> Int32Array:
        """Their ids in the order of their positions; -1 where an embedding was decoded."""

    @abstractmethod
    def seq_positions(self, seq_id: int) -> Int32Array:
        """Where they stand, ascending."""

    def seq_evicted(self, seq_id: int) -> Int32Array:
        """The ids of tokens that have left the window, in the order of their positions."""
        checked_id(seq_id, self.spec.n_seq_max)
        return np.empty(0, np.int32)

    def seq_evicted_positions(self, seq_id: int) -> Int32Array:
        """Where those stood, ascending; edits of the sequence move them too."""
        checked_id(seq_id, self.spec.n_seq_max)
        return np.empty(0, np.int32)

    def makes_room(self, seq_id: int, start: int, stop: int, *, in_place: bool = True) -> bool:
        """Whether removing the sequence's tokens ``[start, stop)`` leaves room for more.

        Args:
            seq_id: the sequence.
            start: the first token that is removed, counted in the order of positions.
            stop: the first one behind them; it and what follows moves up, or is decoded again.
            in_place: whether it moves, where positions can be moved.
        """
        self._check_removal(seq_id, start, stop, in_place)
        return True

    def _check_removal(self, seq_id: int, start: int, stop: int, in_place: bool) -> None:
        """Check the arguments of :meth:`makes_room`."""
        checked_id(seq_id, self.spec.n_seq_max)
        check_range("start", start, 0, check_range("stop", stop, 0, MAX_POSITION))
        check_bool("in_place", in_place)

    @abstractmethod
    def view(self, n_seq_max: int | None = None) -> CacheView:
        """The state of all cells as a value, with at most n_seq_max owners shown a cell."""

    @abstractmethod
    def check(self) -> None:
        """Prove the invariants by brute force; raises InvariantError."""

    # -- llama.cpp's verbs

    @abstractmethod
    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Drop a sequence, or every one (-1), from the range; False if the cache cannot."""

    @abstractmethod
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Share what src holds in the range with dst, in place of what dst had there."""

    @abstractmethod
    def seq_keep(self, seq_id: int) -> None:
        """Drop every other sequence."""

    @abstractmethod
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions in the range by delta; those driven below 0 are dropped."""

    @abstractmethod
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions in the range by d, truncating."""

    @abstractmethod
    def clear(self, data: bool = True) -> None:
        """Empty the cache; ``data=False`` leaves the buffers as they are."""

    @abstractmethod
    def defrag(self, max_moves: int | None = None) -> None:
        """Ask for compaction at the next update, of at most ``max_moves`` runs of cells."""

    @abstractmethod
    def update(self) -> None:
        """Apply what is pending: first rotate K, then compact."""

    # -- beyond llama.cpp's

    @atomic
    def seq_cut(self, seq_id: int, p0: int, p1: int) -> bool:
        """Drop a sequence from ``[p0, p1)`` and move what follows up to p0.

        Returns:
            False if the cache cannot; nothing has changed.

        Raises:
            PositionError, ShiftUnsupported, CacheFull, NotSupported: as :meth:`seq_add` does.
        """
        if not self.can_shift:
            return False
        lo, hi = clamp_range(p0, p1)
        if not self.seq_rm(seq_id, lo, hi):
            return False
        if lo < hi:
            self.seq_add(seq_id, hi, -1, lo - hi)
        return True

    @abstractmethod
    def rewind(self, seq_id: int, p0: int) -> int:
        """Drop a sequence from p0 on, and as much before it as has to go too.

        A state cannot be cut, only exchanged for an older one that was kept. Returns the position
        from which the sequence has to be decoded again: p0 where it could be cut there, 0 where
        nothing older was kept.
        """

    def checkpoint(self, seq_id: int) -> bool:
        """Keep what cannot be cut of a sequence, to go back to where it ends now.

        Returns:
            False if there is nothing to keep, or no budget for it.
        """
        checked_id(seq_id, self.spec.n_seq_max)
        return False

    @atomic
    def resize(self, size: int) -> None:
        """Resize to ``size`` cells, whatever they hold; compact if it would not fit otherwise.

        Old and new buffers exist side by side for a moment. Positions, pending shifts and rows stay
        as they are.

        Raises:
            OptionError: size is below 1.
            CacheFull: more cells are used; nothing has changed.
            AllocationError: the new buffers cannot be had; nothing has changed.
            CacheError: a transaction is open, or a batch is being decoded.
        """
        self.require_idle()
        if self.in_transaction:
            raise CacheError("a transaction is open: end it before resizing")
        self._resize(check_range("size", size, 1, MAX_POSITION))

    @abstractmethod
    def export(self, seq_ids: Sequence[int], lo: int, hi: int, checkpoints: bool) -> SequenceData:
        """Copy what sequences hold in a range of positions; nothing may be pending.

        See :func:`kvcellar.cache.transfer.state_get`, which prepares it.
        """

    @abstractmethod
    def import_(self, content: SequenceData, seq_ids: Sequence[int], shift: int) -> None:
        """Put sound content into sequences; the caller takes back what fails half way.

        See :func:`kvcellar.cache.transfer.state_set`, which checks it.
        """

    # -- transactions

    @atomic
    def transaction(self) -> Transaction:
        """What happens from here on can be taken back; see :class:`Transaction`."""
        self.require_idle()
        savepoint = self._begin(self._watchers)
        transaction = Transaction(savepoint, savepoint.grip())
        self.changes.lasting.append(savepoint)
        return transaction

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        self.changes.settle()
        return bool(self._nest)

    def watch(self, remember: Remember) -> None:
        """Make transactions take back what belongs to the cells but lies outside of the cache.

        Args:
            remember: called when one begins; what it returns is called if that is rolled back.
        """
        self._watchers.append(remember)

    # -- decoding

    @atomic
    def place(
        self,
        batch: Batch,
        n_ubatch: int,
        *,
        n_vocab: int | None = None,
        n_embd: int | None = None,
        coupled: Coupled = "same",
    ) -> Placement:
        """Take what every microbatch of a batch needs, or raise and take nothing.

        What is pending is applied first. With states, microbatches have equally many tokens per
        sequence, whose positions have to follow on.

        Args:
            batch: what is to be decoded.
            n_ubatch: how many tokens are computed at once.
            n_vocab: token ids must be below it.
            n_embd: input embeddings must have this many values.
            coupled: "same" refuses a token whose owners do not hold the same cells.

        Raises:
            BatchError, SequenceIdError, PositionError: the batch does not fit what is held.
            CacheFull: fewer cells are free than the batch has tokens.
        """
        self.require_idle()
        check_kind("batch", batch, Batch, made="for example Batch.of([1, 2])")
        check_range("n_ubatch", n_ubatch, 1, MAX_POSITION)
        check_choice("coupled", coupled, ("same", "any"))
        batch.check_model(n_vocab, n_embd)
        rows = batch.resolve(self.spec.n_seq_max, self.seq_pos_max)
        self.check_rows(rows, coupled)
        if self.has_states:
            pieces = split_equal(rows.owners, n_ubatch)
        else:
            pieces = split_simple(len(rows.positions), n_ubatch)
        return self.take(micro_batches(rows, pieces))

    @abstractmethod
    def check_rows(self, rows: Rows, coupled: Coupled) -> None:
        """Raise if a batch that is well formed cannot be placed; changes nothing."""

    @atomic
    def take(self, micros: Sequence[MicroBatch]) -> Placement:
        """Take what microbatches need that were checked, or raise and take nothing."""
        groups, states = self._take(micros)
        batch = OpenBatch(self.changes, micros, groups, states)
        placement = Placement(batch, batch.grip())
        self.changes.lasting.append(batch)
        return placement

    @property
    def is_decoding(self) -> bool:
        """Whether a batch has been placed and neither committed nor released."""
        self.changes.settle()
        return self._open_batch() is not None

    def require_idle(self) -> None:
        """Raise CacheError while a batch is being decoded."""
        if self.changes.lasting and self._open_batch() is not None:
            raise CacheError("a batch is being decoded: commit or release its placement first")

    def _open_batch(self) -> OpenBatch | None:
        return next((one for one in self.changes.lasting if isinstance(one, OpenBatch)), None)

    # -- what each kind does

    @abstractmethod
    def _remember(self) -> Undo:
        """Return what puts back all of this cache's own that a change may alter."""

    @abstractmethod
    def _take(
        self, micros: Sequence[MicroBatch]
    ) -> tuple[Sequence[CellPart], StatePlacement | None]:
        """Take what microbatches need of every group, and of the states if there are any."""

    @abstractmethod
    def _begin(self, watchers: Sequence[Remember]) -> Savepoint:
        """Open a savepoint within those that are open, and add it to ``_nest``."""

    @abstractmethod
    def _resize(self, size: int) -> None:
        """Resize the rows to ``size`` cells and update ``spec``."""


class Transaction(Handle["Transaction"]):
    """What happens to a cache from here on, to be kept or taken back.

    As a context manager it commits when the block ends, and rolls back when it ends by an
    exception. After a :meth:`rollback` within the block, the rest of it stands on its own.
    """

    __reduce_ex__ = not_copied("a transaction", "open another within it with cache.transaction()")

    def __init__(self, savepoint: Savepoint, grip: Leave | None = None) -> None:
        super().__init__(savepoint, grip)
        self._savepoint = savepoint

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or rolled back."""
        return self._savepoint.state == "open"

    def commit(self) -> None:
        """Keep what happened; an outer transaction can still take it back.

        Raises:
            CacheError: it has ended already, an inner one is open, or a batch is being decoded.
        """
        self._savepoint.commit()

    def rollback(self) -> None:
        """Take back what happened, what inner transactions committed included.

        A batch that is being decoded is released. A second time does nothing.

        Raises:
            CacheError: it was committed.
        """
        if self._savepoint.state == "committed":
            raise CacheError("this transaction is committed and cannot be taken back")
        self._savepoint.take_back()


class Savepoint(Lasting[Transaction]):
    """What a transaction takes back, and what is kept for that.

    Args:
        cache: what it is about.
        nest: the savepoints of the cache, the innermost last, itself from now on among them.
        watchers: those outside of the cache that take part.

    Attributes:
        state: "open", "committed" or "rolled back".
    """

    def __init__(
        self, cache: Cache, nest: Sequence[Savepoint], watchers: Sequence[Remember]
    ) -> None:
        self._cache = cache
        self._nest = nest
        self._undos = [remember() for remember in watchers]
        self.state: Literal["open", "committed", "rolled back"] = "open"

    @property
    def changes(self) -> Changes:
        """Those of the cache."""
        return self._cache.changes

    def handle(self) -> Transaction:
        """Return a transaction that ends it."""
        return Transaction(self)

    def leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,  # noqa: ARG002
        traceback: TracebackType | None = None,  # noqa: ARG002
    ) -> None:
        """Commit it, or roll it back if the block ended by an exception or it cannot be."""
        if self.state != "open":
            return
        if kind is not None:
            self.take_back()
            return
        try:
            self.commit()
        except BaseException:
            if self.state == "open":
                self.take_back()
            raise

    @atomic
    def commit(self) -> None:
        """Keep what happened; see :meth:`Transaction.commit`."""
        if self.state != "open":
            raise CacheError(f"this transaction is {self.state} already")
        if self._nest[-1] is not self:
            raise CacheError("a transaction within this one is open: end that one first")
        self._cache.require_idle()
        self._keep()
        self._end("committed")

    @forward
    def take_back(self) -> None:
        """Take back what happened; see :meth:`Transaction.rollback`."""
        if self.state != "open":
            return
        lasting = self.changes.lasting
        while self in lasting and lasting[-1] is not self:
            lasting[-1].take_back()
        while self._nest[-1] is not self:
            self._nest[-1].take_back()
        self._take_back()
        self._end("rolled back")
        for undo in reversed(self._undos):
            undo()

    def _end(self, state: Literal["committed", "rolled back"]) -> None:
        self.changes.remember(partial(setattr, self, "state", "open"))
        self.state = state
        if self in self.changes.lasting:
            self.changes.lasting.remove(self)
        self._ended(kept=state == "committed")

    # -- what each kind does

    def _keep(self) -> None:
        """Do what has to be done before it counts as committed: nothing, for most."""

    @abstractmethod
    def _take_back(self) -> None:
        """Put everything back as it was."""

    @abstractmethod
    def _ended(self, *, kept: bool) -> None:
        """Leave the nest; what was kept may still be taken back by an outer one."""


@dataclass(frozen=True, slots=True)
class CheckpointBudget:
    """How many checkpoints a cache may keep, and in how many bytes; 0 in either: none at all."""

    n_max: int = 8
    max_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        check_range("n_max", self.n_max, 0, MAX_POSITION)
        check_range("max_bytes", self.max_bytes, 0, 2**62)


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Which older states are kept to go back to: a state cannot forget a token.

    No state is ever changed in its row, so keeping one costs a row, but no copy and no time. Kept
    are the states before and after every batch that had several tokens of a sequence, as prompts,
    turns and drafts begin and end there; and, while tokens come one by one, a state each ``every``
    tokens. Beyond the budget the oldest is dropped first.

    Attributes:
        budget: how many; with none, a sequence can only be removed as a whole.
        every: how many tokens that come one by one lie between two.
    """

    budget: CheckpointBudget = field(default_factory=CheckpointBudget)
    every: int = 256

    def __post_init__(self) -> None:
        check_kind("budget", self.budget, CheckpointBudget)
        check_range("every", self.every, 1, MAX_POSITION)

    def limit(self, row_bytes: int) -> int:
        """How many states of that size may be kept."""
        row_bytes = check_range("row_bytes", row_bytes, 0, 2**62)
        return min(self.budget.n_max, self.budget.max_bytes // max(row_bytes, 1))
