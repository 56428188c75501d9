"""Where tokens go, and that a placement which is not computed leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.cache.placement import find_cells
from kvcellar.cells import CellTable
from kvcellar.cellsets import pack_owners
from kvcellar.errors import BatchError, CacheError, CacheFull
from tests.cache.helpers import arrange, layout, make, put, snapshot


def table_of(picture: str, head: int = 0) -> CellTable:
    """A table with the cells marked ``#`` in use."""
    table = CellTable(len(picture), 1)
    cells = np.array([i for i, c in enumerate(picture) if c == "#"], np.int64)
    if len(cells):
        n = len(cells)
        owners = pack_owners(np.arange(n), np.zeros(n, np.int64), n, 1)
        table.place(cells, np.arange(n, dtype=np.int32), owners, None)
    table.head = head
    return table


class TestFindCells:
    @pytest.mark.parametrize(
        ("picture", "head", "n", "cells"),
        [
            ("....", 0, 2, [0, 1]),
            ("##..", 0, 2, [2, 3]),
            ("##..", 2, 2, [2, 3]),
            ("..##", 2, 2, [0, 1]),
            ("#.#..#", 0, 2, [3, 4]),
            ("#.#.", 2, 1, [3]),
            ("#.##", 2, 1, [1]),
            (".#..", 2, 2, [2, 3]),
            ("..#.", 3, 2, [0, 1]),
            ("#..##..", 2, 2, [5, 6]),
            ("#...##", 2, 3, [1, 2, 3]),
        ],
    )
    def test_neighbours_from_head_on_wrapping_once(
        self, picture: str, head: int, n: int, cells: list[int]
    ) -> None:
        assert find_cells(table_of(picture, head), n).tolist() == cells

    @pytest.mark.parametrize(
        ("picture", "head", "n", "cells"),
        [
            ("#.#.#.", 0, 2, [1, 3]),
            ("#.#.#.", 2, 3, [3, 5, 1]),
            (".##.", 3, 2, [3, 0]),
            (".#..#.", 2, 4, [2, 3, 5, 0]),
        ],
    )
    def test_scattered_in_order_from_head_if_no_run_is_long_enough(
        self, picture: str, head: int, n: int, cells: list[int]
    ) -> None:
        assert find_cells(table_of(picture, head), n).tolist() == cells

    @pytest.mark.parametrize(("head", "first"), [(4, 4), (5, 0)])
    def test_head_goes_back_when_far_behind_what_is_used(self, head: int, first: int) -> None:
        table = table_of("........", head)
        assert find_cells(table, 2).tolist() == [first, first + 1]

    def test_fewer_free_cells_than_tokens(self) -> None:
        table = table_of("#.#.", 3)

        with pytest.raises(CacheFull, match="3 cells needed, 2 free") as caught:
            find_cells(table, 3)

        assert (caught.value.needed, caught.value.free) == (3, 2)
        assert table.head == 3

    def test_nothing_is_changed(self) -> None:
        table = table_of("#...", 1)
        find_cells(table, 2)
        assert (table.head, table.used) == (1, 1)
        table.check()

    @pytest.mark.parametrize("n", [1, 2, 7, 300])
    def test_large_tables_are_searched_in_chunks(self, n: int) -> None:
        rng = np.random.default_rng(n)
        for density in (0.3, 0.9, 0.999):
            busy = rng.random(20_000) < density
            busy[12_345 : 12_345 + n] = False
            table = table_of("".join("#" if b else "." for b in busy))
            for head in (0, 9_000, 12_346, 19_999):
                table.head = head
                free = ~busy
                runs = np.convolve(free, np.ones(n, int), "valid") == n
                starts = np.flatnonzero(runs)
                start = 0 if head > table.used + 2 * n else head
                want = starts[starts >= start][0] if (starts >= start).any() else starts[0]

                assert find_cells(table, n).tolist() == list(range(want, want + n))


