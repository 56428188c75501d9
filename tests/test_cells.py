"""The cell table: each verb, the head rules, refusals that change nothing, saving and resizing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cells import CellTable, padded_n_kv
from kvcellar.cellsets import pack_owners
from kvcellar.errors import InvariantError, OptionError, PositionError, SequenceIdError
from kvcellar.types import MAX_POSITION, Int64Array

Owner = int | tuple[int, ...]


def put(
    table: CellTable, owner: Owner, positions: list[int], cells: list[int], token: int = 0
) -> None:
    """Place tokens of one sequence, or of several that share them, in given cells."""
    seq_ids = np.atleast_1d(np.array(owner, np.int64))
    n = len(cells)
    rows = np.repeat(np.arange(n), len(seq_ids))
    bits = pack_owners(rows, np.tile(seq_ids, n), n, len(table.owners))
    tokens = np.arange(token, token + n, dtype=np.int32)
    table.place(np.array(cells, np.int64), np.array(positions, np.int32), bits, tokens)


def layout(table: CellTable) -> str:
    """The owner of each cell: a digit, ``+`` for several, a dot for a free cell."""
    owners = [table.owners_of(cell) for cell in range(table.size)]
    return "".join("." if not o else str(o[0]) if len(o) == 1 else "+" for o in owners)


def two_sequences() -> CellTable:
    """Sequence 0 at 0..3 in cells 0..3, sequence 1 at 0..2 in cells 4..6; one cell is free."""
    table = CellTable(8, 4)
    put(table, 0, [0, 1, 2, 3], [0, 1, 2, 3], token=10)
    put(table, 1, [0, 1, 2], [4, 5, 6], token=20)
    table.head = 7
    return table


def snapshot(table: CellTable) -> tuple[object, ...]:
    arrays = (table.positions, table.pending, table.tokens, table.owners)
    return (*(a.tolist() for a in arrays), table.head, table.used, table.token_count)


class TestConstruction:
    def test_a_new_table_is_empty(self) -> None:
        table = CellTable(4, 2)

        table.check()
        assert (table.used, table.token_count, table.head, table.cell_max()) == (0, 0, 0, 0)
        assert table.seq_pos_min(1) == table.seq_pos_max(1) == -1
        assert layout(table) == "...."

    @pytest.mark.parametrize(("size", "n_seq_max"), [(0, 1), (-3, 1), (4, 0)])
    def test_sizes_below_one_are_refused(self, size: int, n_seq_max: int) -> None:
        with pytest.raises(OptionError, match="must be in"):
            CellTable(size, n_seq_max)


class TestPlace:
    def test_tokens_are_counted_and_found_again(self) -> None:
        table = two_sequences()

        table.check()
        assert layout(table) == "0000111."
        assert (table.used, table.token_count, table.cell_max()) == (7, 7, 7)
        assert table.seq_count(0) == 4
        assert table.tokens_of(1).tolist() == [20, 21, 22]

    def test_cells_need_not_be_neighbours_nor_in_order(self) -> None:
        table = CellTable(8, 2)

        put(table, 1, [5, 6, 9], [6, 2, 4])

        table.check()
        assert table.cells_of(1).tolist() == [6, 2, 4]
        assert (table.seq_pos_min(1), table.seq_pos_max(1)) == (5, 9)

    def test_a_token_may_have_several_owners(self) -> None:
        table = CellTable(4, 200)

        put(table, (3, 150), [0, 1], [0, 1])

        table.check()
        assert (table.used, table.token_count) == (2, 4)
        assert table.owners_of(1) == (3, 150)
        assert table.shared(slice(0, 4)) == slice(0, 2)

    def test_a_used_cell_is_not_overwritten(self) -> None:
        table = two_sequences()

        with pytest.raises(InvariantError, match="not all are free"):
            put(table, 0, [4], [6])

    def test_tokens_may_be_unknown(self) -> None:
        table = CellTable(2, 1)
        bits = pack_owners(np.array([0]), np.array([0]), 1, 1)

        table.place(np.array([1]), np.array([0], np.int32), bits, None)

        table.check()
        assert table.tokens_of(0).tolist() == [-1]


class TestRemove:
    def test_a_range_is_half_open(self) -> None:
        table = two_sequences()

        assert table.seq_rm(0, 1, 3) is True

        table.check()
        assert layout(table) == "0..0111."
        assert table.cells_of(0).tolist() == [0, 3]
        assert table.head == 1

    @pytest.mark.parametrize(
        ("p0", "p1", "left"), [(-1, 2, [2, 3]), (2, -1, [0, 1]), (-1, -1, []), (-7, -7, [])]
    )
    def test_negative_bounds_are_open(self, p0: int, p1: int, left: list[int]) -> None:
        table = two_sequences()

        table.seq_rm(0, p0, p1)

        table.check()
        assert table.positions[table.cells_of(0)].tolist() == left

    @pytest.mark.parametrize(("p0", "p1"), [(2, 2), (3, 1), (MAX_POSITION, -1), (2**40, 2**41)])
    def test_an_empty_range_changes_nothing(self, p0: int, p1: int) -> None:
        table = two_sequences()
        before = snapshot(table)

        assert table.seq_rm(0, p0, p1) is True
        assert snapshot(table) == before

    def test_a_shared_cell_stays_with_the_other_owner(self) -> None:
        table = two_sequences()
        table.seq_cp(0, 2)
        table.head = 7

        table.seq_rm(0)

        table.check()
        assert layout(table) == "2222111."
        assert table.head == 7

    def test_minus_one_drops_every_owner(self) -> None:
        table = two_sequences()
        table.seq_cp(0, 2)

        table.seq_rm(-1, 1, -1)

        table.check()
        assert layout(table) == "+...1..."
        assert table.token_count == 3

    def test_head_only_moves_down(self) -> None:
        table = two_sequences()
        table.head = 2

        table.seq_rm(1)

        assert table.head == 2


class TestCopy:
    def test_cells_are_shared_not_copied(self) -> None:
        table = two_sequences()

        table.seq_cp(0, 2, 1, 3)

        table.check()
        assert layout(table) == "0++0111."
        assert (table.used, table.token_count, table.head) == (7, 9, 0)
        assert table.cells_of(2).tolist() == [1, 2]

    def test_what_the_target_had_in_the_range_is_released_first(self) -> None:
        table = two_sequences()

        table.seq_cp(0, 1, 1, -1)

        table.check()
        assert layout(table) == "0+++1..."
        assert table.positions[table.cells_of(1)].tolist() == [0, 1, 2, 3]

    def test_what_is_shared_already_stays_shared(self) -> None:
        table = two_sequences()
        table.seq_cp(0, 2)
        before = snapshot(table)

        table.seq_cp(0, 2)

        table.check()
        assert snapshot(table) == before

    def test_onto_itself_only_head_moves(self) -> None:
        table = two_sequences()
        before = snapshot(table)

        table.seq_cp(1, 1)

        assert table.head == 0
        table.head = 7
        assert snapshot(table) == before


class TestKeep:
    def test_others_are_freed_and_sharing_ends(self) -> None:
        table = two_sequences()
        table.seq_cp(1, 2)

        table.seq_keep(1)

        table.check()
        assert layout(table) == "....111."
        assert table.token_count == 3
        assert table.tokens_of(1).tolist() == [20, 21, 22]

    def test_head_goes_to_the_first_cell_that_is_not_its_own(self) -> None:
        table = two_sequences()
        table.seq_keep(0)
        assert table.head == 4

        table = two_sequences()
        table.seq_keep(1)
        assert table.head == 0

    def test_an_empty_sequence_empties_the_cache(self) -> None:
        table = two_sequences()

        table.seq_keep(3)

        table.check()
        assert (layout(table), table.head, table.used) == ("........", 0, 0)

    def test_pending_shifts_are_kept(self) -> None:
        table = two_sequences()
        table.seq_add(1, 0, -1, 5)

        table.seq_keep(1)

        table.check()
        assert table.pending_cells().tolist() == [4, 5, 6]


class TestAdd:
    def test_positions_and_pending_shift_move_together(self) -> None:
        table = two_sequences()

        table.seq_add(0, 2, -1, 5)

        table.check()
        assert table.positions[:4].tolist() == [0, 1, 7, 8]
        assert table.pending[:4].tolist() == [0, 0, 5, 5]
        assert (table.seq_pos_max(0), table.head) == (8, 0)

    def test_cells_driven_below_zero_are_freed(self) -> None:
        table = two_sequences()

        table.seq_add(0, -1, -1, -2)

        table.check()
        assert layout(table) == "..00111."
        assert table.positions[2:4].tolist() == [0, 1]
        assert table.head == 0

    def test_head_is_the_first_freed_cell(self) -> None:
        table = two_sequences()

        table.seq_add(1, -1, -1, -1)

        assert table.head == 4

    def test_an_empty_range_leaves_head_alone(self) -> None:
        table = two_sequences()
        before = snapshot(table)

        table.seq_add(0, 2, 2, 5)

        assert snapshot(table) == before

    def test_a_range_without_cells_sets_head_to_zero(self) -> None:
        table = two_sequences()

        table.seq_add(0, 100, -1, 5)

        assert table.head == 0

    def test_a_shared_cell_moves_for_every_owner(self) -> None:
        table = two_sequences()
        table.seq_cp(0, 2)

        table.seq_add(2, -1, -1, 3)

        table.check()
        assert (table.seq_pos_min(0), table.seq_pos_max(0)) == (3, 6)

    def test_positions_do_not_overflow(self) -> None:
        table = two_sequences()
        before = snapshot(table)

        with pytest.raises(PositionError, match="position 3 to 2147483647"):
            table.seq_add(0, -1, -1, MAX_POSITION - 3)

        assert snapshot(table) == before
        table.seq_add(0, -1, -1, MAX_POSITION - 4)
        table.check()
        assert table.seq_pos_max(0) == MAX_POSITION - 1

    @pytest.mark.parametrize("delta", [-(2**31), -(2**31) - 1, -(2**70)])
    def test_huge_deltas_down_free_everything(self, delta: int) -> None:
        table = two_sequences()

        table.seq_add(0, -1, -1, delta)

        table.check()
        assert layout(table) == "....111."


class TestDivide:
    def test_positions_are_truncated_and_the_change_is_pending(self) -> None:
        table = CellTable(4, 1)
        put(table, 0, [5, 6, 7], [0, 1, 2])

        table.seq_div(0, -1, -1, 2)

        table.check()
        assert table.positions[:3].tolist() == [2, 3, 3]
        assert table.pending[:3].tolist() == [-3, -3, -4]

    def test_head_stays(self) -> None:
        table = two_sequences()
        table.seq_div(0, -1, -1, 2)
        assert table.head == 7

    @pytest.mark.parametrize("d", [0, -1])
    def test_divisors_below_one_are_refused(self, d: int) -> None:
        table = two_sequences()
        before = snapshot(table)

        with pytest.raises(OptionError, match=f"seq_div by {d}"):
            table.seq_div(0, -1, -1, d)

        assert snapshot(table) == before

    def test_a_huge_divisor_moves_everything_to_zero(self) -> None:
        table = two_sequences()
        table.seq_div(0, -1, -1, 2**80)
        table.check()
        assert table.positions[:4].tolist() == [0, 0, 0, 0]


class TestClear:
    def test_everything_is_reset(self) -> None:
        table = two_sequences()
        table.seq_add(0, -1, -1, 5)

        table.clear()

        table.check()
        assert snapshot(table) == snapshot(CellTable(8, 4))
        assert len(table.pending_cells()) == 0


class TestMoveSplitRelease:
    def test_moved_cells_keep_everything(self) -> None:
        table = two_sequences()
        table.seq_add(1, -1, -1, 2)
        table.seq_rm(0, 0, 2)

        table.move(np.array([5, 6]), np.array([0, 1]))

        table.check()
        assert layout(table) == "11001..."
        assert table.cells_of(1).tolist() == [4, 0, 1]
        assert table.pending[:2].tolist() == [2, 2]
        assert table.tokens_of(1).tolist() == [20, 21, 22]

    def test_split_gives_one_owner_cells_of_its_own(self) -> None:
        table = two_sequences()
        table.seq_rm(1)
        table.seq_add(0, -1, -1, 1)
        table.seq_cp(0, 2)

        table.split(2, np.array([1, 2]), np.array([6, 4]))

        table.check()
        assert layout(table) == "+00+2.2."
        assert table.cells_of(2).tolist() == [0, 6, 4, 3]
        assert table.pending[[4, 6]].tolist() == [1, 1]
        assert table.tokens_of(2).tolist() == [10, 11, 12, 13]

    def test_disown_frees_only_what_nobody_owns(self) -> None:
        table = two_sequences()
        table.seq_cp(0, 2, 0, 2)

        table.drop(0, slice(1, 4))

        table.check()
        assert layout(table) == "+2..111."

    def test_release_frees_exactly_the_given_cells(self) -> None:
        table = two_sequences()
        table.seq_cp(0, 2)

        table.release(np.array([6, 1]))
        table.release(np.array([], np.int64))

        table.check()
        assert layout(table) == "+.++11.."
        assert table.head == 0

    def test_settle_forgets_pending_shifts(self) -> None:
        table = two_sequences()
        table.seq_add(0, 1, -1, 1)
        assert table.pending_cells().tolist() == [1, 2, 3]

        table.settle(table.pending_cells())

        table.check()
        assert len(table.pending_cells()) == 0


class TestSizes:
    @pytest.mark.parametrize(
        ("cell_max", "padding", "size", "n_kv"),
        [(0, 32, 100, 32), (1, 32, 100, 32), (33, 32, 100, 64), (97, 32, 100, 100), (9, 256, 8, 8)],
    )
    def test_n_kv_is_padded_and_bounded(
        self, cell_max: int, padding: int, size: int, n_kv: int
    ) -> None:
        assert padded_n_kv(cell_max, padding, size) == n_kv

    def test_cell_max_follows_removals_over_many_chunks(self) -> None:
        table = CellTable(50_000, 1)
        put(table, 0, list(range(50_000)), list(range(50_000)))

        table.seq_rm(0, 3, 49_999)
        assert table.cell_max() == 50_000
        table.seq_rm(0, 3, -1)
        assert table.cell_max() == 3
        assert table.n_kv(256) == 256
        table.check()


class TestIds:
    @pytest.mark.parametrize("seq_id", [-2, 4, 64, 2**40])
    def test_ids_out_of_range_are_refused(self, seq_id: int) -> None:
        table = two_sequences()
        before = snapshot(table)
        calls: list[Callable[[], object]] = [
            lambda: table.seq_rm(seq_id),
            lambda: table.seq_cp(0, seq_id),
            lambda: table.seq_cp(seq_id, 0),
            lambda: table.seq_keep(seq_id),
            lambda: table.seq_add(seq_id, 0, -1, 1),
            lambda: table.seq_div(seq_id, 0, -1, 2),
            lambda: table.seq_pos_min(seq_id),
            lambda: table.seq_pos_max(seq_id),
            lambda: table.cells_of(seq_id),
        ]

        for call in calls:
            with pytest.raises(SequenceIdError, match=rf"{seq_id} is outside \[0, 4\)"):
                call()
        assert snapshot(table) == before

    def test_only_seq_rm_takes_minus_one(self) -> None:
        table = two_sequences()
        with pytest.raises(SequenceIdError):
            table.seq_keep(-1)
        assert table.seq_rm(-1)

    def test_numpy_integers_are_ids(self) -> None:
        assert two_sequences().seq_pos_max(np.int64(1)) == 2

    def test_other_types_are_refused(self) -> None:
        table = two_sequences()
        with pytest.raises(SequenceIdError, match="'0'"):
            table.seq_rm("0")  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="must be integers"):
            table.seq_rm(0, 1.5)  # type: ignore[arg-type]


class TestCheck:
    """``check`` sees each kind of damage and cites the invariant."""

    @pytest.mark.parametrize(
        ("number", "damage"),
        [
            (1, lambda t: t.positions.__setitem__(7, 3)),
            (1, lambda t: t.positions.__setitem__(0, -1)),
            (1, lambda t: t.pending.__setitem__(7, 1)),
            (1, lambda t: t.tokens.__setitem__(7, 1)),
            (2, lambda t: setattr(t, "used", 6)),
            (2, lambda t: setattr(t, "token_count", 8)),
            (2, lambda t: setattr(t, "head", 8)),
            (2, lambda t: setattr(t, "_bound", 5)),
            (3, lambda t: setattr(t._spans[0], "pos_max", 9)),
            (3, lambda t: setattr(t._spans[1], "lo", 5)),
            (4, lambda t: t.pending.__setitem__(0, 1)),
        ],
    )
    def test_damage_is_found(self, number: int, damage: Callable[[CellTable], None]) -> None:
        table = two_sequences()
        table.check()

        damage(table)

        with pytest.raises(InvariantError, match=f"invariant {number} "):
            table.check()

    def test_a_pending_shift_that_would_be_overlooked_is_found(self) -> None:
        table = two_sequences()
        table.pending[1] = 1
        with pytest.raises(InvariantError, match="overlooked"):
            table.check()

    def test_an_owner_out_of_range_is_found(self) -> None:
        table = two_sequences()
        table.owners[0, 0] |= np.uint64(1 << 10)
        table.token_count += 1
        with pytest.raises(InvariantError, match="unknown sequence"):
            table.check()


def test_hundreds_of_sequences_have_a_word_each() -> None:
    table = CellTable(300, 300)
    for seq in range(300):
        put(table, seq, [seq], [seq])

    table.seq_cp(299, 64)
    table.seq_add(128, -1, -1, 7)
    table.seq_rm(63)

    table.check()
    assert table.owners_of(299) == (64, 299)
    assert table.seq_pos_max(128) == 135
    assert table.seq_pos_max(63) == -1
    assert table.used == 298


def put_seq(table: CellTable, seq: int, cells: list[int], positions: list[int]) -> None:
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
        put_seq(table, seq, cells.tolist(), [*range(start, start + len(cells))])
    elif kind == 2:
        table.seq_rm(seq if rng.random() < 0.8 else -1, p0, p1)
    elif kind == 3:
        table.seq_cp(seq, other, p0, p1)
    elif kind == 4:
        table.seq_add(seq, p0, p1, int(rng.integers(-3, 4)))
    elif kind == 5:
        table.seq_div(seq, p0, p1, 2)
    elif kind == 6:
        table.settle(table.pending_cells())
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
        put_seq(table, 0, [0, 1], [0, 1])
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
            put_seq(table, 1, numbers.tolist(), [*range(len(cells))])
        table.check()
        assert table.used == 2

    def test_a_mask_of_another_size_is_damage(self) -> None:
        table = self.reserved([])
        table.reserved = np.zeros(5, np.bool_)
        with pytest.raises(InvariantError, match="an array is too short"):
            table.check()
