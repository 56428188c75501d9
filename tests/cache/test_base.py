"""What caches of every kind have in common: their properties, their guards, and seq_cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.batch import Batch
from kvcellar.cache.base import Cache
from kvcellar.errors import CacheError, CacheFull, OptionError, SequenceIdError
from kvcellar.testing.duel import snapshot
from kvcellar.types import MAX_POSITION
from tests.cache.kinds import (
    KINDS,
    N_SEQ,
    cache_of,
    everything,
    full,
    put,
    recurrent,
    states_of,
)

VERBS: tuple[Callable[[Cache], object], ...] = (
    lambda cache: cache.seq_rm(0),
    lambda cache: cache.seq_cp(0, 1),
    lambda cache: cache.seq_keep(0),
    lambda cache: cache.seq_add(0, -1, -1, 1),
    lambda cache: cache.seq_div(0, -1, -1, 2),
    lambda cache: cache.seq_cut(0, 0, 1),
    lambda cache: cache.clear(),
    lambda cache: cache.defrag(),
    lambda cache: cache.update(),
    lambda cache: cache.rewind(0, 1),
    lambda cache: cache.resize(48),
    lambda cache: cache.transaction(),
    lambda cache: cache.place(Batch.of([1], 1), 4),
)


@pytest.mark.parametrize("kind", KINDS)
def test_properties_say_what_callers_need(kind: str) -> None:
    cache = cache_of(kind)
    assert cache.has_states == any(part.has_states for part in cache.parts)
    assert cache.keeps_every_token == all(part.keeps_every_token for part in cache.parts)
    assert cache.keeps_every_token == (kind == "f")
    assert len(cache.store_specs) == len(cache.parts)
    assert cache.parts[0].spec == cache.spec


@pytest.mark.parametrize("verb", range(len(VERBS)))
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_edited_while_a_batch_is_decoded(kind: str, verb: int) -> None:
    cache = cache_of(kind)
    put(cache, 0, 3)
    placement = cache.place(Batch.of([1], 0), 4)
    states = [cache.is_decoding]
    with pytest.raises(CacheError, match="being decoded"):
        VERBS[verb](cache)
    placement.release()
    assert [*states, cache.is_decoding] == [True, False]
    assert cache.seq_count(0) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_size_is_checked_and_a_transaction_keeps_it(kind: str) -> None:
    cache = cache_of(kind)
    put(cache, 0, 3)
    size = cache.spec.size
    with cache.transaction(), pytest.raises(CacheError, match="before resizing"):
        cache.resize(size + 8)
    with pytest.raises(OptionError, match="size=0"):
        cache.resize(0)
    assert cache.spec.size == size
    other = size + 8 if size < MAX_POSITION else size - 8
    cache.resize(other)
    assert cache.spec.size == cache.parts[0].spec.size == other


@pytest.mark.parametrize("kind", KINDS)
def test_watchers_take_back_with_a_rollback(kind: str) -> None:
    cache, told = cache_of(kind), list[str]()

    def remember() -> Callable[[], None]:
        told.append("begun")
        return lambda: told.append("taken back")

    cache.watch(remember)
    with cache.transaction():
        pass
    with cache.transaction() as t:
        t.rollback()
    assert told == ["begun", "begun", "taken back"]


@given(
    st.integers(1, 8), st.integers(-1, 10), st.integers(-1, 10), st.integers(0, 8), st.booleans()
)
def test_a_cut_is_a_removal_and_a_move(n: int, p0: int, p1: int, shared: int, swap: bool) -> None:
    caches = (full(), full())
    for cache in caches:
        put(cache, 2, 2)
        put(cache, 0, n)
        cache.seq_cp(0, 1, shared, -1)
    cut, steps = caches
    seq = 1 if swap else 0
    assert cut.seq_cut(seq, p0, p1)
    lo, hi = max(p0, 0), p1 if p1 >= 0 else 99
    steps.seq_rm(seq, p0, p1)
    if lo < hi < 99:
        steps.seq_add(seq, hi, -1, lo - hi)
    for each in range(N_SEQ):
        assert cut.seq_positions(each).tolist() == steps.seq_positions(each).tolist()
    assert (cut.used, cut.token_count) == (steps.used, steps.token_count)
    snapshot(cut)
    cut.update()
    snapshot(cut)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_is_done_as_a_whole_or_not_at_all(kind: str) -> None:
    cache = cache_of(kind)
    put(cache, 0, 6)
    before = everything(cache)
    if cache.seq_cut(0, 1, 2):
        assert cache.seq_pos_max(0) == 4
        assert not cache.has_states
    else:
        assert everything(cache) == before
    with pytest.raises(SequenceIdError):
        cache.seq_cut(N_SEQ, 0, 1)


def test_a_cut_that_lacks_cells_for_copies_changes_nothing() -> None:
    cache = full(8)
    put(cache, 0, 8)
    cache.seq_cp(0, 1, 2, -1)
    before = everything(cache)
    with pytest.raises(CacheFull, match="have to be copied"):
        cache.seq_cut(0, 0, 1)
    assert everything(cache) == before


def test_what_is_shared_makes_no_room() -> None:
    cache = full(8)
    put(cache, 0, 6)
    cache.seq_cp(0, 1, 2, -1)
    assert cache.makes_room(0, 0, 2) is False  # two go, but four have to be copied
    assert cache.makes_room(0, 0, 2, in_place=False) is False
    assert cache.makes_room(1, 0, 2) is False
    cache.seq_rm(1)
    assert cache.makes_room(0, 0, 2) is True
    states = recurrent()
    put(states, 0, 3)
    assert states_of(states) is states.store
    assert states.makes_room(0, 0, 2) is True
