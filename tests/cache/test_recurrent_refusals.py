"""What a cache of states refuses, and what is taken back: nothing is lost either way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvcellar.batch import Batch, MicroBatch
from kvcellar.cache.base import CheckpointBudget, CheckpointPolicy
from kvcellar.cellsets import pack_owners
from kvcellar.errors import (
    BatchError,
    CacheError,
    CacheFull,
    OptionError,
    PositionError,
    SequenceIdError,
)
from tests.cache.states import (
    N_SEQ,
    cache_of,
    compute,
    everything,
    fail,
    put,
    refused,
    row,
    state,
    store_of,
)


class TestRefusals:
    def test_a_gap_names_both_positions(self) -> None:
        cache = cache_of()
        put(cache, 0, 1, 2)
        refused(cache, PositionError, "position 3.* ends at 1", lambda: put(cache, 0, 5, at=3))
        gap = Batch().add(1, 0, 1).add(2, 2, 1)
        refused(cache, PositionError, "position 2.* ends at 0", lambda: compute(cache, gap))

    def test_positions_that_go_back(self) -> None:
        cache = cache_of()
        put(cache, 0, 1, 2)
        refused(cache, PositionError, "already reaches 1", lambda: put(cache, 0, 5, at=1))

    def test_two_states_cannot_be_mixed(self) -> None:
        cache = cache_of()
        put(cache, 0, 1)
        put(cache, 1, 1)  # the same token, but another state
        refused(cache, BatchError, "share their state", lambda: put(cache, [0, 1], 2))
        refused(cache, BatchError, "share their state", lambda: put(cache, [0, 2], 2, at=1))
        parted = Batch().add(1, 0, 2).add(1, 0, 3).add(2, 1, [2, 3])
        refused(cache, BatchError, "share their state", lambda: compute(cache, parted))

    @pytest.mark.parametrize("seqs", [[0, 0, 1], [0, 1, 0]])
    def test_an_unequal_split(self, seqs: list[int]) -> None:
        cache, n = cache_of(), len(seqs)
        places = np.array([0, 1, 0] if seqs == [0, 0, 1] else [0, 0, 1], np.int32)
        micro = MicroBatch(
            np.arange(n, dtype=np.int32),
            np.arange(n, dtype=np.int32),
            None,
            places,
            pack_owners(np.arange(n), np.array(seqs), n, 1),
            np.empty(0, np.int32),
        )
        refused(cache, BatchError, "equally many|twice", lambda: cache.take([micro]))

    def test_unknown_sequences(self) -> None:
        cache = cache_of()
        for bad in (-2, N_SEQ):
            for verb in (cache.seq_rm, cache.seq_keep, cache.checkpoint, cache.seq_pos_max):
                refused(cache, SequenceIdError, str(bad), lambda v=verb, b=bad: v(b))  # type: ignore[misc]
        refused(cache, SequenceIdError, "-1", lambda: cache.seq_cp(0, -1))
        refused(cache, SequenceIdError, "-1", lambda: cache.rewind(-1, 0))
        refused(cache, SequenceIdError, "4", lambda: put(cache, 4, 1))

    def test_more_sequences_than_states(self) -> None:
        cache = cache_of(n_rows=3)
        put(cache, 0, 1)
        put(cache, 1, 1)
        batch = Batch().add(2, 1, 0).add(2, 1, 1)
        refused(
            cache, CacheFull, "2 cells needed, 1 free.*n_seq_max", lambda: compute(cache, batch)
        )
        put(cache, 0, 2)
        assert cache.seq_rm(1)
        put(cache, 0, 3)
        assert state(cache, 0) == (1, 2, 3)

    def test_checkpoints_make_room(self) -> None:
        cache = cache_of(3, n_rows=3)
        put(cache, 0, 1, 2)
        put(cache, 0, 3, 4)
        assert cache.checkpoints(0) == (1, 3)
        put(cache, 1, 9)
        put(cache, 0, 5)
        assert cache.checkpoints(0) == (3,)
        assert (state(cache, 0), state(cache, 1)) == ((1, 2, 3, 4, 5), (9,))

    def test_a_cache_that_is_decoding_is_left_alone(self) -> None:
        cache = cache_of(2)
        put(cache, 0, 1)
        placement = cache.place(Batch.of([2], 0), 1)
        verbs: list[Callable[[], object]] = [
            lambda: cache.seq_rm(0),
            lambda: cache.seq_cp(0, 1),
            lambda: cache.seq_keep(0),
            lambda: cache.seq_add(0, 0, -1, 1),
            lambda: cache.seq_div(0, 0, -1, 2),
            lambda: cache.rewind(0, 0),
            lambda: cache.checkpoint(0),
            lambda: cache.place(Batch.of([2], 0), 1),
            lambda: cache.resize(3),
            cache.clear,
            cache.defrag,
            cache.update,
            cache.transaction,
        ]
        for verb in verbs:
            refused(cache, CacheError, "being decoded", verb)
        placement.release()
        placement.release()
        assert state(cache, 0) == (1,)

    def test_policies(self) -> None:
        with pytest.raises(OptionError, match="every=0"):
            CheckpointPolicy(every=0)
        with pytest.raises(OptionError, match="n_max is -1"):
            CheckpointBudget(-1)


class TestTakingBack:
    def test_a_failed_decode_changes_nothing(self) -> None:
        cache = cache_of(2)
        put(cache, 0, 1, 2)
        before = everything(cache)
        with pytest.raises(ArithmeticError, match="first"):
            fail(cache, Batch.of([3, 4], 0))
        assert everything(cache) == before
        put(cache, 0, 5)
        assert state(cache, 0) == (1, 2, 5)

    def test_checkpoints_given_up_for_it_come_back(self) -> None:
        cache = cache_of(3, n_rows=2)
        put(cache, 0, 1)
        cache.checkpoint(0)
        put(cache, 0, 2)
        before = everything(cache)
        with pytest.raises(ArithmeticError, match="first"):
            fail(cache, Batch.of([3], 0))  # into the row of the checkpoint
        assert everything(cache) == before
        assert cache.seq_rm(0, 1, -1)
        assert state(cache, 0) == (1,)

    def test_a_rollback_restores_everything(self) -> None:
        cache = cache_of(4)
        put(cache, 0, 1, 2)
        put(cache, 1, 7)
        before = everything(cache)
        with cache.transaction() as outer:
            put(cache, 0, 3, 4)
            cache.seq_cp(0, 1)
            with cache.transaction():
                cache.seq_add(1, -1, -1, 3)
                cache.rewind(0, 1)
            cache.clear()
            put(cache, 0, 8)
            outer.rollback()
        assert everything(cache) == before
        assert (state(cache, 0), state(cache, 1)) == ((1, 2), (7,))

    def test_a_transaction_that_is_kept(self) -> None:
        cache = cache_of(4)
        put(cache, 0, 1)
        with cache.transaction():
            put(cache, 0, 2)
            cache.clear()
            put(cache, 1, 5)
        assert (cache.used, state(cache, 1)) == (1, (5,))
        unused = cache.states.unused()
        assert all(store_of(cache).text(number) == () for number in unused)

    def test_rows_are_zeroed_when_the_outermost_is_kept(self) -> None:
        cache = cache_of()
        put(cache, 0, 1)
        old = row(cache, 0)
        with cache.transaction():
            with cache.transaction():
                cache.clear()
            assert store_of(cache).text(old) == (1,)
        assert store_of(cache).text(old) == ()

    def test_rows_that_it_may_want_back_are_not_filled(self) -> None:
        cache = cache_of(0, n_rows=2)
        put(cache, 0, 1)
        with cache.transaction() as t:
            put(cache, 0, 2)
            refused(cache, CacheFull, "transaction", lambda: put(cache, 0, 3))
            t.rollback()
        put(cache, 0, 4)
        assert state(cache, 0) == (1, 4)

    def test_those_outside_take_part(self) -> None:
        cache, told = cache_of(), list[str]()
        cache.watch(lambda: lambda: told.append("undone"))
        with cache.transaction():
            pass
        assert told == []
        cache.transaction().rollback()
        assert told == ["undone"]

    def test_the_order_of_ends(self) -> None:
        cache = cache_of()
        outer = cache.transaction()
        inner = cache.transaction()
        with pytest.raises(CacheError, match="end that one first"):
            outer.commit()
        with pytest.raises(CacheError, match="before resizing"):
            cache.resize(9)
        outer.rollback()
        assert not inner.is_open
        assert not cache.in_transaction
