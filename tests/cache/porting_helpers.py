"""Caches whose rows tell what they are and whose stores fail on demand, for tests of porting."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from kvcellar.backends.base import Part
from kvcellar.batch import Batch
from kvcellar.cache import AttentionCache
from kvcellar.cache.base import Cache, CheckpointBudget, CheckpointPolicy
from kvcellar.cache.hybrid import HybridCache
from kvcellar.cache.recurrent import RecurrentCache, state_rows
from kvcellar.cache.sliding import SlidingCache, sliding_size
from kvcellar.testing.duel import snapshot
from kvcellar.testing.state_conformance import HistoryStore
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import (
    ByteArray,
    CacheSpec,
    Float32Array,
    Int64Array,
    KVType,
    LayerSpec,
    RopeSpec,
)

N_SEQ, WINDOW = 4, 3
SPOILT = -99
"""What stands in rows of a signature store that a failure left half written."""


def signed_layer(window: int = 0) -> LayerSpec:
    """A layer whose rows have as many bytes, as f32, as a signature store gives."""
    return LayerSpec(1, 4, 2, RopeSpec("normal", 2), window)


def port_spec(size: int, window: int = 0, n_layers: int = 1, n_seq_max: int = N_SEQ) -> CacheSpec:
    """A cache of such layers."""
    layers = (signed_layer(window),) * n_layers
    return CacheSpec(size, n_seq_max, layers, KVType.F32, KVType.F32, padding=8)


class Failing:
    """Raises at a call, when ``after`` calls have gone well."""

    def __init__(self) -> None:
        self.after: int | None = None
        self.error: BaseException = MemoryError("the store is broken")

    def call(self) -> bool:
        """Whether this is the call that fails."""
        if self.after is None:
            return False
        self.after -= 1
        return self.after < 0


class FailingStore(SignatureStore):
    """Spoils rows before it fails to write them."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self.failing = Failing()

    def write_raw(self, layer: int, part: Part, cells: Int64Array, rows: ByteArray) -> None:
        if self.failing.call():
            self.failing.after = None
            self.content[cells] = SPOILT
            raise self.failing.error
        super().write_raw(layer, part, cells, rows)


class FailingStates(HistoryStore):
    """Spoils states before it fails to write them."""

    def __init__(self, n_rows: int, n_seq_max: int) -> None:
        super().__init__(n_rows, n_seq_max)
        self.failing = Failing()

    def write(self, rows: Int64Array, states: Float32Array) -> None:
        if self.failing.call():
            self.failing.after = None
            self._numbers[rows] = np.nan
            raise self.failing.error
        super().write(rows, states)


def full(size: int = 24, *, window: int = 0, n_layers: int = 1) -> AttentionCache:
    """A cache that keeps everything."""
    spec = port_spec(size, window, n_layers)
    return AttentionCache(spec, FailingStore(spec))


def sliding(window: int = WINDOW, n_kept: int = 6, *, extra: int = 0) -> SlidingCache:
    """A cache that keeps what a window needs."""
    spec = port_spec(sliding_size(window, N_SEQ, 4) + extra, window)
    return SlidingCache(spec, FailingStore(spec), checkpoints=CheckpointBudget(n_kept))


def recurrent(
    n_kept: int = 6, *, n_rows: int | None = None, like: Cache | None = None
) -> RecurrentCache:
    """A cache of states; those of another know the same texts by the same numbers."""
    store = FailingStates(n_rows or state_rows(N_SEQ, n_kept), N_SEQ)
    if like is not None:
        store._texts = states_of(like)._texts
    return RecurrentCache(store, CheckpointPolicy(CheckpointBudget(n_kept), every=100))


def states_of(cache: Cache) -> FailingStates:
    """The store of the states of a cache."""
    (part,) = (part for part in cache.parts if isinstance(part, RecurrentCache))
    assert isinstance(part.store, FailingStates)
    return part.store


def hybrid(kinds: str, n_kept: int = 6, like: Cache | None = None, size: int = 24) -> HybridCache:
    """A cache of parts: ``f``ull, ``w``indow that slides, ``s``tates."""
    groups: list[AttentionCache] = []
    if "f" in kinds:
        groups.append(full(size))
    if "w" in kinds:
        groups.append(sliding(WINDOW, n_kept))
    return HybridCache(groups, recurrent(n_kept, like=like) if "s" in kinds else None)


def failing_of(cache: Cache, part: int) -> Failing:
    """What makes the store of a part fail."""
    of = cache.parts[part]
    assert isinstance(of, AttentionCache | RecurrentCache)
    assert isinstance(of.store, FailingStore | FailingStates)
    return of.store.failing


