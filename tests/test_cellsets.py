"""Sets of cells and of owners: spans against sets, and a bit a sequence in words of 64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cells import CellTable
from kvcellar.cellsets import (
    Cells,
    Span,
    ascending,
    cell_numbers,
    count_owners,
    owner_words,
    pack_owners,
    unpack_owners,
)

CELLS = st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True)
POSITIONS = np.arange(100, 131, dtype=np.int32)


def as_set(cells: Cells) -> set[int]:
    return set(cell_numbers(cells).tolist())


def is_ascending(cells: Cells) -> bool:
    return bool((np.diff(cell_numbers(cells)) > 0).all())


def as_cells_or_array(cells: list[int]) -> Cells:
    is_run = cells == list(range(cells[0], cells[0] + len(cells)))
    return slice(cells[0], cells[0] + len(cells)) if is_run else np.array(cells, np.int64)


@given(st.lists(CELLS, max_size=8))
def test_cells_that_come_are_candidates_and_no_others(parts: list[list[int]]) -> None:
    span, held = Span(), set[int]()
    for part in parts:
        new = [cell for cell in part if cell not in held]
        if new:
            span = span.added(as_cells_or_array(new), POSITIONS[new])
            held.update(new)
        assert as_set(span.candidates()) == held
        assert is_ascending(span.candidates())
        assert span.exact
        assert span == Span.measure(np.array(sorted(held), np.int64), POSITIONS)


@given(st.lists(st.tuples(st.booleans(), CELLS), max_size=12))
def test_a_cell_that_went_and_came_again_is_there_once(
    steps: list[tuple[bool, list[int]]],
) -> None:
    span, held = Span(), set[int]()
    for comes, part in steps:
        if comes:
            new = [cell for cell in part if cell not in held]
            if new:
                span = span.added(as_cells_or_array(new), POSITIONS[new])
            held.update(new)
        else:
            held.difference_update(part)
            span = span.stale()
        assert held <= as_set(span.candidates())
        assert is_ascending(span.candidates())
    mine = np.array(sorted(held), np.int64)
    span = span.narrowed(mine)
    assert span.exact
    assert as_set(span.candidates()) == held


def test_a_run_that_grows_at_either_end_stays_a_run() -> None:
    span = Span()
    for cells in (slice(4, 6), slice(6, 7), slice(2, 4)):
        span = span.added(cells, POSITIONS[cells])
    assert span.candidates() == slice(2, 7)


def test_cell_numbers_are_put_in_order_only_if_they_are_not() -> None:
    rising = np.array([1, 4, 9])
    assert ascending(rising) is rising
    assert ascending(np.array([4, 1, 4])).tolist() == [1, 4]


def place(table: CellTable, seq: int, cell: int, position: int) -> None:
    bits = pack_owners(np.array([0]), np.array([seq]), 1, len(table.owners))
    at, token = np.array([position], np.int32), np.array([cell], np.int32)
    table.place(np.array([cell]), at, bits, token)


def test_hundreds_of_tokens_in_turns_are_kept_apart() -> None:
    table = CellTable(600, 3)
    for i in range(600):
        place(table, i % 3, i, i // 3)
    table.check()
    assert table.cells_of(1).tolist() == list(range(1, 600, 3))
    table.seq_rm(1, 100, -1)
    for i in range(100, 200):
        place(table, 1, 3 * (299 - i) + 1, i)  # the freed cells, from the end
    table.check()
    assert table.seq_count(1) == 200
    assert table.tokens_of(1)[-1] == 301
    assert table.seq_pos_max(1) == 199


def test_a_saved_table_does_not_follow_what_is_remembered() -> None:
    table = CellTable(12, 2)
    for i in range(6):
        place(table, i % 2, i, i // 2)
    saved = table.save()
    for i in range(6, 12):
        place(table, i % 2, i, i // 2)
    table.seq_rm(0, 0, 2)
    table.load(saved)
    table.check()
    assert table.cells_of(0).tolist() == [0, 2, 4]


@pytest.mark.parametrize(("n_seq_max", "words"), [(1, 1), (64, 1), (65, 2), (300, 5)])
def test_enough_words_for_every_sequence(n_seq_max: int, words: int) -> None:
    assert owner_words(n_seq_max) == words


@given(st.lists(st.frozensets(st.integers(0, 199), max_size=6), min_size=1, max_size=20))
def test_packing_and_unpacking_are_inverse(owners: list[frozenset[int]]) -> None:
    pairs = [(row, seq) for row, group in enumerate(owners) for seq in sorted(group)]
    rows = np.array([row for row, _ in pairs], np.int64)
    seq_ids = np.array([seq for _, seq in pairs], np.int64)

    bits = pack_owners(rows, seq_ids, len(owners), owner_words(200))
    back_rows, back_ids = unpack_owners(bits)

    assert bits.shape == (4, len(owners))
    assert list(zip(back_rows.tolist(), back_ids.tolist(), strict=True)) == pairs
    assert count_owners(bits) == len(pairs)


def test_the_highest_bit_of_a_word_is_a_sequence_too() -> None:
    bits = pack_owners(np.array([0, 0]), np.array([63, 64]), 1, 2)

    assert bits[:, 0].tolist() == [1 << 63, 1]
    assert unpack_owners(bits)[1].tolist() == [63, 64]
