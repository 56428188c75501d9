"""A cache of several parts: K and V of some layers at full size, of others in a window, states.

A verb is applied to all parts or to none, so they always know the same tokens of a sequence:

* The part that can refuse is asked first, states before windows before what never refuses. If two
  could, what the first has done is taken back when the second refuses.
* A sequence reaches from the largest of its parts' smallest positions to the smallest of their
  largest ones, as in newer llama.cpp.
* All else that can be asked is answered by the part that knows the most: the widest group, or the
  states if there is none.

What a sequence knows is what a fresh decode of its tokens would give. So tokens cannot be removed
from the middle of one whose state has absorbed them: ``seq_rm`` is False. Newer llama.cpp answers
True and leaves the state alone (#17009), which then still holds what was removed. To remove them,
go back with ``rewind`` and decode what followed again, as ``Sequence.remove`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvcellar.batch import MicroBatch, Rows
from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.base import Cache, Coupled, Savepoint
from kvcellar.cache.changes import Changes, Remember, Undo, atomic
from kvcellar.cache.content import SequenceData
from kvcellar.cache.placement import CellPart
from kvcellar.cache.recurrent import RecurrentCache
from kvcellar.cache.state_placement import StatePlacement
from kvcellar.cache.view import CacheView
from kvcellar.cellsets import clamp_range
from kvcellar.errors import (
    InvariantError,
    NotSupported,
    OptionError,
    check_bool,
    check_kind,
    shown,
)
from kvcellar.types import MAX_POSITION, CacheSpec, Int32Array, StateSpec


class HybridCache(Cache):
    """Several caches under one roof.

    Args:
        groups: caches of K and V, the widest first.
        states: the cache of recurrent states, where there is one.

    Raises:
        OptionError: there is no part.
    """

    _nest: list[HybridSavepoint]

    def __init__(
        self, groups: Sequence[AttentionCache], states: RecurrentCache | None = None
    ) -> None:
        super().__init__()
        check_kind("groups", groups, list, tuple)
        for part in (*groups, *([] if states is None else [states])):
            check_kind("a part", part, Cache)
        self.groups = tuple(groups)
        self.states = states
        self.parts = self.groups if states is None else (*self.groups, states)
        if not self.parts:
            raise OptionError("a cache needs at least one part: a group of K and V, or states")
        self.has_states = states is not None
        self.keeps_every_token = all(part.keeps_every_token for part in self.parts)
        self._nest = []
        self._primary = self.parts[0]
        self.spec = self._primary.spec
        self._growing = [part for part in self.groups if part.spec.size == self.spec.size]
        self._asked = tuple(reversed(self.parts))  # those that can refuse come first
        self._n_choosy = sum(not part.keeps_every_token for part in self.parts)
        self.join(self.changes)

    def join(self, changes: Changes) -> None:
        """Take part in these changes from now on, with every part."""
        super().join(changes)
        for part in self.parts:
            part.join(changes)

    # -- questions

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

    @property
    def store_specs(self) -> tuple[CacheSpec | StateSpec, ...]:
        """The shapes of the stores, part by part."""
        return tuple(spec for part in self.parts for spec in part.store_specs)

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position that every part holds, -1 when the sequence is empty."""
        return max(part.seq_pos_min(seq_id) for part in self.parts)

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position that every part holds, -1 when the sequence is empty."""
        end = -1
        for part in self.parts:
            last = part.seq_pos_max(seq_id)
            if last >= 0 and (end < 0 or last < end):
                end = last
        return end

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

    def seq_evicted(self, seq_id: int) -> Int32Array:
        """The ids of tokens that have left the window of the widest group."""
        return self._primary.seq_evicted(seq_id)

    def seq_evicted_positions(self, seq_id: int) -> Int32Array:
        """Where those stood, ascending."""
        return self._primary.seq_evicted_positions(seq_id)

    def makes_room(
        self,
        seq_id: int,
        start: int,
        stop: int,
        *,
        in_place: bool = True,
    ) -> bool:
        """Whether removing tokens leaves room for more, what follows being decoded again."""
        check_bool("in_place", in_place)  # but some part may have to decode again
        return self._primary.makes_room(seq_id, start, stop, in_place=False)

    def view(self, n_seq_max: int | None = None) -> CacheView:
        """The cells of the widest group; ask one of ``parts`` for others."""
        return self._primary.view(n_seq_max)

    def check(self) -> None:
        """Prove the invariants of every part, and that all hold the same sequences."""
        self.changes.settle()
        for part in self.parts:
            part.check()
        for seq_id in range(self.spec.n_seq_max):
            if not self._agree(seq_id):
                ends = [part.seq_pos_max(seq_id) for part in self.parts]
                raise InvariantError(f"the parts end sequence {seq_id} at different {ends}")

    # -- llama.cpp's verbs

    @atomic
    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Drop a sequence (-1: every one) from the range; False if a part cannot."""
        self.require_idle()
        if self._n_choosy < 2 or clamp_range(p0, p1) == (0, MAX_POSITION):
            return all(part.seq_rm(seq_id, p0, p1) for part in self._asked)
        return self.changes.attempt(
            lambda: all(part.seq_rm(seq_id, p0, p1) for part in self._asked)
        )

    @atomic
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Share what src holds in the range with dst.

        If that is all of it, dst holds nothing else afterwards: a state cannot be added to.

        Raises:
            NotSupported: a part of what src holds, but not every part of the cache has it token by
                token; share all of it, then ``rewind`` dst.
        """
        self.require_idle()
        first, end = self._primary.seq_pos_min(src), self._primary.seq_pos_max(src)
        lo, hi = clamp_range(p0, p1)
        if lo <= max(first, 0) and hi > end:
            for part in self._asked:
                part.seq_cp(src, dst, -1, -1)
            return
        if not self._knows_each_token(src) or not self._knows_each_token(dst):
            raise NotSupported(
                f"seq_cp of positions {shown(p0)} to {shown(p1)} of sequence {src}, which reaches "
                f"to {end}: "
                "copy all of it (-1, -1), then rewind the copy"
            )
        self._on_all(dst, lambda part: part.seq_cp(src, dst, p0, p1))

    @atomic
    def seq_keep(self, seq_id: int) -> None:
        """Drop every other sequence."""
        self.require_idle()
        for part in self._asked:
            part.seq_keep(seq_id)

    @atomic
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions in the range; what an error of one part leaves, no part has done.

        Raises:
            NotSupported: only some parts would move the end of the sequence, or tokens driven
                below 0 would be forgotten by some parts only.
            PositionError, ShiftUnsupported, CacheFull: as a part raises it.
        """
        self.require_idle()
        self._on_all(seq_id, lambda part: part.seq_add(seq_id, p0, p1, delta))

    @atomic
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions in the range by d, truncating; raises as :meth:`seq_add` does."""
        self.require_idle()
        self._on_all(seq_id, lambda part: part.seq_div(seq_id, p0, p1, d))

    @atomic
    def clear(self, data: bool = True) -> None:
        """Empty every part; ``data=False`` leaves the buffers as they are."""
        self.require_idle()
        for part in self.parts:
            part.clear(data)

    @atomic
    def defrag(self, max_moves: int | None = None) -> None:
        """Ask for compaction at the next update, of at most ``max_moves`` runs of cells a part."""
        self.require_idle()
        for part in self.parts:
            part.defrag(max_moves)

    @atomic
    def update(self) -> None:
        """Apply what is pending, part by part."""
        self.require_idle()
        for part in self.parts:
            part.update()

    # -- beyond llama.cpp's

    @atomic
    def rewind(self, seq_id: int, p0: int) -> int:
        """Drop a sequence from p0 on, and as much before it as some part has to drop."""
        self.require_idle()
        end, _ = clamp_range(p0, -1)
        while True:
            # Going back in two steps ends where one would: what a step drops lies behind its end.
            ends = [part.rewind(seq_id, end) for part in self._asked]
            end = min(ends)
            if max(ends) == end:
                return end

    @atomic
    def checkpoint(self, seq_id: int) -> bool:
        """Keep what a sequence knows now, to go back to, in every part that needs that.

        Returns:
            False if no part does, or one has nothing to keep or no budget for it.
        """
        self.require_idle()
        parts = [part for part in self.parts if not part.keeps_every_token]
        return len(parts) > 0 and all(part.checkpoint(seq_id) for part in parts)

    def export(self, seq_ids: Sequence[int], lo: int, hi: int, checkpoints: bool) -> SequenceData:
        """Copy what sequences hold in every part; nothing may be pending."""
        found = [part.export(seq_ids, lo, hi, checkpoints) for part in self.parts]
        groups = tuple(group for one in found for group in one.groups)
        return SequenceData(len(seq_ids), groups, found[-1].states, lo)

    @atomic
    def import_(self, content: SequenceData, seq_ids: Sequence[int], shift: int) -> None:
        """Put sound content into every part; the caller takes back what fails half way."""
        for part, group in zip(self.groups, content.groups, strict=True):
            part.import_(replace(content, groups=(group,)), seq_ids, shift)
        if self.states is not None:
            self.states.import_(content, seq_ids, shift)

    # -- decoding

    def check_rows(self, rows: Rows, coupled: Coupled) -> None:
        """Raise if a part cannot place a batch that is well formed."""
        for part in self.parts:
            part.require_idle()
            part.check_rows(rows, coupled)

    def _take(self, micros: Sequence[MicroBatch]) -> tuple[list[CellPart], StatePlacement | None]:
        """Take what microbatches need of every part."""
        self.update()  # in every part before one takes anything, so that it can be kept
        groups, states = list[CellPart](), None
        for part in self.parts:
            cells, states = part._take(micros)  # noqa: SLF001  (of the same class)
            groups += cells
        return groups, states

    # -- steps

    def _remember(self) -> Undo:
        spec, nest = self.spec, list(self._nest)

        def undo() -> None:
            self.spec = spec
            self._nest[:] = nest

        return undo

    def _begin(self, watchers: Sequence[Remember]) -> HybridSavepoint:
        """Open a transaction; within a verb, those outside of the cache need not take part."""
        return HybridSavepoint(self, self._nest, watchers)

    def _resize(self, size: int) -> None:
        """Resize the widest group and those as large; windows stay as they are."""
        for part in self._growing:
            part.resize(size)
        self.spec = self._primary.spec

    def _agree(self, seq_id: int) -> bool:
        return len({part.seq_pos_max(seq_id) for part in self.parts}) == 1

    def _knows_each_token(self, seq_id: int) -> bool:
        """Whether every part could forget or share any single token of a sequence."""
        counts = {group.seq_count(seq_id) for group in self.groups}
        return self.states is None and len(counts) == 1

    def _on_all(self, seq_id: int, verb: Callable[[Cache], None]) -> None:
        """Apply a verb to every part, or to none if one refuses or they would part ways."""
        n_before = self._primary.seq_count(seq_id)
        for part in self._asked:
            verb(part)
        n_after = self._primary.seq_count(seq_id)
        forgets = self.states is not None and 0 < n_after < n_before
        if forgets or not self._agree(seq_id):
            raise NotSupported(
                f"the parts of this cache would no longer agree about sequence {seq_id}: move "
                "its positions up to the end, and drive none of them below 0"
            )


class HybridSavepoint(Savepoint):
    """A savepoint of each part; see :mod:`kvcellar.cache.transaction` for what that keeps."""

    def __init__(
        self, cache: HybridCache, nest: list[HybridSavepoint], watchers: Sequence[Remember]
    ) -> None:
        super().__init__(cache, nest, watchers)
        self._all = nest
        self._parts = [part._begin(part._watchers) for part in cache.parts]  # noqa: SLF001
        nest.append(self)

    def _keep(self) -> None:
        for savepoint in self._parts:
            savepoint.commit()

    def _take_back(self) -> None:
        for savepoint in reversed(self._parts):
            savepoint.take_back()

    def _ended(self, *, kept: bool) -> None:  # noqa: ARG002
        self._all.pop()
