"""Which older states go when rows or the budget run short, and what a row that is kept means."""

from __future__ import annotations

import pytest

from tests.cache.states import cache_of, everything, put, row, state, store_of


def test_the_oldest_makes_room_wherever_it_lies() -> None:
    cache = cache_of(3, n_rows=3)
    put(cache, 0, 1)
    put(cache, 0, 2)
    cache.checkpoint(0)
    put(cache, 0, 3)
    cache.checkpoint(0)
    older, newer = (kept.row for kept in cache.states.of[0].checkpoints)  # type: ignore[union-attr]
    assert older > newer, "the order of rows would do as well"
    put(cache, 0, 4)

    put(cache, 0, 5)

    assert cache.checkpoints(0) == (2,)
    assert cache.seq_rm(0, 3, -1)
    assert state(cache, 0) == (1, 2, 3)


def test_a_checkpoint_whose_row_is_in_use_would_make_no_room() -> None:
    cache = cache_of(3, n_rows=3)
    put(cache, 0, 1)
    cache.checkpoint(0)  # the state that it has
    put(cache, 1, 5)
    cache.checkpoint(1)
    put(cache, 1, 6)

    put(cache, 1, 7)

    assert (cache.checkpoints(0), cache.checkpoints(1)) == ((0,), ())
    assert (state(cache, 0), state(cache, 1)) == ((1,), (5, 6, 7))


def test_a_state_that_two_keep_counts_once_and_from_when_it_was_first_kept() -> None:
    cache = cache_of(2)
    put(cache, 0, 1)
    cache.seq_cp(0, 1)
    put(cache, 2, 5)
    cache.checkpoint(0)
    cache.checkpoint(2)
    cache.checkpoint(1)
    assert [cache.checkpoints(seq) for seq in range(3)] == [(0,), (0,), (0,)]

    put(cache, 3, 9)
    cache.checkpoint(3)

    assert [cache.checkpoints(seq) for seq in range(4)] == [(), (), (0,), (0,)]


@pytest.mark.parametrize(("p0", "p1"), [(2, 3), (2, 2), (9, 1), (4, 4)])
def test_a_checkpoint_does_not_help_where_the_end_is_to_stay(p0: int, p1: int) -> None:
    cache = cache_of(4)
    put(cache, 0, 1, 2)
    put(cache, 0, 3, 4, 5)
    assert cache.checkpoints(0) == (1, 4)
    before = everything(cache)

    assert not cache.seq_rm(0, p0, p1)

    assert everything(cache) == before


def test_what_an_inner_transaction_cleared_is_zeroed_when_all_have_ended() -> None:
    cache = cache_of()
    put(cache, 0, 1)
    old = row(cache, 0)
    with cache.transaction():
        with cache.transaction():
            cache.clear()
        assert store_of(cache).text(old) == (1,)  # a rollback may want it

    assert store_of(cache).text(old) == ()
