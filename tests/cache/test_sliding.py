"""The sliding cache by examples: sizes, reuse, what is refused, failures, transactions."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.batch import Batch
from kvcellar.cache import AttentionCache, CheckpointBudget, SlidingCache, sliding_size
from kvcellar.errors import (
    AllocationError,
    BatchError,
    CacheError,
    CacheFull,
    InvariantError,
    OptionError,
    SequenceIdError,
)
from kvcellar.testing.duel import snapshot
from kvcellar.testing.signs import MIXED, fill
from kvcellar.testing.sliding_duel import SlidingDuel, sliding_spec
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import MAX_POSITION, CacheSpec, KVType, LayerSpec
from tests.cache.helpers import layout, put

NONE = CheckpointBudget(0)


def make(
    size: int = 8, window: int = 3, n_seq_max: int = 2, budget: CheckpointBudget = NONE
) -> SlidingCache:
    """A cache over signatures, without checkpoints."""
    spec = sliding_spec(size, window, n_seq_max)
    return SlidingCache(spec, SignatureStore(spec), checkpoints=budget)


def held(cache: SlidingCache, seq: int = 0) -> list[int]:
    """The positions that are held."""
    positions: list[int] = cache.seq_positions(seq).tolist()
    return positions


class TestSize:
    @pytest.mark.parametrize(
        ("window", "n_seq_max", "n_ubatch", "padding", "n_ctx", "size"),
        [
            (1024, 2, 512, 256, None, 2560),
            (1000, 1, 100, 256, None, 1280),
            (1024, 2, 512, 256, 2048, 2048),
            (4, 3, 2, 1, 100, 14),
            (1, 3, 2, 1, None, 8),
        ],
    )
    def test_a_window_a_sequence_and_a_microbatch(
        self,
        window: int,
        n_seq_max: int,
        n_ubatch: int,
        padding: int,
        n_ctx: int | None,
        size: int,
    ) -> None:
        assert sliding_size(window, n_seq_max, n_ubatch, padding, n_ctx) == size

    @pytest.mark.parametrize("name", ["window", "n_seq_max", "n_ubatch", "padding"])
    def test_nothing_may_be_0(self, name: str) -> None:
        arguments = {"window": 1, "n_seq_max": 1, "n_ubatch": 1, "padding": 1, name: 0}
        with pytest.raises(OptionError, match=f"{name}=0"):
            sliding_size(**arguments)

    @pytest.mark.parametrize("windows", [(0,), (0, 0), (3, 0), (3, 4), ()])
    def test_all_layers_have_one_window_that_is_not_0(self, windows: tuple[int, ...]) -> None:
        layers = tuple(LayerSpec(1, 2, 2, None, window) for window in windows)
        spec = CacheSpec(8, 2, layers)
        with pytest.raises(OptionError, match="window 0"):
            SlidingCache(spec, SignatureStore(spec))

    @given(
        st.integers(1, 4),
        st.integers(1, 3),
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=8),
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=8),
    )
    def test_with_it_every_batch_finds_room(
        self, window: int, n_ubatch: int, batches: list[list[int]], forks: list[tuple[int, int]]
    ) -> None:
        duel = SlidingDuel(window, n_ubatch, budget=NONE)
        for batch, (src, dst) in zip(batches, [*forks, *[(0, 0)] * 8], strict=False):
            duel.decode([[seq] for seq in batch])  # fails if there is no room
            duel.seq_cp(src, dst, -1, -1)
            duel.check()

    def test_one_cell_less_is_too_few(self) -> None:
        """The bound is tight: two windows and a microbatch."""
        for size in (3 * 2 + 2, 3 * 2 + 1):
            cache = make(size)
            put(cache, 0, 5, n_ubatch=1)
            put(cache, 1, 5, n_ubatch=1)
            if size == sliding_size(3, 2, 2):
                put(cache, 0, 2, n_ubatch=2)
            else:
                before = snapshot(cache)
                with pytest.raises(CacheFull) as full:
                    put(cache, 0, 2, n_ubatch=2)
                assert (full.value.needed, full.value.free) == (2, 1)
                assert snapshot(cache) == before


class TestReuse:
    def test_nothing_slides_out_while_cells_are_free(self) -> None:
        cache = make(8)
        put(cache, 0, 8)
        assert held(cache) == [*range(8)]
        assert len(cache.seq_evicted(0)) == 0

    def test_the_oldest_go_first_and_only_as_many_as_are_needed(self) -> None:
        cache = make(8)
        put(cache, 0, 8)
        cells = put(cache, 0, 2)
        assert cells == [0, 1]
        assert held(cache) == [*range(2, 10)]
        assert cache.seq_pos_min(0) == 2
        assert cache.seq_evicted(0).tolist() == [100, 101]
        assert cache.seq_evicted_positions(0).tolist() == [0, 1]
        assert cache.seq_count(0) == 8

    def test_that_of_the_sequence_whose_window_is_farthest_ahead(self) -> None:
        cache = make(10)
        put(cache, 0, 4)
        put(cache, 1, 6)
        put(cache, 0, 2)
        assert (held(cache, 0), held(cache, 1)) == ([*range(6)], [2, 3, 4, 5])
        put(cache, 1, 1)
        assert (held(cache, 0), held(cache, 1)) == ([*range(1, 6)], [*range(2, 7)])

    def test_a_cell_that_another_needs_loses_only_the_owner_it_left(self) -> None:
        cache = make(9)
        put(cache, 0, 4)
        cache.seq_cp(0, 1)
        put(cache, 0, 5)
        assert layout(cache) == "++++00000"
        put(cache, 0, 1)
        assert layout(cache) == "111100000"
        assert (held(cache, 0), held(cache, 1)) == ([5, 6, 7, 8, 9], [0, 1, 2, 3])
        assert cache.seq_evicted_positions(0).tolist() == [0, 1, 2, 3, 4]
        assert len(cache.seq_evicted(1)) == 0

    def test_later_microbatches_reuse_what_earlier_ones_wrote(self) -> None:
        cache = make(5, n_seq_max=1)
        with cache.place(Batch.of(range(11)), 2) as placement:
            foreseen = placement.cells.tolist()
            plans = list(placement.plans())
        assert foreseen == [cell for plan in plans for cell in plan.cells.tolist()]
        assert [int((plan.mask[-1] == 0).sum()) for plan in plans] == [2, 3, 3, 3, 3, 3]
        assert held(cache) == [6, 7, 8, 9, 10]

    def test_a_commit_places_what_was_not_asked_for(self) -> None:
        cache = make(5, n_seq_max=1)
        placement = cache.place(Batch.of(range(7)), 2)
        placement.commit()
        assert cache.seq_pos_max(0) == 6

    def test_what_no_later_microbatch_can_have_is_refused_at_once(self) -> None:
        cache = make(4, n_seq_max=1)
        put(cache, 0, 2, n_ubatch=1)
        before = snapshot(cache)
        with pytest.raises(CacheFull):
            cache.place(Batch.of(range(4)), 2)
        assert snapshot(cache) == before

    def test_what_is_pending_is_applied_before_tokens_are_placed(self) -> None:
        cache = make(8)
        put(cache, 0, 8)
        cache.seq_add(0, 0, -1, 2)
        put(cache, 0, 1)
        store = cache.store
        assert isinstance(store, SignatureStore)
        assert store.rotation.tolist() == cache.table.positions.tolist()

    def test_any_number_of_tokens_fits_beyond_the_windows(self) -> None:
        assert make(7).n_free() == MAX_POSITION
        assert make(6).n_free() == 6
        cache = make(6)
        put(cache, 0, 5)
        assert cache.n_free() == 1 + 2

    def test_tokens_of_sequences_that_differ_are_refused(self) -> None:
        cache = make(8)
        put(cache, 0, 2)
        with pytest.raises(BatchError, match="do not hold the same"):
            cache.place(Batch.of([1], [0, 1], [2]), 1)

    def test_resizing_lets_go_of_what_slid_out(self) -> None:
        cache = make(8)
        put(cache, 0, 8)
        cache.resize(4)
        assert held(cache) == [4, 5, 6, 7]
        before = snapshot(cache)
        with pytest.raises(CacheFull, match="has no room"):
            cache.resize(2)
        assert (snapshot(cache), held(cache)) == (before, [4, 5, 6, 7])
        with pytest.raises(OptionError):
            cache.resize(0)

    def test_resizing_that_fails_lets_go_of_nothing(self) -> None:
        cache = make(8)
        put(cache, 0, 8)
        before = snapshot(cache)
        _break(cache, "resize")
        with pytest.raises(AllocationError):
            cache.resize(4)
        assert snapshot(cache) == before
        assert len(cache.seq_evicted(0)) == 0


class TestEdits:
    """A cache of 8 cells that has decoded 12 tokens: 4 … 11 are held, 9 … 11 needed."""

    @pytest.mark.parametrize(
        ("p0", "p1", "left"),
        [
            (11, -1, [*range(12 - 1)]),
            (6, -1, [*range(6)]),
            (5, -1, None),  # 3 and 4 are needed, 3 has slid out
            (4, -1, None),
            (2, -1, None),
            (0, -1, []),
            (-1, -1, []),
            (0, 12, []),
            (12, 20, [*range(12)]),
            (5, 5, [*range(12)]),
            (5, 6, [*range(5), *range(6, 12)]),
            (4, 10, [*range(4), 10, 11]),  # moved up, 4 and 5: all that 6 needs
            (4, 11, None),  # moved up, only 4 is held of what 5 needs
            (1, 3, [0, *range(3, 12)]),  # among what slid out
            (0, 4, [*range(4, 12)]),
            (0, 11, [11]),  # nothing is left that could be missing
            (1, 11, None),
        ],
    )
    def test_removing_keeps_the_window_or_is_refused(
        self, p0: int, p1: int, left: list[int] | None
    ) -> None:
        cache = make(8)
        put(cache, 0, 8)
        put(cache, 0, 4)
        before = snapshot(cache), cache.seq_evicted_positions(0).tolist()

        assert cache.seq_rm(0, p0, p1) is (left is not None)

        if left is None:
            assert (snapshot(cache), cache.seq_evicted_positions(0).tolist()) == before
        else:
            assert [*cache.seq_evicted_positions(0), *held(cache)] == left
        cache.check()

    def test_removing_every_sequence_is_all_or_nothing(self) -> None:
        cache = make(8)
        put(cache, 0, 8)
        put(cache, 0, 1)
        put(cache, 1, 2)
        assert cache.seq_rm(-1, 1, -1) is False
        assert cache.seq_count(1) == 2
        assert cache.seq_rm(-1) is True
        assert cache.used == 0
        assert len(cache.seq_evicted(0)) == 0

    @pytest.mark.parametrize("p1", [9, 5, 4, 2])
    def test_a_copy_without_its_window_is_refused(self, p1: int) -> None:
        cache = make(8)
        put(cache, 0, 8)
        put(cache, 0, 4)
        before = snapshot(cache)
        if p1 > 5:
            cache.seq_cp(0, 1, 0, p1)
            assert cache.seq_evicted_positions(1).tolist() == [0, 1, 2, 3]
            assert held(cache, 1) == [*range(4, p1)]
        else:
            with pytest.raises(CacheError, match="seq_cp would leave sequence 1"):
                cache.seq_cp(0, 1, 0, p1)
            assert snapshot(cache) == before

    def test_moving_what_slid_out_too(self) -> None:
        cache = make(8)
        put(cache, 0, 8)
        put(cache, 0, 4)
        assert cache.seq_rm(0, 1, 3)
        cache.seq_add(0, 3, -1, -2)
        assert cache.seq_evicted_positions(0).tolist() == [0, 1]
        assert held(cache) == [*range(2, 10)]
        cache.seq_add(0, 0, -1, -1)
        assert cache.seq_evicted_positions(0).tolist() == [0]

    @pytest.mark.parametrize("delta", [-5, -9])
    def test_moving_over_what_slid_out_is_refused(self, delta: int) -> None:
        cache = make(8)
        put(cache, 0, 8)
        put(cache, 0, 4)
        before = snapshot(cache)
        with pytest.raises(CacheError, match="seq_add would leave sequence 0"):
            cache.seq_add(0, 4, -1, delta)
        assert snapshot(cache) == before

    def test_dividing_a_part_is_refused_where_the_window_would_reach_back(self) -> None:
        cache = make(8)
        put(cache, 0, 8)
        put(cache, 0, 4)
        before = snapshot(cache)
        with pytest.raises(CacheError, match="seq_div would leave sequence 0"):
            cache.seq_div(0, 4, -1, 2)
        with pytest.raises(OptionError):
            cache.seq_div(0, 0, -1, 0)
        assert snapshot(cache) == before

    def test_dividing_what_has_not_slid(self) -> None:
        cache = make(8)
        put(cache, 0, 6)
        cache.seq_div(0, 0, -1, 2)
        assert held(cache) == [0, 0, 1, 1, 2, 2]

    def test_keeping_and_clearing_forget_what_slid_out(self) -> None:
        cache = make(8)
        for seq in (0, 1):
            put(cache, seq, 6, n_ubatch=1)
        assert (len(cache.seq_evicted(0)), len(cache.seq_evicted(1))) == (3, 1)
        cache.seq_keep(1)
        assert (len(cache.seq_evicted(0)), len(cache.seq_evicted(1))) == (0, 1)
        cache.clear()
        assert len(cache.seq_evicted(1)) == 0

    def test_unknown_sequences(self) -> None:
        cache = make()
        for call in (
            lambda: cache.seq_rm(2),
            lambda: cache.seq_cp(0, -1),
            lambda: cache.seq_keep(2),
            lambda: cache.seq_add(2, 0, -1, 1),
            lambda: cache.seq_evicted(2),
            lambda: cache.checkpoint(-1),
            lambda: cache.checkpoints(2),
            lambda: cache.rewind(2, 0),
        ):
            with pytest.raises(SequenceIdError):
                call()

    def test_nothing_is_edited_while_a_batch_is_decoded(self) -> None:
        cache = make()
        placement = cache.place(Batch.of([1]), 1)
        for call in (
            lambda: cache.seq_rm(0),
            lambda: cache.seq_cp(0, 1),
            lambda: cache.seq_add(0, 0, -1, 1),
            lambda: cache.checkpoint(0),
            lambda: cache.resize(9),
            lambda: cache.place(Batch.of([1]), 1),
        ):
            with pytest.raises(CacheError, match="being decoded"):
                call()
        placement.release()

    def test_check_finds_a_hole(self) -> None:
        cache = make(8)
        put(cache, 0, 8)
        put(cache, 0, 4)
        cache.table.seq_rm(0, 5, -1)
        with pytest.raises(InvariantError, match="sequence 0 lacks a part of its window"):
            cache.check()


class TestFailures:
    @pytest.mark.parametrize("n_plans", [0, 1, 3, 6])
    def test_a_batch_that_fails_gives_overwritten_rows_back(self, n_plans: int) -> None:
        cache = make(8)
        put(cache, 0, 7)
        before = snapshot(cache, only_used=True)
        placement = cache.place(Batch.of(range(12)), 2)
        for _, plan in zip(range(n_plans), placement.plans(), strict=False):
            store = cache.store
            assert isinstance(store, SignatureStore)
            store.fill(plan.cells, np.full(2, 666), plan.micro.positions)
        placement.release()
        placement.release()
        assert snapshot(cache, only_used=True) == before
        assert 666 not in store_content(cache)

    def test_without_memory_for_the_rows_nothing_is_placed(self) -> None:
        cache = make(8)
        put(cache, 0, 8)
        before = snapshot(cache)
        _break(cache, "read_raw", MemoryError())
        with pytest.raises(AllocationError, match="rollback needs"):
            put(cache, 0, 1)
        _mend(cache, "read_raw")
        assert snapshot(cache) == before
        put(cache, 0, 1)

    def test_a_rollback_brings_back_what_slid_out_bit_for_bit(self) -> None:
        layers = tuple(replace(layer, window=3) for layer in MIXED)
        layers = (*layers, replace(MIXED[1], window=3, rope=None, v_offset=0))
        spec = CacheSpec(8, 2, layers, KVType.F32, KVType.F32, padding=1)
        store = NumpyStore(spec)
        cache = SlidingCache(spec, store, checkpoints=NONE)
        _put_real(cache, 8)
        before = snapshot(cache, only_used=True)
        with cache.transaction() as outer:
            cache.seq_add(0, 0, -1, 2)
            _put_real(cache, 3)
            with cache.transaction():
                cache.seq_rm(0, 9, -1)
                _put_real(cache, 6)
            cache.check()
            outer.rollback()
        assert snapshot(cache, only_used=True) == before

    def test_what_an_inner_transaction_committed_is_taken_back_too(self) -> None:
        duel = SlidingDuel(3, 2, budget=NONE)
        duel.decode([[0]] * 9)
        duel.begin()
        duel.seq_rm(0, -1, -1)
        duel.begin()
        duel.decode([[1]] * 20)  # fills what sequence 0 had
        duel.commit()
        duel.decode([[2]] * 20)
        duel.check()
        duel.rollback(0)
        duel.check()

    def test_rows_that_were_rotated_and_then_given_up_come_back_as_they_were(self) -> None:
        for inner_ends in ("commit", "rollback"):
            duel = SlidingDuel(3, 2, budget=NONE)
            duel.decode([[0]] * 11)
            duel.begin()
            duel.begin()
            duel.seq_add(0, 0, -1, 1)
            duel.decode([[0]] * 4)
            duel.commit() if inner_ends == "commit" else duel.rollback(1)
            duel.rollback(0)
            duel.check()

    def test_cells_that_became_free_beside_those_needed_come_back_too(self) -> None:
        """Two tokens at one position leave together, though one cell would do."""
        cache = make(8, n_seq_max=1)
        put(cache, 0, 8)
        cache.seq_div(0, 0, -1, 2)
        cache.update()
        before = snapshot(cache)
        placement = cache.place(Batch.of([1]), 1)
        assert (held(cache), cache.used) == ([1, 1, 2, 2, 3, 3, 4], 7)
        placement.release()
        assert snapshot(cache) == before
        cache.seq_rm(0)
        cache._sync.zero_freed()
        assert store_content(cache) == [-1] * 8

    def test_rows_that_came_back_are_wiped_once_they_are_freed(self) -> None:
        cache = make(4, n_seq_max=1)
        put(cache, 0, 4)
        with cache.transaction() as t:
            put(cache, 0, 1)
            cache.seq_rm(0)
            cache._sync.zero_freed()
            t.rollback()
        assert store_content(cache) == [0, 1, 2, 3]
        cache.seq_rm(0)
        cache._sync.zero_freed()
        assert store_content(cache) == [-1] * 4


def store_content(cache: AttentionCache) -> list[int]:
    store = cache.store
    assert isinstance(store, SignatureStore)
    content: list[int] = store.content.tolist()
    return content


def _put_real(cache: SlidingCache, n: int) -> None:
    with cache.place(Batch.of(range(n)), 2) as placement:
        for plan in placement.plans():
            at = plan.micro.positions
            fill(cache.store, plan.cells, at.astype(np.int64), at)


def _break(cache: SlidingCache, method: str, error: Exception | None = None) -> None:
    def fail(*_: object) -> NoReturn:
        raise error or AllocationError("a test", 1)

    setattr(cache.store, method, fail)


def _mend(cache: SlidingCache, method: str) -> None:
    delattr(cache.store, method)


def test_former_names_warn_and_answer_the_same() -> None:
    cache = make(window=1)
    for _ in range(8):
        put(cache, 0, 2)
    with pytest.warns(DeprecationWarning, match="seq_slid is now seq_evicted"):
        ids = cache.seq_slid(0)
    with pytest.warns(DeprecationWarning, match="seq_slid_positions is now"):
        positions = cache.seq_slid_positions(0)
    assert ids.tolist() == cache.seq_evicted(0).tolist() != []
    assert positions.tolist() == cache.seq_evicted_positions(0).tolist() != []
