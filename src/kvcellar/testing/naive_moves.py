"""Compaction as plainly as it can be written: the oracle of ``kvcellar.cache.rows``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def naive_moves(
    occupied: Sequence[bool], max_moves: int, fixed: Iterable[int] = ()
) -> list[tuple[int, int]]:
    """The moves that compact these cells, one hole and one cell at a time, by source.

    Fixed cells, used or not, are neither holes nor moved.
    """
    stuck = set(fixed)
    movable = {i for i, used in enumerate(occupied) if used and i not in stuck}
    held = movable | stuck
    n_held = len(held)
    moves: list[tuple[int, int]] = []
    n_runs, i = 0, 0
    while i < n_held:
        if i in held:
            i += 1
            continue
        hole = 1
        while i + hole < n_held and i + hole not in held:
            hole += 1
        sources = sorted(j for j in movable if j >= n_held)[-hole:]
        for k, src in enumerate(sources):
            if k == 0 or src != sources[k - 1] + 1:
                if n_runs == max_moves:
                    return sorted(moves)
                n_runs += 1
            moves.append((src, i + k))
        movable -= set(sources)
        i += hole
    return sorted(moves)
