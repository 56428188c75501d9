"""Which cells to move so that the used ones are neighbours again.

Each hole among the first ``used`` cells is filled, from the left, with exactly as many used cells
as it has room for, taken from the end of the cache; the cells of a hole keep their order. A run of
neighbours counts as one move. Cells only move to the left, and none is both source and target.

Fixed cells, which a transaction keeps, are neither holes nor moved: the others close up around
them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvcellar.errors import OptionError
from kvcellar.types import BoolArray, Int64Array

_WORTHWHILE = 128  # cells below which compaction never pays


class Moves(NamedTuple):
    """Cell ``src[i]`` goes to ``dst[i]``, src ascending; ``n_runs`` runs of neighbours move."""

    src: Int64Array
    dst: Int64Array
    n_runs: int


def plan_moves(
    occupied: BoolArray, max_moves: int | None = None, fixed: BoolArray | None = None
) -> Moves:
    """The moves that compact a cache, or the first ``max_moves`` of them.

    Args:
        occupied: whether each cell is used.
        max_moves: how many runs may be moved at most; None moves all.
        fixed: whether each cell, used or not, has to be left as it is; None: no cell.
    """
    if max_moves is not None and max_moves < 1:
        raise OptionError(f"max_moves is {max_moves}: it must be at least 1")
    held = occupied if fixed is None else occupied | fixed
    used = int(np.count_nonzero(held))
    movable = occupied if fixed is None else occupied & ~fixed
    tail = np.flatnonzero(movable[used:]) + used
    n = len(tail)
    dst = np.flatnonzero(~held[:used])[:n]
    if n == 0:
        return Moves(dst, tail, 0)
    starts = np.flatnonzero(np.diff(dst, prepend=-2) != 1)  # where each hole begins in dst
    sizes = np.diff(np.append(starts, n))
    # Hole k holds dst[starts[k] : starts[k] + sizes[k]] and takes as many cells from the end of
    # what earlier holes have left of the tail.
    first = np.repeat(n - starts - sizes, sizes)
    src = tail[first + np.arange(n) - np.repeat(starts, sizes)]
    is_start = np.diff(src, prepend=-2) != 1
    is_start[starts] = True
    run = np.cumsum(is_start)
    kept = n if max_moves is None else int(np.searchsorted(run, max_moves, side="right"))
    order = np.argsort(src[:kept])
    return Moves(src[order], dst[order], int(run[kept - 1]))


def fragmentation(cell_max: int, used: int) -> float:
    """The share of holes below ``cell_max``, from 0 to 1; small caches count as compact."""
    return 1.0 - used / cell_max if cell_max >= _WORTHWHILE else 0.0


def check_threshold(defrag_threshold: float | None) -> None:
    """Raise OptionError if compaction cannot be wanted from that share of holes on."""
    if defrag_threshold is not None and not 0.0 <= defrag_threshold < 1.0:
        raise OptionError(f"defrag_threshold is {defrag_threshold}: it must be in [0, 1)")