class TestPlacement:
    def test_every_microbatch_is_placed_before_any_is_computed(self) -> None:
        cache, _ = make(8)

        placement = cache.place(Batch.of(range(5)), 2)

        assert placement.cells.tolist() == [0, 1, 2, 3, 4]
        assert [micro.n_tokens for micro in placement.micros] == [2, 2, 1]
        assert cache.used == 5
        placement.release()

    def test_plans_see_no_more_than_what_is_placed_so_far(self) -> None:
        cache, _ = make(8)

        with cache.place(Batch.of(range(5), logits="all"), 2) as placement:
            plans = list(placement.plans())

        assert [plan.n_kv for plan in plans] == [2, 4, 5]
        assert [plan.micro.outputs.tolist() for plan in plans] == [[0, 1], [0, 1], [0]]
        assert [plan.micro.rows.tolist() for plan in plans] == [[0, 1], [2, 3], [4]]

    def test_a_plan_is_a_value(self) -> None:
        cache, _ = make(8)
        with cache.place(Batch.of([1, 2]), 2) as placement:
            (plan,) = placement.plans()
        mask, cells = plan.mask.copy(), plan.cells.copy()

        cache.clear()
        put(cache, 3, 4)

        np.testing.assert_array_equal(plan.mask, mask)
        np.testing.assert_array_equal(plan.cells, cells)

    def test_head_moves_behind_the_last_cell_and_to_zero_at_the_end(self) -> None:
        cache, _ = make(4)
        put(cache, 0, 3)
        assert cache.head == 3
        put(cache, 0, 1)
        assert cache.head == 0

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
    @pytest.mark.parametrize("fail_at", [0, 1, 2])
    def test_an_error_at_any_microbatch_releases_all_of_the_batch(
        self, error: type[BaseException], fail_at: int
    ) -> None:
        cache, _ = make(8)
        arrange(cache, "0.1.0...")
        cache.table.head = 3
        before = snapshot(cache)

        def decode() -> None:
            with cache.place(Batch.of(range(5), 1), 2) as placement:
                for i, _ in enumerate(placement.plans()):
                    if i == fail_at:
                        raise error

        with pytest.raises(error):
            decode()
        assert snapshot(cache) == before

    def test_what_a_failed_computation_wrote_is_wiped(self) -> None:
        cache, store = make(8)
        put(cache, 0, 2)
        store.content[4] = 77

        placement = cache.place(Batch.of(range(4)), 2)
        plan = next(placement.plans())
        store.fill(plan.cells, np.array([55, 56]), plan.micro.positions)
        placement.release()

        assert store.content.tolist() == [0, 1, -1, -1, 77, -1, -1, -1]

    def test_leaving_before_the_last_plan_releases(self) -> None:
        cache, _ = make(8)
        before = snapshot(cache)

        with cache.place(Batch.of(range(5)), 2) as placement:
            for _ in placement.plans():
                break

        assert not placement.is_open
        assert snapshot(cache) == before

    def test_leaving_after_the_last_plan_commits(self) -> None:
        cache, _ = make(8)
        with cache.place(Batch.of(range(2)), 2) as placement:
            for _ in placement.plans():
                break
        assert cache.used == 2

    def test_commit_and_release_by_hand(self) -> None:
        cache, _ = make(8)
        placement = cache.place(Batch.of([1, 2]), 2)
        placement.commit()
        placement.release()
        assert cache.used == 2

        placement = cache.place(Batch.of([1, 2]), 2)
        placement.release()
        placement.release()
        assert cache.used == 2
        with pytest.raises(CacheError, match="committed or released already"):
            placement.commit()
        with pytest.raises(CacheError, match="committed or released already"):
            next(placement.plans())

    def test_a_commit_inside_the_block_stands(self) -> None:
        cache, _ = make(8)
        with cache.place(Batch.of([1, 2]), 1) as placement:
            placement.commit()
        assert cache.used == 2

    def test_verbs_wait_for_the_end_of_a_decode(self) -> None:
        cache, _ = make(8)
        with cache.place(Batch.of([1]), 1) as placement:
            for call in (
                lambda: cache.seq_rm(0),
                lambda: cache.seq_cp(0, 1),
                lambda: cache.seq_keep(0),
                lambda: cache.seq_add(0, 0, -1, 1),
                lambda: cache.seq_div(0, 0, -1, 2),
                cache.clear,
                cache.defrag,
                cache.update,
                lambda: cache.place(Batch.of([1], 1), 1),
            ):
                with pytest.raises(CacheError, match="commit or release its placement"):
                    call()
            placement.commit()
        cache.seq_rm(0)

    def test_a_placement_that_cannot_be_made_takes_nothing(self) -> None:
        cache, _ = make(4)
        put(cache, 0, 2)
        rows = Batch.of(range(4), 1)
        with cache.place(Batch.of(range(2), 1), 1) as fits:
            micros = fits.micros
        cache.seq_rm(1)
        before = snapshot(cache)

        with pytest.raises(CacheFull):
            cache.take([*micros, *micros])
        with pytest.raises(CacheFull, match="4 cells needed, 2 free"):
            cache.place(rows, 1)

        assert snapshot(cache) == before

    def test_a_mask_buffer_is_used(self) -> None:
        cache, _ = make(8)
        buffer = np.zeros((2, 8), np.float16)
        with cache.place(Batch.of(range(4)), 2) as placement:
            for plan in placement.plans(buffer):
                assert np.shares_memory(plan.mask, buffer)

    def test_tokens_may_get_lists_in_place_of_a_mask(self) -> None:
        cache, _ = make(8)
        put(cache, 0, 2)
        with cache.place(Batch.of(range(3)), 2) as placement:
            first, last = placement.plans(lists=[True])
        assert first.lists is not None
        assert [first.lists.of(row).tolist() for row in (0, 1)] == [[0, 1, 2], [0, 1, 2, 3]]
        assert last.lists is not None
        assert last.mask.shape == (1, 0)
        assert last.lists.cells.tolist() == [0, 1, 2, 3, 4]
        with cache.place(Batch.of([9]), 2) as placement:
            (plan,) = placement.plans(lists=[False])
        assert plan.lists is None
        assert plan.n_kv > 0


