"""Transactions: what a rollback restores, what it may cost, how they nest and end."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.cache import AttentionCache, Transaction
from kvcellar.errors import AllocationError, CacheError, CacheFull, InvariantError
from kvcellar.testing.duel import snapshot as all_bytes
from kvcellar.testing.signs import Setup
from tests.cache.helpers import arrange, layout, make, put, snapshot
from tests.cache.stores import SETUPS, signed


class Failure(Exception):
    """Something that goes wrong within a transaction."""


def try_and_fail(cache: AttentionCache, work: Callable[[Transaction], object]) -> None:
    """Do something within a transaction, then fail."""
    with cache.transaction() as t:
        work(t)
        raise Failure


# -- what is restored


def turbulence(cache: AttentionCache, put: Callable[[int, int], object]) -> None:
    """Every verb, decodes, shifts and compaction."""
    cache.seq_rm(0, 1, 3)
    put(1, 2)
    cache.seq_cp(1, 2, 0, 3)
    cache.seq_add(1, 2, -1, 4)
    cache.update()
    cache.seq_div(0, 0, -1, 2)
    put(3, 3)
    cache.seq_rm(3, 0, 2)
    cache.defrag()
    cache.update()
    cache.seq_add(0, 0, -1, 3)
    cache.update()
    cache.seq_keep(1)
    put(1, 1)
    cache.clear()
    put(0, 2)


@pytest.mark.parametrize("setup", SETUPS)
def test_a_rollback_restores_every_cell_and_every_byte(setup: Setup) -> None:
    with signed(setup) as it:
        it.put(0, 5)
        it.put(1, 2)
        it.cache.seq_cp(0, 2, 0, 2)
        it.cache.seq_add(1, 0, -1, 1)
        before, rows = all_bytes(it.cache, only_used=True), [it.rows(s) for s in range(3)]

        with pytest.raises(Failure):
            try_and_fail(it.cache, lambda _: turbulence(it.cache, it.put))

        assert all_bytes(it.cache, only_used=True) == before
        assert [it.rows(s) for s in range(3)] == rows
        it.put(0, 3)
        it.check(0, [0, 1, 2, 3, 4, 5, 6, 7], turns=1)


@pytest.mark.parametrize("setup", SETUPS)
def test_what_is_committed_is_as_if_there_had_been_no_transaction(setup: Setup) -> None:
    with signed(setup, 32) as plain, signed(setup, 32) as tried:
        for it in (plain, tried):
            it.put(0, 5)
            it.put(1, 2)
        turbulence(plain.cache, plain.put)
        with tried.cache.transaction():
            turbulence(tried.cache, tried.put)

        for seq in range(4):
            assert tried.rows(seq) == plain.rows(seq)
            tokens = [c.cache.table.tokens_of(seq).tolist() for c in (plain, tried)]
            assert tokens[0] == tokens[1]


@pytest.mark.parametrize("setup", SETUPS)
def test_ten_rotations_are_taken_back_without_a_rounding(setup: Setup) -> None:
    with signed(setup) as it:
        it.put(0, 5)
        rows = it.rows(0)
        with it.cache.transaction() as t:
            for _ in range(10):
                it.cache.seq_add(0, 0, -1, 7)
                it.cache.update()
            t.rollback()
        assert it.rows(0) == rows


def test_a_pending_shift_is_pending_again() -> None:
    cache, store = make(8)
    put(cache, 0, 3)
    cache.seq_add(0, 1, -1, 4)
    with cache.transaction() as t:
        cache.update()
        cache.seq_add(0, 0, -1, 1)
        t.rollback()
    assert cache.table.pending[:3].tolist() == [0, 4, 4]
    assert store.rotation[:3].tolist() == [0, 1, 2]
    cache.update()
    assert store.rotation[:3].tolist() == [0, 5, 6]


def test_a_request_for_compaction_comes_back_and_goes() -> None:
    cache, _ = make(8)
    arrange(cache, "0.1.....")
    with cache.transaction() as t:
        cache.defrag()
        t.rollback()
    cache.update()
    assert layout(cache) == "0.1....."
    cache.defrag()
    with cache.transaction() as t:
        cache.clear()
        t.rollback()
    cache.update()
    assert layout(cache) == "01......"


def test_other_state_can_take_part() -> None:
    cache, _ = make(8)
    log: list[str] = []

    def remember(name: str) -> Callable[[], Callable[[], None]]:
        return lambda: lambda: log.append(name)

    cache.watch(remember("a"))
    cache.watch(remember("b"))
    with cache.transaction():
        pass
    assert log == []
    with cache.transaction() as t:
        t.rollback()
    assert log == ["b", "a"]


# -- cells that are kept


def test_cells_freed_inside_are_not_filled_again() -> None:
    cache, store = make(8)
    put(cache, 0, 4)
    with cache.transaction() as t:
        cache.seq_rm(0, 1, 3)
        assert put(cache, 1, 3) == [4, 5, 6]
        assert store.content[:4].tolist() == [0, 1, 2, 3]
        t.rollback()
    assert layout(cache) == "0000...."
    assert put(cache, 1, 3) == [4, 5, 6]


def test_cells_that_are_kept_do_not_count_as_free_and_the_message_says_so() -> None:
    cache, _ = make(8)
    put(cache, 0, 6)
    with cache.transaction():
        cache.seq_rm(0, 2, -1)
        before = snapshot(cache)
        with pytest.raises(CacheFull, match="3 cells needed, 2 free: 4 more are kept until the"):
            put(cache, 1, 3)
        assert snapshot(cache) == before
        put(cache, 1, 2)
    assert len(put(cache, 1, 4)) == 4


def test_a_copy_of_a_shared_cell_needs_a_cell_that_is_not_kept() -> None:
    cache, _ = make(5)
    put(cache, 0, 4)
    cache.seq_cp(0, 1)
    with cache.transaction():
        cache.seq_rm(0)
        cache.seq_cp(1, 0)
        cache.seq_rm(1, 3, -1)
        cache.seq_rm(0, 3, -1)
        before = snapshot(cache)
        with pytest.raises(CacheFull, match="1 more are kept"):
            cache.seq_add(1, 1, -1, 5)
        assert snapshot(cache) == before


def test_compaction_closes_up_around_what_is_kept() -> None:
    cache, store = make(12)
    arrange(cache, "0.0.........")
    with cache.transaction() as t:
        put(cache, 1, 5)
        cache.seq_rm(0, 1, -1)
        cache.seq_rm(1, 1, 3)
        assert layout(cache) == "0..1..11...."
        cache.defrag()
        cache.update()
        cache.check()
        assert layout(cache) == "01.11......."
        assert store.content[2] == 1
        t.rollback()
    assert layout(cache) == "0.0........."
    assert store.content[[0, 2]].tolist() == [0, 1]


def test_clear_zeroes_at_once_what_is_not_kept_and_the_rest_at_the_end() -> None:
    cache, store = make(6)
    put(cache, 0, 2)
    with cache.transaction(), cache.transaction():
        put(cache, 1, 2)
        cache.clear()
        assert store.content.tolist() == [0, 1, -1, -1, -1, -1]
    assert store.content.tolist() == [-1] * 6


def test_clear_without_data_zeroes_nothing() -> None:
    cache, store = make(4)
    put(cache, 0, 2)
    with cache.transaction():
        cache.clear(data=False)
    assert store.content[:2].tolist() == [0, 1]


def test_freed_rows_are_wiped_before_attention_sees_them_again() -> None:
    """Invariant 9, after the transaction that kept them."""
    cache, store = make(8)
    put(cache, 0, 4)
    with cache.transaction():
        cache.seq_rm(0, 1, 3)
        put(cache, 0, 1)
        assert store.content[1:3].tolist() == [1, 2]
    cache.table.head = 5
    put(cache, 0, 1)
    assert store.content[1:3].tolist() == [-1, -1]


def test_a_reserved_cell_cannot_be_filled_by_mistake() -> None:
    cache, _ = make(4)
    put(cache, 0, 2)
    with cache.transaction():
        cache.seq_rm(0)
        with pytest.raises(InvariantError, match=r"cells \[1\] are to be filled"):
            cache.table.place(
                np.array([1]), np.array([0], np.int32), np.ones((1, 1), np.uint64), None
            )


# -- nesting and ends


@pytest.mark.parametrize("setup", SETUPS)
def test_an_outer_rollback_takes_back_what_an_inner_one_committed(setup: Setup) -> None:
    with signed(setup) as it:
        it.put(0, 4)
        before = it.rows(0)
        with it.cache.transaction() as outer:
            it.cache.seq_add(0, 2, -1, 3)
            with it.cache.transaction():
                it.cache.update()
                it.put(1, 2)
                it.cache.seq_add(0, 0, -1, 5)
            it.cache.update()
            with it.cache.transaction():
                it.cache.seq_rm(0, 5, 6)
            outer.rollback()
        assert it.rows(0) == before
        assert it.cache.used == 4
        it.check(0, [0, 1, 2, 3])


@pytest.mark.parametrize("setup", SETUPS)
def test_rows_rotated_on_both_levels_go_back_to_where_the_outer_one_began(setup: Setup) -> None:
    with signed(setup) as it:
        it.put(0, 4)
        before = it.rows(0)
        with it.cache.transaction() as outer:
            it.cache.seq_add(0, 0, 3, 2)
            it.cache.update()
            for _ in range(2):
                with it.cache.transaction():
                    it.cache.seq_add(0, 0, -1, 1)
                    it.cache.update()
            outer.rollback()
        assert it.rows(0) == before


@pytest.mark.parametrize("setup", SETUPS)
def test_an_inner_rollback_leaves_the_outer_one_its_own(setup: Setup) -> None:
    with signed(setup) as it:
        it.put(0, 4)
        start = it.rows(0)
        with it.cache.transaction() as outer:
            it.cache.seq_add(0, 0, -1, 3)
            it.cache.update()
            it.put(1, 2)
            middle = it.rows(0), it.rows(1)
            with it.cache.transaction() as inner:
                it.cache.seq_add(0, 0, -1, 2)
                it.cache.seq_add(1, 0, -1, 2)
                it.cache.update()
                it.cache.seq_rm(1)
                inner.rollback()
            assert (it.rows(0), it.rows(1)) == middle
            outer.rollback()
        assert it.rows(0) == start
        assert it.cache.used == 4


def test_what_an_inner_one_freed_stays_kept_for_the_outer_one() -> None:
    cache, _ = make(6)
    put(cache, 0, 2)
    with cache.transaction() as outer:
        put(cache, 1, 2)
        with cache.transaction():
            cache.seq_rm(0)
            cache.seq_rm(1)
            assert cache.table.n_free() == 2
        assert cache.table.n_free() == 4
        put(cache, 2, 4)
        outer.rollback()
    assert layout(cache) == "00...."


def test_an_outer_rollback_ends_those_within() -> None:
    cache, _ = make(6)
    put(cache, 0, 2)
    before = snapshot(cache)
    with cache.transaction() as outer, cache.transaction() as inner:
        cache.seq_rm(0)
        outer.rollback()
        assert not outer.is_open
        assert not inner.is_open
        assert not cache.in_transaction
        inner.rollback()
    assert snapshot(cache) == before


def test_an_outer_one_cannot_be_committed_first() -> None:
    cache, _ = make(6)
    outer, inner = cache.transaction(), cache.transaction()
    with pytest.raises(CacheError, match="within this one is open"):
        outer.commit()
    inner.commit()
    outer.commit()
    assert not cache.in_transaction


def test_a_transaction_ends_once() -> None:
    cache, _ = make(6)
    with cache.transaction() as t:
        put(cache, 0, 1)
        t.commit()
        put(cache, 0, 1)
    assert cache.used == 2
    with pytest.raises(CacheError, match="is committed already"):
        t.commit()
    with pytest.raises(CacheError, match="is committed and cannot be taken back"):
        t.rollback()
    with cache.transaction() as t:
        t.rollback()
        t.rollback()
        put(cache, 0, 1)
    assert cache.used == 3
    with pytest.raises(CacheError, match="is rolled back already"):
        t.commit()


def test_an_exception_after_a_commit_passes() -> None:
    cache, _ = make(6)
    put(cache, 0, 1)
    with pytest.raises(Failure):
        try_and_fail(cache, Transaction.commit)
    assert cache.used == 1


# -- decoding and failing


def test_it_cannot_begin_while_a_batch_is_decoded() -> None:
    cache, _ = make(6)
    with cache.place(Batch.of([1]), 1), pytest.raises(CacheError, match="is being decoded"):
        cache.transaction()


def test_it_cannot_be_committed_while_a_batch_is_decoded() -> None:
    cache, _ = make(6)
    t = cache.transaction()
    placement = cache.place(Batch.of([1]), 1)
    with pytest.raises(CacheError, match="is being decoded"):
        t.commit()
    assert t.is_open
    placement.release()
    t.commit()


def test_leaving_while_a_batch_is_decoded_takes_all_back() -> None:
    cache, _ = make(6)
    put(cache, 0, 1)
    before = snapshot(cache)
    with pytest.raises(CacheError, match="is being decoded"), cache.transaction():
        held = cache.place(Batch.of([1], 1), 1)
    assert not held.is_open
    assert snapshot(cache) == before
    assert not cache.in_transaction


def test_a_failed_decode_inside_takes_back_only_itself() -> None:
    cache, _ = make(6)
    with cache.transaction():
        put(cache, 0, 2)
        before = snapshot(cache)
        with pytest.raises(Failure), cache.place(Batch.of([1, 2]), 1):
            raise Failure
        assert snapshot(cache) == before
    assert cache.used == 2


def test_without_memory_for_the_rows_nothing_is_rotated() -> None:
    cache, store = make(6)
    put(cache, 0, 2)
    cache.seq_add(0, 0, -1, 1)

    def fail(*_: object) -> NoReturn:
        raise MemoryError

    with cache.transaction():
        before = snapshot(cache)
        store.read_raw = fail  # type: ignore[assignment,method-assign]
        with pytest.raises(AllocationError, match="the rows that a rollback needs"):
            put(cache, 0, 1)
        assert snapshot(cache) == before
        del store.read_raw
    put(cache, 0, 1)


def test_sizes_cannot_change_inside() -> None:
    cache, _ = make(6)
    put(cache, 0, 1)
    with cache.transaction():
        before = snapshot(cache)
        with pytest.raises(CacheError, match="a transaction is open"):
            cache.resize(8)
        assert snapshot(cache) == before


def test_only_rows_that_are_rotated_are_kept() -> None:
    cache, _ = make(64)
    put(cache, 0, 40)
    with cache.transaction():
        put(cache, 1, 3)
        cache.seq_rm(0, 20, -1)
        for _ in range(3):
            cache.seq_add(0, 18, -1, 2)
            cache.seq_add(1, 0, -1, 2)
            cache.update()
        kept = cache._nest[-1].rows  # type: ignore[attr-defined]
        assert [cells.tolist() for cells, _ in kept._pieces] == [[18, 19]]
