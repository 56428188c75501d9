"""The attention cache: one cell a token, over a table of cells and a store of K and V rows.

The table says who owns which cell, the store holds the bytes, and this class keeps the two
together: what a verb does to positions is applied to K rows by ``update``, which ``place`` calls.

* Invariant 5: a failed operation changes nothing. Whatever can fail is tried before anything is
  changed; an open placement undoes itself.
* Invariant 6: the K row of a cell is the key rotated to ``position - pending``; after ``update``,
  to ``position``. V is never touched by a shift.
* Invariant 9: rows of freed cells are zeroed before attention looks at them again.
"""

from __future__ import annotations

import operator

import numpy as np

from kvcellar._cellsets import cell_count, cell_numbers, cells_where
from kvcellar.backends.base import KVStore
from kvcellar.batch import Batch
from kvcellar.cache.base import Coupled, OnShared
from kvcellar.cache.compaction import plan_moves
from kvcellar.cache.placement import Placement, check_coupled, find_cells, micro_batch
from kvcellar.cache.view import CacheView
from kvcellar.cells import Cells, CellTable, check_moved
from kvcellar.errors import CacheError, CacheFull, NotSupported, OptionError, ShiftUnsupported
from kvcellar.plan import split_simple
from kvcellar.types import CacheSpec


