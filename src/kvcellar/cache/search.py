"""Which free cells tokens go into.

Cells are searched from ``head`` on: first n free neighbours, wrapping once past the end (a run
itself never wraps), else n free cells in order. The search changes nothing.
"""

from __future__ import annotations

import numpy as np

from kvcellar.cells import CellTable
from kvcellar.errors import CacheFull
from kvcellar.types import Int64Array

_CHUNK = 2048


def find_cells(table: CellTable, n: int) -> Int64Array:
    """Free cells for n tokens, in the order in which the tokens take them.

    Raises:
        CacheFull: fewer than n cells are free.
    """
    require_free(table, n)
    # Far behind everything that is used: better to look at the start again.
    head = 0 if table.head > table.used + 2 * n else table.head
    stop = table.size - n + 1
    for lo, hi in ((head, stop), (0, min(head, stop))):
        start = _find_run(table, lo, hi, n)
        if start is not None:
            return np.arange(start, start + n)
    ahead = np.flatnonzero(~table.taken(head, table.size))[:n] + head
    behind = np.flatnonzero(~table.taken(0, head))[: n - len(ahead)]
    return np.concatenate((ahead, behind))


def require_free(table: CellTable, n: int) -> None:
    """Raise CacheFull, saying why, unless n cells may be filled."""
    if (free := table.n_free()) < n:
        kept = table.size - table.used - free
        hint = f"{kept} more are kept until the transaction ends" if kept else ""
        raise CacheFull(n, free, hint)


def _find_run(table: CellTable, lo: int, hi: int, n: int) -> int | None:
    """The first start in ``[lo, hi)`` of n free neighbours."""
    top, chunk = table.cell_max() if table.reserved is None else table.size, _CHUNK
    run = at = lo  # cells run .. at are known to be free
    while run < hi:
        if at - run >= n or at >= top:
            return run
        end = min(at + chunk, top)
        busy = table.taken(at, end)
        if n == 1:
            first = int(busy.argmin())
            run = end if busy[first] else at + first
        else:
            edges = np.flatnonzero(busy) + at
            starts = np.concatenate(([run], edges + 1))
            wide = np.flatnonzero(edges - starts[:-1] >= n)
            run = int(starts[wide[0] if len(wide) else -1])
        at, chunk = end, chunk * 4
    return None
