"""The table as a whole: saved, restored, resized, and cells that are reserved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cells import CellTable
from kvcellar.cellsets import pack_owners
from kvcellar.errors import InvariantError
from kvcellar.types import Int64Array


def put(table: CellTable, seq: int, cells: list[int], positions: list[int]) -> None:
    """Place tokens of one sequence."""
    n = len(cells)
    owners = pack_owners(np.arange(n), np.full(n, seq), n, len(table.owners))
    at = np.array(positions, np.int32)
    table.place(np.array(cells, np.int64), at, owners, at + np.int32(100))


def state(table: CellTable) -> tuple[object, ...]:
    """All there is to see."""
    table.check()
    arrays = (table.positions, table.pending, table.tokens, table.owners)
    ids = range(table.n_seq_max)
    facts = [(table.seq_count(s), table.seq_pos_min(s), table.seq_pos_max(s)) for s in ids]
    cells = [table.cells_of(s).tolist() for s in ids]
    counts = (table.size, table.head, table.used, table.token_count, table.cell_max())
    return (*(a.tolist() for a in arrays), facts, cells, counts)


def change(table: CellTable, rng: np.random.Generator) -> None:
    """One random change."""
    seq, other = (int(x) for x in rng.integers(0, 3, 2))
    p0, p1 = (int(x) for x in rng.integers(-1, 9, 2))
    kind = int(rng.integers(8))
    if kind <= 1 and (free := np.flatnonzero(table.positions < 0)).size:
        cells = rng.permutation(free)[: int(rng.integers(1, 4))]
        start = table.seq_pos_max(seq) + 1
        put(table, seq, cells.tolist(), [*range(start, start + len(cells))])
    elif kind == 2:
        table.seq_rm(seq if rng.random() < 0.8 else -1, p0, p1)
    elif kind == 3:
        table.seq_cp(seq, other, p0, p1)
    elif kind == 4:
        table.seq_add(seq, p0, p1, int(rng.integers(-3, 4)))
    elif kind == 5:
        table.seq_div(seq, p0, p1, 2)
    elif kind == 6:
        table.settle()
    elif rng.random() < 0.2:
        table.seq_keep(seq) if rng.random() < 0.5 else table.clear()


@given(st.integers(0, 2**32), st.integers(0, 20), st.integers(0, 20))
def test_loading_gives_back_what_was_saved(seed: int, n_before: int, n_after: int) -> None:
    rng = np.random.default_rng(seed)
    table = CellTable(9, 3)
    for _ in range(n_before):
        change(table, rng)
    before, saved = state(table), table.save()
    for _ in range(n_after):
        change(table, rng)
        table.check()

    for _ in range(2):  # what was saved can be used again
        table.load(saved)
        assert state(table) == before
        for _ in range(n_after):
            change(table, rng)
            table.check()


@given(st.integers(0, 2**32), st.integers(0, 25), st.integers(1, 20))
def test_resizing_keeps_every_cell(seed: int, n_steps: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    table = CellTable(9, 3)
    for _ in range(n_steps):
        change(table, rng)
    before = [(s, table.positions[table.cells_of(s)].tolist()) for s in range(3)]
    if table.cell_max() > size:
        with pytest.raises(InvariantError, match="is used and cannot go"):
            table.resize(size)
        assert table.size == 9
        return
    table.resize(size)
    table.check()
    assert [(s, table.positions[table.cells_of(s)].tolist()) for s in range(3)] == before
    assert len(table.positions) == table.owners.shape[1] == table.size == size
    for _ in range(10):
        change(table, rng)
        table.check()


class TestReserved:
    def reserved(self, cells: list[int]) -> CellTable:
        table = CellTable(6, 2)
        put(table, 0, [0, 1], [0, 1])
        table.reserved = np.zeros(6, np.bool_)
        table.reserved[cells] = True
        return table

    def test_they_do_not_count_as_free(self) -> None:
        table = self.reserved([0, 3, 4])
        assert table.n_free() == 2
        assert table.taken(0, 6).tolist() == [True, True, False, True, True, False]
        table.seq_rm(0)
        assert table.n_free() == 3
        table.check()

    @pytest.mark.parametrize("cells", [[3], [2, 3], [5, 4]])
    def test_they_cannot_be_filled(self, cells: list[int]) -> None:
        table = self.reserved([3, 4])
        numbers: Int64Array = np.array(cells)
        with pytest.raises(InvariantError, match="not all are free"):
            put(table, 1, numbers.tolist(), [*range(len(cells))])
        table.check()
        assert table.used == 2

    def test_a_mask_of_another_size_is_damage(self) -> None:
        table = self.reserved([])
        table.reserved = np.zeros(5, np.bool_)
        with pytest.raises(InvariantError, match="an array is too short"):
            table.check()
