"""Making checkpoints of a window, and going back to them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from kvcellar.batch import MicroBatch
from kvcellar.cache.room import Room
from kvcellar.cache.transaction import KeptRows
from kvcellar.cache.upkeep import Upkeep
from kvcellar.cache.window_checkpoints import WindowCheckpoint, WindowCheckpoints
from kvcellar.cellsets import pack_owners, unpack_owners
from kvcellar.errors import AllocationError, CacheFull


class WindowKeeper:
    """Copies rows between a cache and its checkpoints.

    Args:
        checkpoints: those there are.
        room: where cells come from.
        upkeep: what happens to rows.
        window: how many tokens before its end a checkpoint holds.
    """

    def __init__(
        self, checkpoints: WindowCheckpoints, room: Room, upkeep: Upkeep, window: int
    ) -> None:
        self._checkpoints = checkpoints
        self._room = room
        self._upkeep = upkeep
        self._window = window

    def make(self, seq: int) -> bool:
        """Keep the end of a sequence of which no shift is pending; False: nothing was kept."""
        table, store = self._room.table, self._room.store
        cells = table.cells_of(seq)
        if not len(cells) or not self._checkpoints.wanted:
            return False
        at = table.positions[cells]
        n_older = int(np.count_nonzero(at <= int(at[-1]) - self._window))
        older, last = cells[:n_older], cells[n_older:]
        slid = self._room.slid[seq]
        if n_older:
            slid = slid.grown(at[:n_older], table.tokens[older])
        rows = tuple(store.read_raw(i, part, last) for i, part in self._room.parts)
        return self._checkpoints.add(seq, at[n_older:], table.tokens[last], rows, slid)

    def committed(self, micros: Sequence[MicroBatch]) -> None:
        """A batch was decoded: keep the ends of sequences of which it had several tokens."""
        if not self._checkpoints.wanted:
            return
        owners = np.concatenate([micro.owners for micro in micros], axis=1)
        counts = np.bincount(unpack_owners(owners)[1])
        for seq in np.flatnonzero(counts > 1).tolist():
            # Going back is a convenience: what was computed counts, whether or not it is there.
            with suppress(MemoryError, AllocationError):
                self.make(seq)

    def restore(self, seq: int, checkpoint: WindowCheckpoint, end: int) -> bool:
        """Let a sequence be as it was at ``end``; False: no room, nothing has changed."""
        saved, kept = self._room.save(), self._room.kept_rows()
        try:
            self._room.table.seq_rm(seq)
            self._fill(seq, checkpoint, end, kept)
        except BaseException as error:
            self._room.load(saved)
            kept.write_back()
            if isinstance(error, CacheFull):
                return False
            raise
        self._room.slid[seq] = checkpoint.slid
        self._upkeep.mark_held()
        return True

    def _fill(self, seq: int, checkpoint: WindowCheckpoint, end: int, kept: KeptRows) -> None:
        table = self._room.table
        n = int(np.searchsorted(checkpoint.positions, end))
        cells = self._room.take(n, kept)
        kept.keep(cells)
        for (layer, part), rows in zip(self._room.parts, checkpoint.rows, strict=True):
            self._room.store.write_raw(layer, part, cells, rows[:n])
        owners = pack_owners(np.arange(n), np.full(n, seq), n, len(table.owners))
        table.place(cells, checkpoint.positions[:n], owners, checkpoint.tokens[:n])
