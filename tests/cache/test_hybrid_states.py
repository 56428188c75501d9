"""A group of K and V beside real states: what one of them refuses, neither has done."""

from __future__ import annotations

import pytest

from kvcellar.batch import Batch
from kvcellar.cache import AttentionCache, HybridCache
from kvcellar.cache.recurrent import RecurrentCache
from kvcellar.errors import BatchError, CacheFull, PositionError
from tests.cache.helpers import snapshot
from tests.cache.states import cache_of, everything, state, store_of
from tests.cache.toy_parts import group


def pair(n_kept: int = 4, n_rows: int | None = None) -> HybridCache:
    return HybridCache([group(24)], cache_of(n_kept, n_rows=n_rows))


def states_of(cache: HybridCache) -> RecurrentCache:
    assert isinstance(cache.states, RecurrentCache)
    return cache.states


def put(cache: HybridCache, seq: int | list[int], *tokens: int, at: int | None = None) -> None:
    places = None if at is None else range(at, at + len(tokens))
    with cache.place(Batch.of(tokens, seq, places), 4) as placement:
        for plan in placement.plans():
            store_of(states_of(cache)).absorb(plan)


def all_of(cache: HybridCache) -> tuple[object, ...]:
    (cells,) = cache.groups
    assert isinstance(cells, AttentionCache)
    return snapshot(cells), everything(states_of(cache))


def test_both_know_the_same() -> None:
    cache = pair()
    assert cache.has_states
    put(cache, 0, 1, 2, 3)
    put(cache, 0, 4)
    assert cache.seq_tokens(0).tolist() == [1, 2, 3, 4]
    assert state(states_of(cache), 0) == (1, 2, 3, 4)
    assert (cache.seq_pos_min(0), cache.seq_pos_max(0)) == (3, 3)
    cache.check()


def test_too_few_rows_leave_the_cells_alone() -> None:
    cache = pair(0, n_rows=2)
    put(cache, 0, 1)
    put(cache, 1, 1)
    before = all_of(cache)
    with pytest.raises(CacheFull, match="1 cell needed, 0 free"):
        put(cache, 0, 2)
    assert all_of(cache) == before


def test_too_few_cells_leave_the_rows_alone() -> None:
    cache = pair()
    put(cache, 0, *range(20))
    before = all_of(cache)
    with pytest.raises(CacheFull):
        put(cache, 1, *range(5))
    assert all_of(cache) == before


def test_gaps_and_mixtures_are_refused_though_cells_could_have_them() -> None:
    cache = pair()
    put(cache, 0, 1, 2)
    put(cache, 1, 1, 2)
    before = all_of(cache)
    with pytest.raises(PositionError, match=r"position 5.* ends at 1"):
        put(cache, 0, 9, at=5)
    with pytest.raises(BatchError):
        put(cache, [0, 1], 9)
    assert all_of(cache) == before


def test_a_part_goes_only_where_a_state_was_kept() -> None:
    cache = pair()
    put(cache, 0, 1, 2)
    put(cache, 0, 3, 4, 5)
    before = all_of(cache)
    for p0, p1 in ((3, -1), (1, 2), (0, 1)):
        assert not cache.seq_rm(0, p0, p1)
        assert all_of(cache) == before
    assert cache.seq_rm(0, 2, -1)
    assert cache.seq_tokens(0).tolist() == [1, 2]
    assert state(states_of(cache), 0) == (1, 2)


def test_going_back_takes_the_cells_along() -> None:
    cache = pair()
    put(cache, 0, 1, 2)
    put(cache, 0, 3, 4, 5)
    assert cache.rewind(0, 4) == 2
    assert cache.seq_tokens(0).tolist() == [1, 2]
    put(cache, 0, 9)
    assert state(states_of(cache), 0) == (1, 2, 9)


def test_a_checkpoint_is_that_of_the_states() -> None:
    cache = pair()
    put(cache, 0, 1)
    assert cache.checkpoint(0)
    put(cache, 0, 2)
    assert cache.seq_rm(0, 1, -1)
    assert state(states_of(cache), 0) == (1,)
    assert not pair(0).checkpoint(0)


def test_taking_back_is_for_both() -> None:
    cache = pair()
    put(cache, 0, 1, 2)
    before = all_of(cache)
    with cache.transaction() as t:
        put(cache, 0, 3)
        cache.seq_cp(0, 1)
        put(cache, 1, 4)
        t.rollback()
    assert all_of(cache) == before
