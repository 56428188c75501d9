"""Where the tokens of a batch go when cells that slid out are used again.

A microbatch may fill cells that the one before it wrote, and still reads. So that all fit is tried
out first, and each gets its cells when its plan is asked for, before it is computed: its mask shows
the table as of then. Rows of cells that were held when the batch began are kept before they are
given up, and a release writes them back (invariant 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvcellar.batch import MicroBatch
from kvcellar.cache.placement import cell_plan
from kvcellar.cache.room import Room
from kvcellar.cache.upkeep import Upkeep
from kvcellar.plan import CellPlan
from kvcellar.types import CacheSpec, Float16Array, Int64Array


class SlidingPlacement:
    """The cells of one batch, taken a microbatch at a time; a part of a placement.

    Args:
        room: where cells come from; it has been asked whether all fit.
        spec: the shape.
        micros: what is placed.
        upkeep: what happens to rows.
        committed: called after the batch has been committed.
    """

    def __init__(
        self,
        room: Room,
        spec: CacheSpec,
        micros: Sequence[MicroBatch],
        upkeep: Upkeep,
        committed: Callable[[Sequence[MicroBatch]], None],
    ) -> None:
        self.is_open = True
        self._room = room
        self._table = room.table
        self._spec = spec
        self._micros = tuple(micros)
        self._upkeep = upkeep
        self._committed = committed
        self._saved = room.save()
        self._kept = room.kept_rows()
        self._cells: list[Int64Array] = []
        self._place_up_to(0)

    @property
    def cells(self) -> Int64Array:
        """The cells of the batch's tokens, microbatch after microbatch."""
        rest = self._micros[len(self._cells) :] if self.is_open else ()
        return np.concatenate((*self._cells, *(self._room.rehearse(rest) if rest else ())))

    def plan(self, i: int, mask_buffer: Float16Array | None, as_lists: bool) -> CellPlan:
        """What microbatch i reads and writes; asked for in order, before it is computed."""
        self._place_up_to(i)
        micro, top = self._micros[i], self._table.cell_max()
        cells = self._cells[i]
        return cell_plan(self._table, self._spec, micro, cells, top, mask_buffer, as_lists)

    def commit(self) -> None:
        """Keep the cells: everything has been computed."""
        self._place_up_to(len(self._micros) - 1)
        self.is_open = False
        self._committed(self._micros)

    def release(self) -> None:
        """Let everything be as it was before, rows included; a second time does nothing."""
        if self.is_open:
            self.is_open = False
            self._room.load(self._saved)
            # A failed computation may have left NaN, which a mask cannot hide (invariant 9).
            self._upkeep.zero_freed()
            self._kept.write_back()
            self._upkeep.mark_held()

    def _place_up_to(self, last: int) -> None:
        try:
            for micro in self._micros[len(self._cells) : last + 1]:
                cells = self._room.take(micro.n_tokens, self._kept)
                self._room.put(micro, cells)
                self._cells.append(cells)
                self._upkeep.wipe_freed(self._spec.padding)
        except BaseException:
            self.release()
            raise
