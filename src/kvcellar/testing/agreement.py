"""Whether an attention cache and its naive oracle agree, in every cell and every byte."""

from __future__ import annotations

import numpy as np

from kvcellar.backends.base import Part
from kvcellar.cache.attention import AttentionCache
from kvcellar.testing.naive import NaiveCache, NaiveCell
from kvcellar.testing.signs import check_rows

N_SEQ = 4
PARTS: tuple[Part, ...] = ("k", "v")


def snapshot(cache: AttentionCache, *, only_used: bool = False) -> tuple[object, ...]:
    """All that a failed operation must leave as it was, rows of free cells too if wanted."""
    table, store = cache.table, cache.store
    cells = np.flatnonzero(table.positions >= 0) if only_used else np.arange(table.size)
    layers = range(len(store.spec.layers))
    rows = [store.read_raw(i, part, cells).tobytes() for i in layers for part in PARTS]
    saved = table.save()
    arrays = [array.tobytes() for array in saved.arrays]
    return (table.size, *rows, *arrays, saved.head, saved.used, saved.token_count)


def check_agreement(cache: AttentionCache, naive: NaiveCache) -> None:
    """Raise AssertionError where cache and oracle differ, InvariantError if the cache is broken.

    Rows that the oracle knows must be the same bit for bit (invariant 7); rows that were written
    or rotated since must be the right ones (invariant 6), and are known from then on.
    """
    cache.check()
    _check_cells(cache, naive)
    _check_sequences(cache, naive)
    _check_bytes(cache, naive)
    view = cache.view(2)
    assert view.sequences == tuple(tuple(sorted(c.owners)[:2]) for c in naive.cells)
    runs = "".join("#" if cell.owners else "." for cell in naive.cells).split("#")
    assert view.max_contiguous == max(map(len, runs))


def _check_cells(cache: AttentionCache, naive: NaiveCache) -> None:
    table = cache.table
    assert cache.spec.size == cache.store.spec.size == table.size == len(naive.cells)
    for i, cell in enumerate(naive.cells):
        state = (table.positions[i], table.pending[i], table.tokens[i], {*table.owners_of(i)})
        assert state == (cell.pos, cell.pending, cell.token, cell.owners), f"cell {i}"
    assert table.head == naive.head
    assert (table.used, table.token_count) == (naive.used, naive.token_count)
    assert (table.cell_max(), table.n_free()) == (naive.cell_max, naive.n_free)


def _check_sequences(cache: AttentionCache, naive: NaiveCache) -> None:
    table = cache.table
    for seq in range(N_SEQ):
        positions = naive.positions(seq)
        assert table.positions[table.cells_of(seq)].tolist() == positions
        assert table.seq_count(seq) == len(positions)
        assert cache.seq_pos_min(seq) == naive.pos_min(seq)
        assert cache.seq_pos_max(seq) == naive.pos_max(seq)


def _check_bytes(cache: AttentionCache, naive: NaiveCache) -> None:
    used = [i for i, cell in enumerate(naive.cells) if cell.owners]
    cells, layers = np.array(used, np.int64), range(len(cache.store.spec.layers))
    k, v = ([cache.store.read_raw(i, part, cells) for i in layers] for part in PARTS)
    unknown: list[tuple[int, NaiveCell]] = []
    for n, i in enumerate(used):
        cell = naive.cells[i]
        k_rows = tuple(rows[n].tobytes() for rows in k)
        v_rows = tuple(rows[n].tobytes() for rows in v)
        if cell.k_rows is None:
            unknown.append((i, cell))
        assert cell.k_rows in (None, k_rows), f"K of cell {i} has changed"
        assert cell.v_rows in (None, v_rows), f"V of cell {i} has changed"
        cell.k_rows, cell.v_rows = k_rows, v_rows
    facts = [(i, cell.content, cell.rotation, cell.turns) for i, cell in unknown]
    check_rows(cache.store, *np.array(facts, np.int64).reshape(-1, 4).T)
