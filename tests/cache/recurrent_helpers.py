"""Short ways to build and fill caches of states in tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvcellar.batch import Batch
from kvcellar.cache import CheckpointBudget
from kvcellar.cache.checkpoints import CheckpointPolicy
from kvcellar.cache.recurrent import RecurrentCache, state_rows
from kvcellar.errors import KVCellarError
from kvcellar.plan import StatePlan
from kvcellar.testing.states import HistoryStore


def make(
    n_checkpoints: int = 0, n_seq_max: int = 4, *, every: int = 256, n_rows: int | None = None
) -> tuple[RecurrentCache, HistoryStore]:
    """A cache, and its store of histories."""
    if n_rows is None:
        n_rows = state_rows(n_seq_max, n_checkpoints)
    store = HistoryStore(n_rows, n_seq_max)
    policy = CheckpointPolicy(CheckpointBudget(n_checkpoints), every)
    return RecurrentCache(store, policy), store


def put(
    cache: RecurrentCache,
    seq_id: int | Sequence[int],
    tokens: Sequence[int],
    start: int | None = None,
    n_ubatch: int = 512,
) -> list[StatePlan]:
    """Decode tokens of a sequence; returns what was read and written."""
    positions = None if start is None else range(start, start + len(tokens))
    return decode(cache, Batch.of(tokens, seq_id, positions), n_ubatch)


def decode(cache: RecurrentCache, batch: Batch, n_ubatch: int = 512) -> list[StatePlan]:
    """Decode a batch."""
    plans = []
    with cache.place(batch, n_ubatch) as placement:
        for plan in placement.plans():
            store_of(cache).absorb(plan)
            assert plan.states is not None
            plans.append(plan.states)
    return plans


def store_of(cache: RecurrentCache) -> HistoryStore:
    """The store, of which it is known that it holds histories."""
    assert isinstance(cache.store, HistoryStore)
    return cache.store


def known(cache: RecurrentCache, seq_id: int) -> list[int]:
    """What a sequence's state has absorbed, by the store; the cache must say the same."""
    held = cache.states.of[seq_id]
    text = [] if held is None else list(store_of(cache).text(held.row))
    assert cache.seq_tokens(seq_id).tolist() == text
    return text


def everything(cache: RecurrentCache) -> tuple[object, ...]:
    """All that a failed operation must leave as it was; states are values that never change."""
    cache.check()
    store, held = store_of(cache), [one for one in cache.states.of if one]
    texts = [store.text(row) for one in held for row in sorted(one.rows)]
    return (*cache.states.of, texts, cache.spec, cache.in_transaction)


@contextmanager
def refused(cache: RecurrentCache, error: type[KVCellarError], match: str = "") -> Iterator[None]:
    """What happens inside raises that error and changes nothing."""
    before = everything(cache)
    with pytest.raises(error, match=match):
        yield
    assert everything(cache) == before
