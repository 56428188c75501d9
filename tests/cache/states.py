"""A small cache of states whose store knows what each state has absorbed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvcellar.batch import Batch
from kvcellar.cache.base import CheckpointBudget, CheckpointPolicy
from kvcellar.cache.recurrent import RecurrentCache, state_rows
from kvcellar.errors import (
    KVCellarError,
)
from kvcellar.testing.state_conformance import HistoryStore

N_SEQ = 4


def cache_of(
    n_kept: int = 0, *, every: int = 1000, n_rows: int | None = None, size: int = 64
) -> RecurrentCache:
    """A cache of a few sequences that may keep so many older states."""
    store = HistoryStore(n_rows or state_rows(N_SEQ, n_kept), N_SEQ)
    return RecurrentCache(store, CheckpointPolicy(CheckpointBudget(n_kept), every), size=size)


def store_of(cache: RecurrentCache) -> HistoryStore:
    assert isinstance(cache.store, HistoryStore)
    return cache.store


def compute(cache: RecurrentCache, batch: Batch, n_ubatch: int = 512) -> None:
    with cache.place(batch, n_ubatch) as placement:
        for plan in placement.plans():
            store_of(cache).absorb(plan)


def put(
    cache: RecurrentCache, seq: int | Sequence[int], *tokens: int, at: int | None = None
) -> None:
    """Decode tokens of a sequence, or of several that share them, in one batch."""
    places = None if at is None else range(at, at + len(tokens))
    compute(cache, Batch.of(tokens, seq, places))


def state(cache: RecurrentCache, seq: int) -> tuple[int, ...]:
    """What the sequence's state has absorbed, by its bytes."""
    held = cache.states.of[seq]
    return () if held is None else store_of(cache).text(held.row)


def row(cache: RecurrentCache, seq: int) -> int:
    return cache.states.rows()[seq]


def everything(cache: RecurrentCache) -> tuple[object, ...]:
    """All that a refusal must leave as it was."""
    held = [one for one in cache.states.of if one]
    texts = [store_of(cache).text(number) for one in held for number in sorted(one.rows)]
    return (*cache.states.of, *texts, cache.spec, cache.in_transaction, cache.is_decoding)


def refused(
    cache: RecurrentCache, error: type[KVCellarError], match: str, verb: Callable[[], object]
) -> None:
    before = everything(cache)
    with pytest.raises(error, match=match):
        verb()
    assert everything(cache) == before
    cache.check()


def fail(cache: RecurrentCache, batch: Batch) -> None:
    """Fail in the middle of a batch's first microbatch."""
    with cache.place(batch, 1) as placement:
        for plan in placement.plans():
            store_of(cache).spoil(plan)
            raise ArithmeticError("the first microbatch fails")
