"""What it takes to move tokens of a cache of K and V: cells for copies of shared ones."""

from __future__ import annotations

from kvcellar.cache.attention import AttentionCache
from kvcellar.cellsets import Cells, cell_count, cells_where
from kvcellar.errors import CacheFull, NotSupported, ShiftUnsupported


def n_freed(cache: AttentionCache, cells: Cells) -> int:
    """How many cells dropping these would make free to be filled."""
    table = cache.table
    if table.reserved is not None:
        cells = cells_where(cells, ~table.reserved[cells])
    return cell_count(cells) - cell_count(table.shared(cells))


def n_copies(cache: AttentionCache, cells: Cells) -> int:
    """How many cells moving these would take: shared ones are copied."""
    return 0 if cache.on_shared == "move" else cell_count(cache.table.shared(cells))


def require_moving(cache: AttentionCache, cells: Cells, doomed: Cells | None = None) -> None:
    """Raise unless these cells can be moved once the doomed ones have been given up."""
    if not cache.can_shift:
        raise ShiftUnsupported(
            "positions would have to move, but the K rows of this cache cannot be rotated: "
            'remove(…, gap="keep") leaves them, or decode the tokens again'
        )
    needed = n_copies(cache, cells)
    if needed and not cache.store.can_copy:
        raise NotSupported("moving shared cells needs a store that can copy cells")
    free = cache.n_free() + (0 if doomed is None else n_freed(cache, doomed))
    if needed > free:
        raise CacheFull(needed, free, "cells shared with others have to be copied to move")