TOKENS = itertools.count(100)


def put(cache: Cache, seq_ids: int | Sequence[int], n: int, n_ubatch: int = 4) -> list[int]:
    """Decode n tokens that nobody has had before; a row's content is its token."""
    tokens = [next(TOKENS) for _ in range(n)]
    with cache.place(Batch.of(tokens, seq_ids), n_ubatch) as placement:
        for plan in placement.plans():
            ids = plan.micro.tokens
            assert ids is not None
            groups = [part for part in cache.parts if isinstance(part, AttentionCache)]
            for cells, part in zip(plan.groups, groups, strict=True):
                assert isinstance(part.store, SignatureStore)
                part.store.fill(cells.cells, ids.astype(np.int64), plan.micro.positions)
                assert_clean(part, cells.n_kv)
            if plan.states is not None:
                states_of(cache).absorb(plan)
    return tokens


def assert_clean(part: AttentionCache, n_kv: int) -> None:
    """Attention that looks at so many cells meets no row that was given up (invariant 9)."""
    assert isinstance(part.store, SignatureStore)
    free = part.table.positions[:n_kv] < 0
    if part.table.reserved is not None:
        free &= ~part.table.reserved[:n_kv]
    assert (part.store.content[:n_kv][free] == -1).all(), "rows of free cells are not wiped"


def everything(cache: Cache) -> list[object]:
    """All that a failed call must leave as it was."""
    found: list[object] = [cache.in_transaction]
    for part in cache.parts:
        part.check()
        if isinstance(part, AttentionCache):
            found.append(snapshot(part, only_used=True))
        if isinstance(part, SlidingCache):
            found += [*part._eviction.evicted, *part._checkpoints.save()]
        if isinstance(part, RecurrentCache):
            held = [one for one in part.states.of if one]
            rows = [row for one in held for row in sorted(one.rows)]
            found += [*part.states.of, *(states_of(cache).text(row) for row in rows)]
    return found


def check_texts(cache: Cache, texts: dict[int, list[tuple[int, int]]]) -> None:
    """Every part knows sequences to be these tokens at these positions, and has their bytes."""
    cache.check()
    for seq, text in texts.items():
        tokens = [token for token, _ in text]
        at = [position for _, position in text]
        for part in cache.parts:
            evicted, gone = list[int](), list[int]()
            if isinstance(part, SlidingCache):
                evicted = part.seq_evicted(seq).tolist()
                gone = part.seq_evicted_positions(seq).tolist()
            assert [*evicted, *part.seq_tokens(seq).tolist()] == tokens
            assert [*gone, *part.seq_positions(seq).tolist()] == at
            if isinstance(part, AttentionCache):
                assert isinstance(part.store, SignatureStore)
                cells = part.table.cells_of(seq)
                stands = part.table.positions[cells] - part.table.pending[cells]
                assert part.store.content[cells].tolist() == tokens[len(evicted) :]
                assert part.store.rotation[cells].tolist() == stands.tolist()
            if isinstance(part, RecurrentCache) and (held := part.states.of[seq]) is not None:
                assert states_of(cache).text(held.row) == tuple(tokens)
                for kept in held.checkpoints:
                    assert states_of(cache).text(kept.row) == tuple(tokens[: kept.n])


def text_of(cache: Cache, seq: int) -> list[tuple[int, int]]:
    """What the part that knows the most knows of a sequence: tokens with their positions."""
    part = cache.parts[0]
    tokens, at = part.seq_tokens(seq).tolist(), part.seq_positions(seq).tolist()
    if isinstance(part, SlidingCache):
        tokens = [*part.seq_evicted(seq).tolist(), *tokens]
        at = [*part.seq_evicted_positions(seq).tolist(), *at]
    return list(zip(tokens, at, strict=True))


def texts_to_come(
    source: Cache, target: Cache, moves: dict[int, int], p1: int, shift: int
) -> dict[int, list[tuple[int, int]]]:
    """What a target should hold once parts of texts replaced its own.

    Args:
        source: where they come from.
        target: as it is; sequences that no part goes to keep their texts.
        moves: of each sequence that gets one, whose it is.
        p1: the first position that is left behind; negative: none.
        shift: how far they move.
    """
    texts = {
        goal: [(token, at + shift) for token, at in text_of(source, seq) if p1 < 0 or at < p1]
        for goal, seq in moves.items()
    }
    return texts | {seq: text_of(target, seq) for seq in range(N_SEQ) if seq not in moves}
