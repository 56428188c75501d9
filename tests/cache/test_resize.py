"""More cells, or fewer, while sequences live."""

from __future__ import annotations

from typing import NoReturn

import pytest

from kvcellar.batch import Batch
from kvcellar.errors import AllocationError, CacheError, CacheFull, OptionError
from kvcellar.testing.duel import snapshot as all_bytes
from kvcellar.testing.signs import Setup
from tests.cache.helpers import arrange, layout, make, put, snapshot
from tests.cache.stores import SETUPS, signed


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("size", [9, 12, 16, 40])
def test_every_sequence_keeps_its_rows(setup: Setup, size: int) -> None:
    with signed(setup) as it:
        it.put(0, 4)
        it.put(1, 6)
        it.put(0, 3)
        it.cache.seq_cp(1, 2, 0, 2)
        it.cache.seq_rm(1, 2, 6)
        it.cache.seq_add(0, 2, -1, 3)
        rows, pending = [it.rows(s) for s in range(3)], it.cache.table.pending_cells()
        assert len(pending)

        it.cache.resize(size)

        assert it.cache.spec.size == it.store.spec.size == it.cache.table.size == size
        assert [it.rows(s) for s in range(3)] == rows
        assert len(it.cache.table.pending_cells()) == len(pending)
        it.update()
        it.check(0, [0, 1, 2, 3, 4, 5, 6])
        it.check(2, [1000, 1001])
        it.cache.seq_rm(0, 0, 2)
        it.put(1, size - it.cache.used)
        assert it.cache.used == size


def test_growing_leaves_cells_where_they_are() -> None:
    cache, _ = make(4)
    put(cache, 0, 4)
    cache.resize(7)
    assert layout(cache) == "0000..."
    assert cache.head == 0
    assert put(cache, 1, 3) == [4, 5, 6]


def test_shrinking_compacts_only_if_it_has_to() -> None:
    cache, store = make(8)
    arrange(cache, "0.1.....")
    cache.resize(4)
    assert layout(cache) == "0.1."
    cache.resize(2)
    assert layout(cache) == "01"
    assert store.content.tolist() == [0, 1000]
    assert cache.head == 0
    cache.check()


def test_a_head_behind_the_end_goes_to_the_start() -> None:
    cache, _ = make(8)
    cache.table.head = 7
    cache.resize(4)
    assert cache.head == 0
    cache.check()


@pytest.mark.parametrize("setup", SETUPS)
def test_too_few_cells_are_refused_unchanged(setup: Setup) -> None:
    with signed(setup) as it:
        it.put(0, 5)
        it.put(1, 3)
        it.cache.seq_rm(0, 1, 3)
        before = all_bytes(it.cache)
        with pytest.raises(
            CacheFull, match=r"6 cells needed, 5 free: resize\(5\) has no room"
        ) as e:
            it.cache.resize(5)
        assert (e.value.needed, e.value.free) == (6, 5)
        assert all_bytes(it.cache) == before
        assert it.cache.spec.size == 16


@pytest.mark.parametrize("size", [2, 20])
def test_without_memory_nothing_has_changed(size: int) -> None:
    cache, store = make(8)
    arrange(cache, "0.....1.")
    before = snapshot(cache)

    def fail(*_: object) -> NoReturn:
        raise AllocationError("the K/V buffer", 1)

    store.resize = fail  # type: ignore[assignment,method-assign]
    with pytest.raises(AllocationError):
        cache.resize(size)
    assert snapshot(cache) == before
    assert cache.spec.size == 8


def test_sizes_below_one_are_refused() -> None:
    cache, _ = make(4)
    with pytest.raises(OptionError, match="size=0"):
        cache.resize(0)


def test_it_waits_for_the_end_of_a_decode() -> None:
    cache, _ = make(4)
    with cache.place(Batch.of([1]), 1), pytest.raises(CacheError, match="is being decoded"):
        cache.resize(8)
    assert cache.spec.size == 4


def test_rows_freed_before_are_zero_afterwards() -> None:
    """A new buffer holds nothing but what is held: no stale row to wipe (invariant 9)."""
    cache, store = make(6)
    put(cache, 0, 4)
    cache.seq_rm(0, 1, 3)
    cache.resize(9)
    assert store.content.tolist() == [0, -1, -1, 3, -1, -1, -1, -1, -1]
    cache.seq_rm(0)
    put(cache, 1, 5)
    assert store.content.tolist() == [1000, 1001, 1002, 1003, 1004, -1, -1, -1, -1]


def test_thousands_of_owners_and_cells_survive() -> None:
    cache, _ = make(2000, 130)
    for seq in range(130):
        put(cache, seq, 10)
    for seq in range(0, 130, 2):
        cache.seq_rm(seq)
    cache.resize(700)
    cache.check()
    assert cache.used == 650
    assert cache.table.tokens_of(129).tolist() == list(range(100, 110))
    cache.resize(5000)
    cache.check()
    assert cache.seq_pos_max(1) == 9