class AttentionCache:
    """Every verb of llama.cpp's cache; see :class:`kvcellar.cache.base.Cache`.

    Args:
        spec: the shape; ``spec.size`` cells for ``spec.n_seq_max`` sequences.
        store: the K and V rows of as many cells.
        on_shared: what ``seq_add`` and ``seq_div`` do with a cell that others own too.
    """

    def __init__(self, spec: CacheSpec, store: KVStore, on_shared: OnShared = "copy") -> None:
        if on_shared not in ("copy", "move"):
            raise OptionError(f"on_shared={on_shared!r}: one of 'copy', 'move'")
        self.spec = spec
        self.store = store
        self.on_shared = on_shared
        self.table = CellTable(spec.size, spec.n_seq_max)
        self._has_rope = any(layer.rope is not None for layer in spec.layers)
        self._defrag: int | None = None  # runs that may be moved, once compaction is asked for
        self._open: Placement | None = None
        self._written = np.zeros(spec.size, np.bool_)  # cells whose rows may not be zero

    # -- questions

    @property
    def can_shift(self) -> bool:
        """Whether positions can be moved."""
        return self.store.can_shift or not self._has_rope

    @property
    def used(self) -> int:
        """How many cells have an owner."""
        return self.table.used

    @property
    def token_count(self) -> int:
        """The sum of owners over cells: a shared cell counts once for each."""
        return self.table.token_count

    @property
    def head(self) -> int:
        """Where the next search for free cells starts."""
        return self.table.head

    def cell_max(self) -> int:
        """The index behind the last used cell."""
        return self.table.cell_max()

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position of a sequence, -1 when it is empty."""
        return self.table.seq_pos_min(seq_id)

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position of a sequence, -1 when it is empty."""
        return self.table.seq_pos_max(seq_id)

    def view(self, n_seq_max: int | None = None) -> CacheView:
        """The state of all cells as a value, with at most n_seq_max owners shown a cell."""
        return CacheView.of(self.table, n_seq_max)

    def check(self) -> None:
        """Prove invariants 1 to 4; see :mod:`kvcellar.cells`."""
        self.table.check()

    # -- llama.cpp's verbs

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Drop a sequence (-1: every one) from the range; always True here."""
        self._require_idle()
        return self.table.seq_rm(seq_id, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let dst share src's cells in the range, in place of what dst had there."""
        self._require_idle()
        self.table.seq_cp(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """Drop every other sequence."""
        self._require_idle()
        self.table.seq_keep(seq_id)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions in the range by delta; cells driven below 0 are freed.

        Raises:
            PositionError: a position would pass the largest one.
            ShiftUnsupported: K rows would have to be rotated and the store cannot.
            CacheFull, NotSupported: shared cells cannot be copied.
        """
        self._require_idle()
        cells, delta = self.table.select(seq_id, p0, p1), operator.index(delta)
        if cell_count(cells) and delta:
            at = self.table.positions[cells]
            check_moved(at, delta)
            stays = at >= -delta
            self._require_shift("seq_add", bool(stays.any()))
            if self.on_shared == "copy":
                below = self.table.shared(cells_where(cells, ~stays))
                self._copy_shared(seq_id, cells_where(cells, stays))
                self.table.disown(seq_id, below)
        self.table.seq_add(seq_id, p0, p1, delta)

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions in the range by d, truncating; raises as :meth:`seq_add` does."""
        self._require_idle()
        if d < 1:
            raise OptionError(f"seq_div by {d}: the divisor must be at least 1")
        cells = self.table.select(seq_id, p0, p1)
        if cell_count(cells) and d > 1:
            moving = cells_where(cells, self.table.positions[cells] > 0)
            self._require_shift("seq_div", cell_count(moving) > 0)
            if self.on_shared == "copy":
                self._copy_shared(seq_id, moving)
        self.table.seq_div(seq_id, p0, p1, d)

    def clear(self, data: bool = True) -> None:
        """Empty the cache; ``data=False`` leaves the buffers as they are."""
        self._require_idle()
        if data:
            self.store.zero()
            self._written.fill(False)
        self.table.clear()
        self._defrag = None

    def defrag(self, max_moves: int | None = None) -> None:
        """Ask for compaction at the next update, of at most ``max_moves`` runs of cells."""
        self._require_idle()
        self._require_copy("defrag")
        if max_moves is not None and max_moves < 1:
            raise OptionError(f"max_moves is {max_moves}: it must be at least 1")
        self._defrag = self.spec.size if max_moves is None else max_moves

    def update(self) -> None:
        """Apply what is pending: first rotate K rows, then compact."""
        self._require_idle()
        cells = self.table.pending_cells()
        if len(cells):
            if self._has_rope:
                self.store.rotate(cells, self.table.pending[cells])
            self.table.settle()
        if self._defrag is not None:
            self._compact(self._defrag)
            self._defrag = None

    # -- decoding

    def place(
        self,
        batch: Batch,
        n_ubatch: int,
        *,
        n_vocab: int | None = None,
        n_embd: int | None = None,
        coupled: Coupled = "same",
    ) -> Placement:
        """Take cells for every microbatch of a batch, or raise and take none.

        Args:
            batch: what is to be decoded.
            n_ubatch: how many tokens are computed at once.
            n_vocab: token ids must be below it.
            n_embd: input embeddings must have so many values.
            coupled: "same" refuses a token whose owners do not hold the same cells.

        Raises:
            BatchError, SequenceIdError, PositionError: the batch does not fit what is held.
            CacheFull: fewer cells are free than the batch has tokens.
        """
        self._require_idle()
        table = self.table
        batch.check_model(n_vocab, n_embd)
        rows = batch.resolve(table.n_seq_max, table.seq_pos_max)
        parts = split_simple(len(rows), n_ubatch)
        if coupled == "same":
            check_coupled(table.owners[:, : table.cell_max()], rows.owners)
        if (free := table.size - table.used) < len(rows):
            raise CacheFull(len(rows), free)
        self.update()
        micros = [micro_batch(rows, part) for part in parts]
        self._open = Placement(table, self.spec.padding, micros, self.store.wipe)
        self._wipe_freed()
        return self._open

    # -- steps

    def _require_idle(self) -> None:
        if self._open is not None and self._open.is_open:
            raise CacheError("a batch is being decoded: commit or release its placement first")
        self._open = None

    def _wipe_freed(self) -> None:
        """Zero what freed cells still hold: a mask adds -inf, which hides no NaN (invariant 9).

        Cells that were filled again at once are left alone, so taking back a draft costs nothing.
        """
        top = self.table.n_kv(self.spec.padding)
        is_free = self.table.positions[:top] < 0
        stale = np.flatnonzero(self._written[:top] & is_free)
        if len(stale):
            self.store.wipe(stale)
        np.logical_not(is_free, out=self._written[:top])

    def _require_shift(self, verb: str, needed: bool) -> None:
        if needed and not self.can_shift:
            raise ShiftUnsupported(
                f"{verb} would move positions, but the K rows of this cache cannot be rotated: "
                "remove the cells and decode their tokens again"
            )

    def _require_copy(self, verb: str) -> None:
        if not self.store.can_copy:
            raise NotSupported(f"{verb} needs a store that can copy cells; this one cannot")

    def _copy_shared(self, seq_id: int, cells: Cells) -> None:
        src = cell_numbers(self.table.shared(cells))
        if len(src):
            self._require_copy("moving the positions of shared cells")
            dst = find_cells(self.table, len(src))
            self.store.copy(src, dst)
            self.table.split(seq_id, src, dst)
            self._written[dst] = True

    def _compact(self, max_moves: int) -> None:
        table = self.table
        moves = plan_moves(table.positions[: table.cell_max()] >= 0, max_moves)
        if moves.n_runs:
            self.store.copy(moves.src, moves.dst)
            table.move(moves.src, moves.dst)
            self._written[moves.dst] = True
            table.head = table.used
