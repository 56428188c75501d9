"""Copies of a window's rows in host memory, so that a sequence can go back to an earlier end.

What lies behind the window is gone from the cache, but to go on from position p only the window
before p is needed. A checkpoint holds that: the last ``window`` tokens before its end, K rotated to
their positions, and the ids of those before them. It belongs to a text, not to cells: sequences
that were copied share it, whatever becomes of the cells.

A sequence's checkpoints go with the text that they end in: when it is removed from before their
end, when its positions move, when it is replaced. Beyond the budget the oldest goes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvcellar.batch import MicroBatch
from kvcellar.cache.base import CheckpointBudget
from kvcellar.cache.eviction import EvictedTokens, WindowEviction, is_whole
from kvcellar.cache.rows import StoreSync
from kvcellar.cellsets import pack_owners, unpack_owners
from kvcellar.errors import AllocationError, CacheFull
from kvcellar.types import ByteArray, Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class WindowCheckpoint:
    """The end of a text: its last tokens with their rows, and the tokens evicted before them."""

    positions: Int32Array  # ascending, at least one
    tokens: Int32Array
    rows: tuple[ByteArray, ...]  # of each layer and part, as stored
    evicted: EvictedTokens
    serial: int  # the later it was made, the larger

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return int(self.positions[-1]) + 1

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(rows.nbytes for rows in self.rows)

    def reaches(self, p0: int, window: int) -> bool:
        """Whether a sequence can be decoded from p0 on with what this holds before it."""
        held = self.positions[self.positions < p0]
        return p0 <= self.end and len(held) > 0 and is_whole(self.evicted.positions, held, window)


class WindowCheckpoints:
    """The checkpoints of each sequence, none of them more than the budget allows."""

    def __init__(self, n_seq_max: int, budget: CheckpointBudget) -> None:
        self.budget = budget
        self._of: list[tuple[WindowCheckpoint, ...]] = [()] * n_seq_max
        self._made = 0

    @property
    def wanted(self) -> bool:
        """Whether there may be any."""
        return self.budget.n_max > 0 and self.budget.max_bytes > 0

    def of(self, seq: int) -> tuple[WindowCheckpoint, ...]:
        """Those of a sequence, by their ends."""
        return self._of[seq]

    def add(
        self,
        seq: int,
        positions: Int32Array,
        tokens: Int32Array,
        rows: tuple[ByteArray, ...],
        evicted: EvictedTokens,
    ) -> bool:
        """Keep one more, in place of one with the same end; False if it alone is too large."""
        new = WindowCheckpoint(positions, tokens, rows, evicted, self._made)
        if not self.wanted or new.n_bytes > self.budget.max_bytes:
            return False
        self._made += 1
        others = [old for old in self._of[seq] if old.end != new.end]
        self._of[seq] = tuple(sorted([*others, new], key=lambda one: one.end))
        self._shrink()
        return True

    def reaching(self, seq: int, p0: int, window: int) -> WindowCheckpoint | None:
        """One from which a sequence can be decoded from p0 on."""
        return next((one for one in self._of[seq] if one.reaches(p0, window)), None)

    def before(self, seq: int, p0: int) -> WindowCheckpoint | None:
        """The last that ends at or before p0."""
        return next((one for one in reversed(self._of[seq]) if one.end <= p0), None)

    def cut(self, seq: int, p0: int) -> None:
        """Drop those that end behind p0."""
        self._of[seq] = tuple(one for one in self._of[seq] if one.end <= p0)

    def share(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Give a sequence the text of another in the range, in place of its own."""
        self.cut(dst, p0)
        if p0 == 0:
            self._of[dst] = tuple(one for one in self._of[src] if one.end <= p1)

    def lend(self, seq: int, others: Sequence[int], end: int) -> None:
        """Share the checkpoint of a sequence that ends there with others, if it has one."""
        for one in self._of[seq]:
            if one.end == end:
                for other in others:
                    mine = (*self._of[other], one)
                    self._of[other] = tuple(sorted(mine, key=lambda kept: kept.end))

    def save(self) -> list[tuple[WindowCheckpoint, ...]]:
        """What :meth:`load` puts back."""
        return list(self._of)

    def load(self, saved: list[tuple[WindowCheckpoint, ...]]) -> None:
        """Put back what :meth:`save` returned."""
        self._of[:] = saved

    def _shrink(self) -> None:
        known = {one.serial: one for mine in self._of for one in mine}
        while len(known) > self.budget.n_max or _bytes(known) > self.budget.max_bytes:
            oldest = known.pop(min(known))
            for seq, mine in enumerate(self._of):
                self._of[seq] = tuple(one for one in mine if one is not oldest)