class TestCoupledTokens:
    def test_owners_that_hold_the_same_cells_may_share_a_token(self) -> None:
        cache, _ = make(8)
        put(cache, 0, 2)
        cache.seq_cp(0, 1)

        put(cache, [0, 1], 2)

        assert layout(cache) == "++++...."
        assert cache.seq_pos_max(0) == cache.seq_pos_max(1) == 3

    def test_owners_that_differ_may_not(self) -> None:
        cache, _ = make(8)
        put(cache, 0, 2)
        put(cache, 1, 2)
        before = snapshot(cache)

        with pytest.raises(BatchError, match=r"token 0 is shared by sequences \[0, 1\]"):
            put(cache, [0, 1], 1)

        assert snapshot(cache) == before

    def test_what_the_batch_itself_places_counts_too(self) -> None:
        cache, _ = make(8)
        apart = Batch().add(1, 0, 0).add(2, 0, 1).add(3, 1, [0, 1])
        together = Batch().add(1, 0, [0, 1]).add(2, 1, 0).add(3, 1, 1)

        with pytest.raises(BatchError, match="token 2 is shared"):
            cache.place(apart, 8)
        cache.place(together, 8).commit()

        assert layout(cache) == "+01....."

    def test_replaying_a_trace_may_allow_it(self) -> None:
        cache, _ = make(8)
        put(cache, 0, 2)
        cache.place(Batch.of([1], [0, 1], [2]), 1, coupled="any").commit()
        assert layout(cache) == "00+....."
