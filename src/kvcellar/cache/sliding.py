"""The cache of layers that attend to a window: cells that left it are used again.

An :class:`AttentionCache` of fewer cells. What a token sees is the same, so decoding gives what a
cache of full size gives (that one, with ``spec.window`` set, is llama.cpp's ``swa_full``). Evicted
tokens cannot be restored, and no verb leaves a sequence without the window before its next token:
that token would be computed with a hole, unnoticed.

* ``seq_rm`` returns False and changes nothing if that would happen. From the middle of a sequence
  it removes only what leaves the next token its window when the rest has moved up. A tail also
  goes if a checkpoint reaches back to where it began; ``rewind`` goes back to an earlier one.
* ``seq_cp``, ``seq_add`` and ``seq_div`` raise CacheError in that case.
* The last token of a sequence can always be removed and decoded again.
* ``seq_tokens``, ``seq_positions``, ``seq_count`` and ``seq_pos_min`` are about what is held;
  :meth:`SlidingCache.seq_evicted` tells what was evicted. ``seq_pos_max`` is that of the whole
  sequence.

With :func:`sliding_size` cells a batch can always be placed, whatever the sequences hold. Equal
positions, which ``seq_div`` makes, take cells beyond that.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvcellar.backends.base import KVStore
from kvcellar.batch import MicroBatch, Rows
from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.base import CheckpointBudget, Coupled
from kvcellar.cache.changes import Undo, atomic
from kvcellar.cache.content import CellData, RowBytes, WindowData, n_kept, trimmed
from kvcellar.cache.eviction import (
    EvictedTokens,
    Move,
    Positions,
    SlidingPlacement,
    WindowEviction,
    closed,
    is_whole,
    sliding_size,
    within,
)
from kvcellar.cache.placement import CellPart, check_coupled
from kvcellar.cache.window_checkpoints import WindowCheckpoints, WindowKeeper
from kvcellar.cellsets import clamp_delta, clamp_divisor, clamp_range, means_all
from kvcellar.errors import (
    CacheError,
    InvariantError,
    OptionError,
    SnapshotFileError,
    check_kind,
)
from kvcellar.types import MAX_POSITION, ByteArray, CacheSpec, Int32Array, Int64Array

__all__ = ["SlidingCache", "sliding_size"]


class SlidingCache(AttentionCache):
    """Every verb of :class:`AttentionCache`, over cells that are used again.

    Args:
        spec: the shape; all layers have the same window, which is not 0.
        store: the K and V rows of as many cells.
        defrag_threshold: as for :class:`AttentionCache`.
        checkpoints: what may be kept to go back behind the window. One is made for each sequence
            of which a batch decodes several tokens (a prompt), and by :meth:`checkpoint`.
    """

    keeps_every_token = False

    def __init__(
        self,
        spec: CacheSpec,
        store: KVStore,
        *,
        defrag_threshold: float | None = None,
        checkpoints: CheckpointBudget | None = None,
    ) -> None:
        check_kind("spec", spec, CacheSpec)
        if checkpoints is not None:
            check_kind("checkpoints", checkpoints, CheckpointBudget)
        windows = sorted({layer.window for layer in spec.layers})
        if len(windows) != 1 or windows[0] < 1:
            raise OptionError(
                f"the layers have windows {windows}: a sliding cache needs one of at least 1 for "
                "all; layers that see everything (window 0) belong into an AttentionCache"
            )
        super().__init__(spec, store, defrag_threshold=defrag_threshold)
        self._eviction = WindowEviction(self.table, store, self._sync.journal, self._window)
        self._checkpoints = WindowCheckpoints(spec.n_seq_max, checkpoints or CheckpointBudget())
        self._keeper = WindowKeeper(self._checkpoints, self._eviction, self._sync, self._window)
        self.watch(self._remember_windows)

    # -- questions

    def n_free(self) -> int:
        """How many more tokens fit; if there are cells beyond the windows, any number does."""
        if self.spec.size > n_kept(self._window) * self.spec.n_seq_max:
            return MAX_POSITION
        return self._eviction.n_free()

    def seq_evicted(self, seq_id: int) -> Int32Array:
        """The ids of a sequence's evicted tokens, in the order of their positions."""
        return self._eviction.evicted[self.table.checked(seq_id)].tokens

    def seq_evicted_positions(self, seq_id: int) -> Int32Array:
        """Where they stood, ascending; edits of the sequence move them too."""
        return self._eviction.evicted[self.table.checked(seq_id)].positions

    def seq_slid(self, seq_id: int) -> Int32Array:
        """Deprecated name of :meth:`seq_evicted`."""
        warnings.warn("seq_slid is now seq_evicted", DeprecationWarning, stacklevel=2)
        return self.seq_evicted(seq_id)

    def seq_slid_positions(self, seq_id: int) -> Int32Array:
        """Deprecated name of :meth:`seq_evicted_positions`."""
        what = "seq_slid_positions is now seq_evicted_positions"
        warnings.warn(what, DeprecationWarning, stacklevel=2)
        return self.seq_evicted_positions(seq_id)

    def checkpoints(self, seq_id: int) -> tuple[int, ...]:
        """The positions that a sequence can go back to, ascending, beside those in its window."""
        return tuple(one.end for one in self._checkpoints.of(self.table.checked(seq_id)))

    def check(self) -> None:
        """Prove invariants 1 to 4, and that no sequence lacks what its next token needs."""
        super().check()
        for seq, evicted in enumerate(self._eviction.evicted):
            if not is_whole(evicted.positions, self.seq_positions(seq), self._window):
                raise InvariantError(f"sequence {seq} lacks a part of its window")

    # -- llama.cpp's verbs

    @atomic
    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Drop a sequence (-1: every one, without looking at checkpoints) from the range.

        Returns:
            False if a window could not be filled any more; nothing has changed.
        """
        self.require_idle()
        lo, hi = clamp_range(p0, p1)
        seq_id = -1 if means_all(seq_id) else self.table.checked(seq_id)
        seqs = range(self.table.n_seq_max) if seq_id == -1 else [seq_id]
        if hi <= lo:
            return True
        if all(self._can_lose(seq, lo, hi) for seq in seqs):
            self._remove(seq_id, lo, hi)
            return True
        if seq_id == -1 or hi <= self.seq_pos_max(seq_id):
            return False
        found = self._checkpoints.reaching(seq_id, lo, self._window)
        if found is None or not self._keeper.restore(seq_id, found, lo):
            return False
        self._checkpoints.cut(seq_id, lo)
        return True

    @atomic
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Share src's cells in the range, and checkpoints that lie in it, with dst.

        Raises:
            CacheError: dst would lack the window before its next token; nothing has changed.
        """
        self.require_idle()
        a, b = self.table.checked(src), self.table.checked(dst)
        lo, hi = clamp_range(p0, p1)
        if a != b and lo < hi:
            evicted = (
                self._eviction.evicted[b]
                .outside(lo, hi)
                .joined(self._eviction.evicted[a].inside(lo, hi))
            )
            mine, theirs = self.seq_positions(b), self.seq_positions(a)
            held = np.concatenate((mine[~within(mine, lo, hi)], theirs[within(theirs, lo, hi)]))
            self._require_whole("seq_cp", b, evicted, held)
            self._eviction.evicted[b] = evicted
            self._checkpoints.share(a, b, lo, hi)
        self.table.seq_cp(a, b, lo, hi)

    @atomic
    def seq_keep(self, seq_id: int) -> None:
        """Drop every other sequence."""
        super().seq_keep(seq_id)
        self._forget(*(seq for seq in range(self.table.n_seq_max) if seq != seq_id))

    @atomic
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions in the range, those of evicted tokens too; drop the checkpoints.

        Raises:
            CacheError: the sequence would lack the window before its next token.
            PositionError, ShiftUnsupported, CacheFull, NotSupported: as for an AttentionCache;
                copies of shared cells take free cells only.
        """
        (lo, hi), delta = clamp_range(p0, p1), clamp_delta(delta)
        evicted = self._moved("seq_add", seq_id, lo, hi, lambda at: at + delta)
        super().seq_add(seq_id, p0, p1, delta)
        self._take_over(seq_id, evicted)

    @atomic
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions in the range, those of evicted tokens too; as :meth:`seq_add`."""
        (lo, hi), d = clamp_range(p0, p1), clamp_divisor(d)
        evicted = self._moved("seq_div", seq_id, lo, hi, lambda at: at // d)
        super().seq_div(seq_id, p0, p1, d)
        self._take_over(seq_id, evicted)

    @atomic
    def clear(self, data: bool = True) -> None:
        """Empty the cache; ``data=False`` leaves the buffers as they are."""
        super().clear(data)
        self._forget(*range(self.table.n_seq_max))

    # -- beyond llama.cpp's

    @atomic
    def rewind(self, seq_id: int, p0: int) -> int:
        """Drop a sequence from p0 on; from an earlier position if its window is gone.

        Returns:
            Where to decode on: p0, or what follows the last position if that is lower; else the
            end of the last checkpoint before p0; else 0, the sequence being empty.
        """
        seq_id, (p0, _) = self.table.checked(seq_id), clamp_range(p0, -1)
        if self.seq_rm(seq_id, p0, -1):
            return min(p0, self.seq_pos_max(seq_id) + 1)
        found = self._checkpoints.before(seq_id, p0)
        if found is not None and self._keeper.restore(seq_id, found, found.end):
            self._checkpoints.cut(seq_id, found.end)
            return found.end
        self._remove(seq_id, 0, MAX_POSITION)
        return 0

    @atomic
    def checkpoint(self, seq_id: int) -> bool:
        """Keep a copy of a sequence's window, to go back to where it ends now.

        Returns:
            False if there is nothing to keep, or no budget for it.
        """
        self.require_idle()
        seq = self.table.checked(seq_id)
        if len(self.table.pending_cells()):
            self.update()
        return self._keeper.make(seq)

    # -- decoding

    def check_rows(self, rows: Rows, coupled: Coupled) -> None:
        """Raise if a batch may not be decoded; whether it finds room is for :meth:`take` to say."""
        if coupled == "same":
            check_coupled(self.table, rows.owners)

    def _take(self, micros: Sequence[MicroBatch]) -> tuple[list[CellPart], None]:
        """Take cells for microbatches that were checked; what is pending is applied first.

        Raises:
            CacheFull: they do not all find room; nothing has changed.
        """
        self._eviction.require(micros)
        self._sync.update(self._remember)
        taken = SlidingPlacement(
            self._eviction, self._padding, micros, self._sync, self._keeper.committed
        )
        return [taken], None

    # -- steps

    def _resize(self, size: int) -> None:
        """Resize to ``size`` cells; evict first if not everything would fit."""
        if size < self.used:
            self._eviction.evict(self.used - size)
        super()._resize(size)

    def _can_lose(self, seq: int, lo: int, hi: int) -> bool:
        """Whether a sequence stays whole without the range, what is behind it moving up."""
        evicted, held = self._eviction.evicted[seq].positions, self.seq_positions(seq)
        shift = hi - lo if len(held) and hi <= int(held[-1]) else 0
        return is_whole(closed(evicted, lo, hi, shift), closed(held, lo, hi, shift), self._window)

    def _remove(self, seq_id: int, lo: int, hi: int) -> None:
        self.table.seq_rm(seq_id, lo, hi)
        for seq in range(self.table.n_seq_max) if seq_id == -1 else [seq_id]:
            self._eviction.evicted[seq] = self._eviction.evicted[seq].outside(lo, hi)
            self._checkpoints.cut(seq, lo)

    def _moved(self, verb: str, seq_id: int, lo: int, hi: int, move: Move) -> EvictedTokens | None:
        """The evicted tokens of a sequence, moved; None if nothing moves at all."""
        self.require_idle()
        seq = self.table.checked(seq_id)
        evicted, held = self._eviction.evicted[seq], self.seq_positions(seq).astype(np.int64)
        new = np.where(within(held, lo, hi), move(held), held)
        moved = evicted.moved(lo, hi, move)
        if moved is evicted and bool((new == held).all()):
            return None
        self._require_whole(verb, seq, moved, new[new >= 0])
        return moved

    def _take_over(self, seq_id: int, evicted: EvictedTokens | None) -> None:
        if evicted is not None:
            self._eviction.evicted[seq_id] = evicted
            self._checkpoints.cut(seq_id, 0)

    def _require_whole(self, verb: str, seq: int, evicted: EvictedTokens, held: Positions) -> None:
        if not is_whole(evicted.positions, held, self._window):
            end = int(held.max()) + 1 if len(held) else 0
            raise CacheError(
                f"{verb} would leave sequence {seq} to go on at {end} without the {self._window} "
                "positions before it, which slid out: decode those tokens again, or keep all"
            )

    def _forget(self, *seqs: int) -> None:
        for seq in seqs:
            self._eviction.evicted[seq] = EvictedTokens()
            self._checkpoints.cut(seq, 0)

    def _remember(self) -> Undo:
        cells, windows = super()._remember(), self._remember_windows()

        def undo() -> None:
            cells()
            windows()

        return undo

    def _remember_windows(self) -> Undo:
        evicted, checkpoints = list(self._eviction.evicted), self._checkpoints.save()

        def undo() -> None:
            self._eviction.evicted[:] = evicted
            self._checkpoints.load(checkpoints)

        return undo

    # -- exports and imports

    def _export_cells(
        self, seq_ids: Sequence[int], lo: int, hi: int, checkpoints: bool
    ) -> CellData:
        content = super()._export_cells(seq_ids, lo, hi, checkpoints)
        evicted = tuple(_pairs(self._eviction.evicted[seq].inside(lo, hi)) for seq in seq_ids)
        kept = self._port_checkpoints(seq_ids) if checkpoints else ()
        return replace(content, evicted=evicted, checkpoints=kept)

    def _import_cells(self, group: CellData, seq_ids: Sequence[int], shift: int) -> None:
        """Put cells into empty sequences, and remember what was evicted.

        Raises:
            SnapshotFileError: a sequence or a checkpoint lacks a part of its window.
        """
        fitting = trimmed(group, self._window)
        for number in range(len(seq_ids)):
            held = fitting.positions[fitting.cells_of(number)]
            if not is_whole(fitting.evicted[number][0], held, self._window):
                raise SnapshotFileError(f"a part of the window of sequence {number} is missing")
        self._fill(fitting, seq_ids, shift)
        for number, seq in enumerate(seq_ids):
            if len(fitting.cells_of(number)):
                at, tokens = fitting.evicted[number]
                self._eviction.evicted[seq] = EvictedTokens.of(at + np.int32(shift), tokens)
        if shift == 0:  # rows of checkpoints stand at their positions
            for one in fitting.checkpoints:
                self._port_in_checkpoint(one, [seq_ids[number] for number in one.owners])

    def _cells_for(self, n: int) -> Int64Array:
        """Cells for n tokens, those that left every window included."""
        return self._eviction.take(n, self._eviction.kept_rows())

    def _port_checkpoints(self, seq_ids: Sequence[int]) -> tuple[WindowData, ...]:
        owners: dict[int, list[int]] = {}
        known = {}
        for number, seq in enumerate(seq_ids):
            for one in self._checkpoints.of(seq):
                known[one.serial] = one
                owners.setdefault(one.serial, []).append(number)
        return tuple(
            WindowData(
                one.positions.copy(),
                one.tokens.copy(),
                self._by_layer([rows.copy() for rows in one.rows]),
                _pairs(one.evicted),
                tuple(owners[serial]),
            )
            for serial, one in sorted(known.items())
        )

    def _port_in_checkpoint(self, one: WindowData, seqs: Sequence[int]) -> None:
        if not is_whole(one.evicted[0], one.positions, self._window):
            raise SnapshotFileError(f"a part of the checkpoint at {one.positions[-1]} is missing")
        pieces = {"k": one.rows.k, "v": one.rows.v}
        # Copies: the content, or the file that it lies in, may change.
        rows = tuple(pieces[part][layer].copy() for layer, part in self._eviction.parts)
        evicted = EvictedTokens.of(*one.evicted)
        self._checkpoints.add(seqs[0], one.positions.copy(), one.tokens.copy(), rows, evicted)
        self._checkpoints.lend(seqs[0], seqs[1:], int(one.positions[-1]) + 1)

    def _by_layer(self, rows: Sequence[ByteArray]) -> RowBytes:
        by = dict(zip(self._eviction.parts, rows, strict=True))
        layers = range(len(self.store.spec.layers))
        none = np.empty((len(rows[0]), 0), np.uint8)
        return RowBytes(
            tuple(by[i, "k"] for i in layers), tuple(by.get((i, "v"), none) for i in layers)
        )


def _pairs(evicted: EvictedTokens) -> Int32Array:
    return np.stack((evicted.positions, evicted.tokens))