def _bytes(checkpoints: Mapping[int, WindowCheckpoint]) -> int:
    return sum(one.n_bytes for one in checkpoints.values())


class WindowKeeper:
    """Copies rows between a cache and its checkpoints.

    Args:
        checkpoints: those there are.
        eviction: where cells come from.
        sync: what keeps rows in step with the table.
        window: how many tokens before its end a checkpoint holds.
    """

    def __init__(
        self, checkpoints: WindowCheckpoints, eviction: WindowEviction, sync: StoreSync, window: int
    ) -> None:
        self._checkpoints = checkpoints
        self._eviction = eviction
        self._sync = sync
        self._window = window

    def make(self, seq: int) -> bool:
        """Keep the end of a sequence of which no shift is pending; False: nothing was kept."""
        table, store = self._eviction.table, self._eviction.store
        cells = table.cells_of(seq)
        if not len(cells) or not self._checkpoints.wanted:
            return False
        at = table.positions[cells]
        n_older = int(np.count_nonzero(at <= int(at[-1]) - self._window))
        older, last = cells[:n_older], cells[n_older:]
        evicted = self._eviction.evicted[seq]
        if n_older:
            evicted = evicted.grown(at[:n_older], table.tokens[older])
        rows = tuple(store.read_raw(i, part, last) for i, part in self._eviction.parts)
        return self._checkpoints.add(seq, at[n_older:], table.tokens[last], rows, evicted)

    def committed(self, micros: Sequence[MicroBatch]) -> None:
        """After a batch, keep the ends of sequences of which it had several tokens."""
        if len(micros) == len(micros[0].positions) == 1 or not self._checkpoints.wanted:
            return
        owners = np.concatenate([micro.owners for micro in micros], axis=1)
        counts = np.bincount(unpack_owners(owners)[1])
        for seq in np.flatnonzero(counts > 1).tolist():
            # Going back is a convenience: what was computed counts, whether or not it is there.
            with suppress(MemoryError, AllocationError):
                self.make(seq)

    def restore(self, seq: int, checkpoint: WindowCheckpoint, end: int) -> bool:
        """Put a sequence back as it was at ``end``; False: no room, nothing has changed."""
        return self._sync.changes.attempt(partial(self._fill, seq, checkpoint, end))

    def _fill(self, seq: int, checkpoint: WindowCheckpoint, end: int) -> bool:
        table = self._eviction.table
        n, kept = int(np.searchsorted(checkpoint.positions, end)), self._eviction.kept_rows()
        table.seq_rm(seq)
        try:
            cells = self._eviction.take(n, kept)
        except CacheFull:
            return False
        self._sync.before_writing(cells)
        for (layer, part), rows in zip(self._eviction.parts, checkpoint.rows, strict=True):
            self._eviction.store.write_raw(layer, part, cells, rows[:n])
        owners = pack_owners(np.arange(n), np.full(n, seq), n, len(table.owners))
        table.place(cells, checkpoint.positions[:n], owners, checkpoint.tokens[:n])
        self._eviction.evicted[seq] = checkpoint.evicted
        return True
