"""A cache of several parts: K and V of some layers at full size, of others in a window, states.

A verb is applied to all parts or to none, so they always know the same tokens of a sequence:

* The part that can refuse is asked first, states before windows before what never refuses; where
  two could, or where an error could come in the middle, it happens within a transaction.
* A sequence reaches from the largest of its parts' smallest positions to the smallest of their
  largest ones, as in newer llama.cpp.
* All else that can be asked is answered by the part that knows the most: the widest group, or the
  states if there is none.

What a sequence knows is what a fresh decode of its tokens would give. So tokens cannot be removed
from the middle of one whose state has absorbed them: ``seq_rm`` is False. Newer llama.cpp answers
True and leaves the state alone (#17009), which then still knows what was removed. Who wants them
gone goes back with ``rewind`` and decodes what followed again, as ``Sequence.remove`` does.

What can be asked of a cache that is made of several: who answers, and whether they agree.

A transaction over several caches at once: all of them are kept as they are, or taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvcellar.batch import Batch, MicroBatch, split_equal, split_simple
from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.base import Cache, CellCache, Coupled, KeepsCheckpoints, StateCache
from kvcellar.cache.placement import CellPart, Placement, micro_batch
from kvcellar.cache.recurrent import RecurrentCache
from kvcellar.cache.transaction import Decoding, Nested, NestHost, Remember, Undoable
from kvcellar.cache.view import CacheView
from kvcellar.errors import InvariantError, NotSupported, OptionError
from kvcellar.types import CacheSpec, Int32Array


class Parts:
    """Caches of K and V, the widest first, and the cache of states, where there is one.

    Raises:
        OptionError: there is no part.
    """

    def __init__(self, groups: Sequence[CellCache], states: StateCache | None) -> None:
        self.groups = tuple(groups)
        self.states = states
        self.parts: tuple[CellCache | StateCache, ...] = (
            self.groups if states is None else (*self.groups, states)
        )
        if not self.parts:
            raise OptionError("a cache needs at least one part: a group of K and V, or states")
        self._primary = self.parts[0]

    @property
    def spec(self) -> CacheSpec:
        """The shape of the widest group."""
        return self._primary.spec

    @property
    def can_shift(self) -> bool:
        """Whether positions can be moved in every part."""
        return all(part.can_shift for part in self.parts)

    @property
    def used(self) -> int:
        """How many cells of the widest group have an owner."""
        return self._primary.used

    @property
    def token_count(self) -> int:
        """The sum of owners over its cells."""
        return self._primary.token_count

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position that every part holds, -1 when the sequence is empty."""
        return max(part.seq_pos_min(seq_id) for part in self.parts)

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position that every part holds, -1 when the sequence is empty."""
        ends = [part.seq_pos_max(seq_id) for part in self.parts]
        return min((end for end in ends if end >= 0), default=-1)

    def n_free(self) -> int:
        """How many cells of the widest group may be filled."""
        return self._primary.n_free()

    def seq_count(self, seq_id: int) -> int:
        """How many tokens of a sequence are held."""
        return self._primary.seq_count(seq_id)

    def seq_tokens(self, seq_id: int) -> Int32Array:
        """Their ids in the order of their positions; -1 where an embedding was decoded."""
        return self._primary.seq_tokens(seq_id)

    def seq_positions(self, seq_id: int) -> Int32Array:
        """Where they stand, ascending."""
        return self._primary.seq_positions(seq_id)

    def view(self, n_seq_max: int | None = None) -> CacheView:
        """The cells of the widest group; ask one of ``parts`` for others."""
        return self._primary.view(n_seq_max)

    def check(self) -> None:
        """Prove the invariants of every part, and that all hold the same sequences."""
        for part in self.parts:
            part.check()
        for seq_id in range(self.spec.n_seq_max):
            if not self._agree(seq_id):
                ends = [part.seq_pos_max(seq_id) for part in self.parts]
                raise InvariantError(f"the parts end sequence {seq_id} at different {ends}")

    # -- steps

    def _agree(self, seq_id: int) -> bool:
        return len({part.seq_pos_max(seq_id) for part in self.parts}) == 1

    def _knows_each_token(self, seq_id: int) -> bool:
        """Whether every part could forget or share any single token of a sequence."""
        counts = {group.seq_count(seq_id) for group in self.groups}
        return self.states is None and len(counts) == 1


def parts_of(cache: Cache) -> tuple[Cache, ...]:
    """The parts of a cache, the one that knows the most first; itself if it is of one piece."""
    return cache.parts if isinstance(cache, Parts) else (cache,)


def has_states(cache: Cache) -> bool:
    """Whether a cache holds recurrent states."""
    if isinstance(cache, Parts):
        return cache.states is not None
    return isinstance(cache, RecurrentCache)


class CompoundTransaction(Nested):
    """A transaction on each part; see :mod:`kvcellar.cache.transaction` for what that keeps."""

    def __init__(self, journal: CompoundJournal, watchers: Sequence[Remember]) -> None:
        super().__init__(journal.host, journal.open, watchers)
        self._journal = journal
        self._parts: list[Undoable] = []
        try:
            for part in journal.parts:
                self._parts.append(part.transaction())
        except BaseException:
            self._take_back()
            raise

    def _keep(self) -> None:
        for transaction in self._parts:
            transaction.commit()

    def _take_back(self) -> None:
        for transaction in reversed(self._parts):
            transaction.rollback()

    def _ended(self, *, kept: bool) -> None:  # noqa: ARG002
        self._journal.open.pop()


class CompoundJournal:
    """The open transactions of a cache of several parts, the innermost last."""

    def __init__(self, host: NestHost, parts: Sequence[Cache]) -> None:
        self.host = host
        self.parts = tuple(parts)
        self.open: list[CompoundTransaction] = []
        self.watchers: list[Remember] = []

    def begin(self, *, watched: bool = True) -> CompoundTransaction:
        """A new transaction within those that are open.

        Args:
            watched: whether those outside of the cache take part; within a verb they need not.
        """
        transaction = CompoundTransaction(self, self.watchers if watched else ())
        self.open.append(transaction)
        return transaction


class HybridCache(Parts, Decoding):
    """Several caches under one roof. Implements :class:`kvcellar.cache.base.Cache`.

    Args:
        groups: caches of K and V, the widest first.
        states: the cache of recurrent states, where there is one.

    Raises:
        OptionError: there is no part.
    """

    def __init__(self, groups: Sequence[CellCache], states: StateCache | None = None) -> None:
        super().__init__(groups, states)
        self._growing = [part for part in self.groups if part.spec.size == self._primary.spec.size]
        self._asked = tuple(reversed(self.parts))  # those that can refuse come first
        self._n_choosy = sum(type(part) is not AttentionCache for part in self.parts)
        self._journal = CompoundJournal(self, self.parts)

    # -- llama.cpp's verbs

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Drop a sequence (-1: every one) from the range; False if a part cannot."""
        self._require_idle()
        if self._n_choosy < 2 or (p0 <= 0 and p1 < 0):
            return all(part.seq_rm(seq_id, p0, p1) for part in self._asked)
        with self._journal.begin(watched=False) as attempt:
            done = all(part.seq_rm(seq_id, p0, p1) for part in self._asked)
            if not done:
                attempt.rollback()
        return done

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let dst share what src holds in the range.

        If that is all of it, dst holds nothing else afterwards: a state cannot be added to.

        Raises:
            NotSupported: a part of what src holds, but not every part of the cache has it token by
                token; share all of it, then ``rewind`` dst.
        """
        self._require_idle()
        first, end = self._primary.seq_pos_min(src), self._primary.seq_pos_max(src)
        if p0 <= max(first, 0) and (p1 < 0 or p1 > end):
            for part in self._asked:
                part.seq_cp(src, dst, -1, -1)
            return
        if not self._knows_each_token(src) or not self._knows_each_token(dst):
            raise NotSupported(
                f"seq_cp of positions {p0} to {p1} of sequence {src}, which reaches to {end}: "
                "copy all of it (-1, -1), then rewind the copy"
            )
        self._on_all(dst, lambda part: part.seq_cp(src, dst, p0, p1))

    def seq_keep(self, seq_id: int) -> None:
        """Drop every other sequence."""
        self._require_idle()
        for part in self._asked:
            part.seq_keep(seq_id)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions in the range; what an error of one part leaves, no part has done.

        Raises:
            NotSupported: only some parts would move the end of the sequence, or tokens driven
                below 0 would be forgotten by some parts only.
            PositionError, ShiftUnsupported, CacheFull: as a part raises it.
        """
        self._require_idle()
        self._on_all(seq_id, lambda part: part.seq_add(seq_id, p0, p1, delta))

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions in the range by d, truncating; raises as :meth:`seq_add` does."""
        self._require_idle()
        self._on_all(seq_id, lambda part: part.seq_div(seq_id, p0, p1, d))

    def clear(self, data: bool = True) -> None:
        """Empty every part; ``data=False`` leaves the buffers as they are."""
        self._require_idle()
        for part in self.parts:
            part.clear(data)

    def defrag(self, max_moves: int | None = None) -> None:
        """Ask for compaction at the next update, of at most ``max_moves`` runs of cells a part."""
        self._require_idle()
        with self._journal.begin(watched=False):
            for part in self.parts:
                part.defrag(max_moves)

    def update(self) -> None:
        """Apply what is pending, part by part."""
        self._require_idle()
        for part in self.parts:
            part.update()

    # -- beyond llama.cpp's

    def rewind(self, seq_id: int, p0: int) -> int:
        """Drop a sequence from p0 on, and as much before it as some part has to give up."""
        self._require_idle()
        end = max(p0, 0)
        while True:
            # Going back in two steps ends where one would: what a step drops lies behind its end.
            ends = [part.rewind(seq_id, end) for part in self._asked]
            end = min(ends)
            if max(ends) == end:
                return end

    def checkpoint(self, seq_id: int) -> bool:
        """Keep what a sequence knows now, to go back to, in every part that needs that.

        Returns:
            False if no part does, or one has nothing to keep or no budget for it.
        """
        self._require_idle()
        parts = [part for part in self.parts if isinstance(part, KeepsCheckpoints)]
        return len(parts) > 0 and all(part.checkpoint(seq_id) for part in parts)

    def transaction(self) -> Undoable:
        """What happens to all parts from here on can be taken back."""
        self._require_idle()
        return self._journal.begin()

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return bool(self._journal.open)

    def watch(self, remember: Remember) -> None:
        """Let transactions take back what belongs to the cache but lies outside of it."""
        self._journal.watchers.append(remember)

    def resize(self, size: int) -> None:
        """Have so many cells in the widest group and in those as large; windows stay as they are.

        Raises:
            OptionError, CacheFull, AllocationError, CacheError: as of an
                :class:`~kvcellar.cache.attention.AttentionCache`; nothing has changed.
        """
        self._require_idle()
        old, done = self.spec.size, list[Cache]()
        try:
            for part in self._growing:
                part.resize(size)
                done.append(part)
        except BaseException:
            for resized in done:
                resized.resize(old)
            raise

    def place(
        self,
        batch: Batch,
        n_ubatch: int,
        *,
        n_vocab: int | None = None,
        n_embd: int | None = None,
        coupled: Coupled = "same",
    ) -> Placement:
        """Take what every microbatch of a batch needs of every part, or raise and take nothing.

        Arguments and errors are those of ``AttentionCache.place``. With states, microbatches have
        equally many tokens of each of their sequences, whose positions have to follow on.
        """
        self._require_idle()
        batch.check_model(n_vocab, n_embd)
        rows = batch.resolve(self.spec.n_seq_max, self.seq_pos_max)
        for part in self.parts:
            part.check_rows(rows, coupled)
        if self.states is None:
            pieces = split_simple(len(rows), n_ubatch)
        else:
            pieces = split_equal(rows.owners, n_ubatch)
        placement = self._take([micro_batch(rows, piece) for piece in pieces])
        self._open = placement
        return placement

    # -- steps

    def _take(self, micros: Sequence[MicroBatch]) -> Placement:
        with ExitStack() as stack:
            groups: list[CellPart] = []
            for group in self.groups:
                part = group.take(micros)
                stack.callback(part.release)
                groups.append(part)
            states = None if self.states is None else self.states.take(micros)
            stack.pop_all()
        return Placement(micros, groups, states)

    def _on_all(self, seq_id: int, verb: Callable[[Cache], None]) -> None:
        """Apply a verb to every part, or to none if one refuses or they would part ways."""
        n_before = self._primary.seq_count(seq_id)
        with self._journal.begin(watched=False):
            for part in self._asked:
                verb(part)
            n_after = self._primary.seq_count(seq_id)
            forgets = self.states is not None and 0 < n_after < n_before
            if forgets or not self._agree(seq_id):
                raise NotSupported(
                    f"the parts of this cache would no longer agree about sequence {seq_id}: move "
                    "its positions up to the end, and drive none of them below 0"
                )
