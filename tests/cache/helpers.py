"""Short ways to build and fill caches in tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcellar.batch import Batch
from kvcellar.cache import AttentionCache, OnShared
from kvcellar.cellsets import pack_owners
from kvcellar.testing.machine import attention_spec
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import AnyArray


def make(
    size: int = 8,
    n_seq_max: int = 4,
    *,
    on_shared: OnShared = "copy",
    rope: bool = True,
    can_shift: bool = True,
    can_copy: bool = True,
) -> tuple[AttentionCache, SignatureStore]:
    """A cache and its store."""
    spec = attention_spec(size, n_seq_max, rope=rope)
    store = SignatureStore(spec, can_shift=can_shift, can_copy=can_copy)
    return AttentionCache(spec, store, on_shared), store


def put(
    cache: AttentionCache,
    seq_id: int | Sequence[int],
    n: int,
    start: int | None = None,
    n_ubatch: int = 512,
) -> list[int]:
    """Decode n tokens of a sequence; returns the cells they took."""
    positions = None if start is None else range(start, start + n)
    batch = Batch.of(range(100, 100 + n), seq_id, positions)
    store = cache.store
    with cache.place(batch, n_ubatch) as placement:
        for plan in placement.plans():
            if isinstance(store, SignatureStore):
                content = plan.micro.positions + 1000 * np.atleast_1d(seq_id)[0]
                store.fill(plan.cells, content.astype(np.int64), plan.micro.positions)
    cells: list[int] = placement.cells.tolist()
    return cells


def layout(cache: AttentionCache) -> str:
    """The owner of each cell: a digit, ``+`` for several, a dot for a free cell."""
    return str(cache.view()).split("\n", 1)[1].replace("\n", "")


def arrange(cache: AttentionCache, picture: str) -> None:
    """Fill an empty cache as in the picture, each sequence from position 0 on."""
    for seq in sorted({int(c) for c in picture if c.isdigit()}):
        cells = np.array([i for i, owner in enumerate(picture) if owner == str(seq)], np.int64)
        n = len(cells)
        positions = np.arange(n, dtype=np.int32)
        owners = pack_owners(np.arange(n), np.full(n, seq), n, len(cache.table.owners))
        cache.table.place(cells, positions, owners, positions + np.int32(100))
        if isinstance(cache.store, SignatureStore):
            cache.store.fill(cells, positions.astype(np.int64) + 1000 * seq, positions)
    cache.table.head = 0
    assert layout(cache) == picture


def snapshot(cache: AttentionCache) -> tuple[object, ...]:
    """All that a failed operation must leave as it was (invariant 5)."""
    table, store = cache.table, cache.store
    arrays: list[AnyArray] = [table.positions, table.pending, table.tokens, table.owners]
    if isinstance(store, SignatureStore):
        used = table.positions >= 0
        arrays += [store.content[used], store.rotation[used]]
    cache.check()
    return (*(a.tolist() for a in arrays), table.head, table.used, table.token_count)
