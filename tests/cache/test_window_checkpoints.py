"""Going back behind the window: what checkpoints hold, when they go, what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest

from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.batch import Batch
from kvcellar.cache import CheckpointBudget, SlidingCache
from kvcellar.errors import AllocationError, OptionError
from kvcellar.testing.duel import PARTS, snapshot
from kvcellar.testing.signs import MIXED, fill
from kvcellar.testing.sliding_duel import sliding_spec
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import CacheSpec, KVType
from tests.cache.helpers import put

MANY = CheckpointBudget(8)


def make(
    size: int = 8, window: int = 3, n_seq_max: int = 2, budget: CheckpointBudget = MANY
) -> SlidingCache:
    spec = sliding_spec(size, window, n_seq_max)
    return SlidingCache(spec, SignatureStore(spec), checkpoints=budget)


def go_on(cache: SlidingCache, n: int, seq: int = 0) -> None:
    """Decode token by token, as generation does: no checkpoint is made."""
    for _ in range(n):
        put(cache, seq, 1)


def held(cache: SlidingCache, seq: int = 0) -> list[int]:
    positions: list[int] = cache.seq_positions(seq).tolist()
    return positions


class TestMaking:
    def test_a_prompt_leaves_one_and_single_tokens_leave_none(self) -> None:
        cache = make()
        put(cache, 0, 4)
        go_on(cache, 3)
        put(cache, 0, 2)
        assert cache.checkpoints(0) == (4, 9)

    def test_a_batch_of_single_tokens_of_several_sequences_leaves_none(self) -> None:
        cache = make()
        batch = Batch().add(1, None, 0).add(2, None, 1)
        with cache.place(batch, 2) as placement:
            list(placement.plans())
        assert cache.checkpoints(0) == cache.checkpoints(1) == ()

    def test_a_batch_that_fails_leaves_none(self) -> None:
        cache = make()
        cache.place(Batch.of([1, 2]), 2).release()
        assert cache.checkpoints(0) == ()

    def test_when_asked_for(self) -> None:
        cache = make()
        assert cache.checkpoint(0) is False
        go_on(cache, 5)
        assert cache.checkpoint(0) is True
        assert cache.checkpoints(0) == (5,)
        assert cache.checkpoints(1) == ()

    def test_one_with_the_same_end_takes_the_place_of_the_old(self) -> None:
        cache = make(budget=CheckpointBudget(2))
        put(cache, 0, 4)
        put(cache, 0, 2)
        cache.checkpoint(0)
        assert cache.checkpoints(0) == (4, 6)

    @pytest.mark.parametrize("budget", [CheckpointBudget(0), CheckpointBudget(8, 0)])
    def test_without_a_budget_there_is_none(self, budget: CheckpointBudget) -> None:
        cache = make(budget=budget)
        put(cache, 0, 4)
        assert cache.checkpoint(0) is False
        assert cache.checkpoints(0) == ()

    @pytest.mark.parametrize(("n_max", "max_bytes"), [(-1, 0), (0, -1)])
    def test_a_budget_below_0_is_refused(self, n_max: int, max_bytes: int) -> None:
        with pytest.raises(OptionError, match=r"=-1: must be in \[0, "):
            CheckpointBudget(n_max, max_bytes)

    def test_the_oldest_goes_when_there_are_too_many(self) -> None:
        cache = make(20, n_seq_max=3, budget=CheckpointBudget(3))
        for seq in (0, 1, 2, 0):
            put(cache, seq, 3)
        assert [cache.checkpoints(seq) for seq in range(3)] == [(6,), (3,), (3,)]

    def test_bytes_are_bounded_too(self) -> None:
        a_row = 16 + 8  # K and V of a cell, as SignatureStore has them
        cache = make(20, budget=CheckpointBudget(8, 2 * 3 * a_row))
        for _ in range(4):
            put(cache, 0, 3)
        assert cache.checkpoints(0) == (9, 12)
        small = make(budget=CheckpointBudget(8, 3 * a_row - 1))
        put(small, 0, 3)
        assert small.checkpoints(0) == ()

    def test_copies_share_one_and_its_bytes_count_once(self) -> None:
        cache = make(20, budget=CheckpointBudget(8, 3 * 24))
        put(cache, 0, 3)
        cache.seq_cp(0, 1)
        assert cache.checkpoints(0) == cache.checkpoints(1) == (3,)
        put(cache, 0, 3)
        assert (cache.checkpoints(0), cache.checkpoints(1)) == ((6,), ())

    def test_without_memory_for_it_a_batch_counts_all_the_same(self) -> None:
        cache = make()

        def fail(*_: object) -> NoReturn:
            raise MemoryError

        cache.store.read_raw = fail  # type: ignore[assignment,method-assign]
        put(cache, 0, 3)
        assert cache.seq_pos_max(0) == 2
        assert cache.checkpoints(0) == ()


class TestGoingBack:
    def test_a_tail_goes_if_a_checkpoint_holds_the_window_before_it(self) -> None:
        cache = make(budget=MANY)
        put(cache, 0, 6)
        go_on(cache, 8)
        assert held(cache) == [*range(6, 14)]
        assert cache.seq_rm(0, 7, -1) is False
        assert cache.seq_rm(0, 6, -1) is True
        assert (held(cache), cache.seq_evicted_positions(0).tolist()) == ([3, 4, 5], [0, 1, 2])
        assert cache.checkpoints(0) == (6,)
        cache.check()

    def test_one_token_further_back_and_never_more(self) -> None:
        for p0, works in ((6, True), (5, True), (4, False)):
            cache = make()
            put(cache, 0, 6)
            go_on(cache, 8)
            before = snapshot(cache)
            assert cache.seq_rm(0, p0, -1) is works
            if works:
                assert held(cache) == [*range(3, p0)]
            else:
                assert snapshot(cache) == before

    def test_what_was_short_can_be_cut_anywhere(self) -> None:
        cache = make()
        put(cache, 0, 3)
        go_on(cache, 10)
        assert cache.seq_rm(0, 1, -1) is True
        assert held(cache) == [0]
        assert cache.seq_evicted(0).size == 0
        assert cache.checkpoints(0) == ()

    def test_rewind_goes_back_to_the_last_one_before(self) -> None:
        cache = make()
        put(cache, 0, 4)
        put(cache, 0, 4)
        go_on(cache, 9)
        assert cache.rewind(0, 16) == 16
        assert cache.rewind(0, 10) == 8
        assert held(cache) == [5, 6, 7]
        go_on(cache, 9)
        assert cache.rewind(0, 6) == 4
        assert cache.checkpoints(0) == (4,)
        go_on(cache, 12)
        assert cache.rewind(0, 1) == 0
        assert cache.used == 0
        assert cache.rewind(0, 5) == 0

    def test_rewind_of_what_is_held_and_beyond_the_end(self) -> None:
        cache = make()
        put(cache, 0, 4)
        assert cache.rewind(0, 9) == 4
        assert cache.rewind(0, -1) == 0
        assert cache.used == 0

    def test_rows_that_were_brought_back_are_wiped_once_they_are_freed(self) -> None:
        cache = make()
        put(cache, 0, 4)
        go_on(cache, 8)
        cache.seq_rm(0, 10, -1)
        cache._sync.zero_freed()
        assert cache.seq_rm(0, 4, -1) is True
        cache.seq_rm(0)
        cache._sync.zero_freed()
        assert isinstance(cache.store, SignatureStore)
        assert cache.store.content.tolist() == [-1] * 8

    def test_both_of_two_forks_can_go_back(self) -> None:
        cache = make()
        put(cache, 0, 5)
        cache.seq_cp(0, 1)
        for seq in (0, 1):
            go_on(cache, 8, seq)
        for seq in (0, 1):
            assert cache.seq_rm(seq, 5, -1) is True
            assert held(cache, seq) == [2, 3, 4]
        cache.check()

    def test_without_room_it_is_refused(self) -> None:
        cache = make(6, n_seq_max=3)
        put(cache, 0, 4)
        go_on(cache, 3)
        cache.seq_cp(0, 1)
        go_on(cache, 3, seq=2)
        assert held(cache, 0) == held(cache, 1) == [4, 5, 6]
        before = snapshot(cache)
        assert cache.seq_rm(0, 4, -1) is False
        assert snapshot(cache) == before
        assert cache.checkpoints(0) == (4,)
        cache.seq_rm(1)
        assert cache.seq_rm(0, 4, -1) is True

    def test_a_store_that_fails_leaves_everything_as_it_was(self) -> None:
        cache = make()
        put(cache, 0, 5)
        go_on(cache, 8)
        before = snapshot(cache, only_used=True)
        works = cache.store.write_raw
        calls: list[object] = []

        def fail_once(*args: object) -> None:
            calls.append(args)
            if len(calls) == 2:
                raise AllocationError("a test", 1)
            works(*args)  # type: ignore[arg-type]

        cache.store.write_raw = fail_once  # type: ignore[assignment,method-assign]
        with pytest.raises(AllocationError):
            cache.seq_rm(0, 5, -1)
        assert snapshot(cache, only_used=True) == before
        assert cache.checkpoints(0) == (5,)
        assert cache.seq_rm(0, 5, -1) is True

    def test_rows_come_back_bit_for_bit(self) -> None:
        """Also where a shift was pending when the checkpoint was asked for."""
        layers = tuple(replace(layer, window=3) for layer in (*MIXED, MIXED[2]))
        layers = (*layers, replace(layers[1], rope=None, v_offset=0))
        spec = CacheSpec(8, 2, layers, KVType.F32, KVType.F16, padding=1)
        cache = SlidingCache(spec, NumpyStore(spec), checkpoints=MANY)
        _put_real(cache, 5)
        cache.seq_add(0, 0, -1, 2)
        assert cache.checkpoint(0) is True
        cache.update()
        before = _rows(cache, range(4, 7))
        for _ in range(9):
            _put_real(cache, 1)
        assert cache.seq_rm(0, 7, -1) is True
        assert held(cache) == [4, 5, 6]
        assert _rows(cache, range(4, 7)) == before

    def test_a_rollback_brings_back_checkpoints_and_what_they_replaced(self) -> None:
        cache = make()
        put(cache, 0, 5)
        go_on(cache, 8)
        before = snapshot(cache, only_used=True)
        with cache.transaction() as t:
            assert cache.seq_rm(0, 5, -1) is True
            put(cache, 0, 7, n_ubatch=2)
            assert cache.checkpoints(0) == (5, 12)
            cache.seq_rm(0)
            assert cache.checkpoints(0) == ()
            t.rollback()
        assert snapshot(cache, only_used=True) == before
        assert cache.checkpoints(0) == (5,)
        assert cache.seq_evicted_positions(0).tolist() == [*range(5)]


class TestWhenTheyGo:
    def test_with_the_text_that_they_end_in(self) -> None:
        cache = make(30, n_seq_max=1)
        for _ in range(3):
            put(cache, 0, 4)
        cache.seq_rm(0, 9, 10)
        assert cache.checkpoints(0) == (4, 8)
        cache.seq_rm(0, 8, -1)
        assert cache.checkpoints(0) == (4, 8)
        cache.seq_rm(-1, 7, -1)
        assert cache.checkpoints(0) == (4,)

    def test_when_positions_move(self) -> None:
        cache = make(30)
        put(cache, 0, 4)
        for nothing in ((0, 0, 3), (0, -1, 0), (7, -1, 1)):
            cache.seq_add(0, *nothing)
        cache.seq_div(0, 0, -1, 1)
        assert cache.checkpoints(0) == (4,)
        cache.seq_add(0, 0, -1, 1)
        assert cache.checkpoints(0) == ()
        cache.checkpoint(0)
        cache.seq_div(0, 0, -1, 2)
        assert cache.checkpoints(0) == ()

    def test_when_others_are_kept_and_when_all_is_cleared(self) -> None:
        cache = make(30)
        put(cache, 0, 4)
        put(cache, 1, 3)
        cache.seq_keep(1)
        assert (cache.checkpoints(0), cache.checkpoints(1)) == ((), (3,))
        cache.clear()
        assert cache.checkpoints(1) == ()

    def test_when_the_text_is_replaced(self) -> None:
        cache = make(30)
        put(cache, 0, 4)
        put(cache, 0, 4)
        put(cache, 1, 3)
        put(cache, 1, 3)
        cache.seq_cp(0, 1, 4, 8)
        assert cache.checkpoints(1) == (3,)
        cache.seq_cp(0, 1, 0, 6)
        assert cache.checkpoints(1) == (4,)


def _put_real(cache: SlidingCache, n: int) -> None:
    with cache.place(Batch.of(range(n)), 2) as placement:
        for plan in placement.plans():
            at = plan.micro.positions
            fill(cache.store, plan.cells, at.astype(np.int64), at)


def _rows(cache: SlidingCache, positions: range) -> list[bytes]:
    cells = cache.table.cells_of(0)
    cells = cells[np.isin(cache.table.positions[cells], positions)]
    layers = range(len(cache.spec.layers))
    return [cache.store.read_raw(i, part, cells).tobytes() for i in layers for part in PARTS]
