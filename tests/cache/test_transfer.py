"""Sequences exported and imported: all parts get their share or none does, whatever fails."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.batch import Batch
from kvcellar.cache import AttentionCache
from kvcellar.cache.base import Cache
from kvcellar.cache.content import SequenceData
from kvcellar.cache.hybrid import HybridCache
from kvcellar.cache.recurrent import RecurrentCache
from kvcellar.cache.sliding import SlidingCache
from kvcellar.cache.transfer import state_get, state_set
from kvcellar.errors import (
    AllocationError,
    CacheError,
    CacheFull,
    KVCellarError,
    NotSupported,
    PositionError,
    SnapshotMismatch,
)
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import MAX_POSITION
from tests.cache.kinds import (
    KINDS,
    N_SEQ,
    SPOILT,
    cache_of,
    check_texts,
    everything,
    failing_of,
    full,
    hybrid,
    put,
    recurrent,
    sliding,
    states_of,
    text_of,
    texts_to_come,
)
from tests.profiles import examples

NOT_FULL = [kinds for kinds in KINDS if kinds != "f"]  # what cannot be cut wherever one likes
SEQS = st.integers(0, N_SEQ - 1)
OPS = st.one_of(
    st.tuples(st.just("put"), SEQS, st.integers(1, 5)),
    st.tuples(st.just("put"), SEQS, st.integers(1, 5)),
    st.tuples(st.just("seq_cp"), SEQS, SEQS),
    st.tuples(st.just("rewind"), SEQS, st.integers(0, 6)),
    st.tuples(st.just("seq_rm"), SEQS),
    st.tuples(st.just("seq_add"), SEQS, st.just(-1), st.just(-1), st.integers(0, 3)),
    st.tuples(st.sampled_from(["defrag", "checkpoint"]), SEQS),
)
HISTORY = st.lists(OPS, min_size=2, max_size=8)


def run(cache: Cache, ops: Sequence[tuple[object, ...]]) -> None:
    """Give a cache a history."""
    for name, *args in ops:
        numbers = [int(str(arg)) for arg in args]
        if name == "put":
            if cache.used + 5 < cache.spec.size:
                put(cache, *numbers)
        elif name == "defrag":
            cache.defrag()
        else:
            getattr(cache, str(name))(*numbers)


@examples(140)
@given(
    st.sampled_from(["s"] * 3 + list(KINDS)),
    HISTORY,
    HISTORY,
    st.lists(SEQS, unique=True, min_size=1, max_size=3),
    st.permutations(range(N_SEQ)),
    st.sampled_from([-1] * 4 + [2, 3, 4, 5]),
    st.sampled_from([0, 0, 2, -1]),
    st.sampled_from([6, 30]),
)
def test_all_parts_know_the_same_texts_or_nothing_has_changed(
    kinds: str,
    history: list[tuple[object, ...]],
    other_history: list[tuple[object, ...]],
    seq_ids: list[int],
    goals: list[int],
    p1: int,
    shift: int,
    n_kept: int,
) -> None:
    source = cache_of(kinds)
    target = cache_of(kinds, n_kept, like=source)
    run(source, history)
    run(target, other_history)
    goals = goals[: len(seq_ids)]
    source.update()
    before = everything(source)
    try:
        content = state_get(source, seq_ids, -1, p1)
    except NotSupported:
        assert p1 >= 0
        assert kinds != "s" or any(_is_cut(source, seq, p1) for seq in seq_ids)
        return
    finally:
        assert everything(source) == before
    for seq in goals:
        target.seq_rm(seq)
    moves = dict(zip(goals, seq_ids, strict=True))
    texts = texts_to_come(source, target, moves, p1, shift)
    before = everything(target)
    try:
        state_set(target, content, goals, shift=shift)
    except (PositionError, CacheFull):
        assert shift < 0 or target.n_free() < len(content.groups[0].positions)
        assert everything(target) == before
        return
    check_texts(target, texts)
    target.update()
    check_texts(target, texts)
    if isinstance(source, RecurrentCache) and isinstance(target, RecurrentCache):
        _check_sharing(source, target, moves, p1)
        _check_going_back(source, target, moves, p1, shift, n_kept > 6)
    for seq in range(N_SEQ):
        if n_free := target.n_free():
            put(target, seq, min(n_free, 2))
    target.check()


def _is_cut(cache: Cache, seq: int, p1: int) -> bool:
    """Whether a state would have to forget tokens, and no checkpoint of it ends there."""
    assert isinstance(cache, RecurrentCache)
    return cache.seq_pos_max(seq) >= p1 and p1 - 1 not in cache.checkpoints(seq)


def _check_sharing(
    source: RecurrentCache, target: RecurrentCache, moves: dict[int, int], p1: int
) -> None:
    """Sequences that shared a state share one, and no others do."""
    if p1 >= 0:
        return  # going back may make them share what they did not share at their ends
    old, new = source.states.rows(), target.states.rows()
    for a, b in itertools.combinations(moves, 2):
        assert (old[moves[a]] == old[moves[b]]) == (new[a] == new[b])


def _check_going_back(
    source: RecurrentCache,
    target: RecurrentCache,
    moves: dict[int, int],
    p1: int,
    shift: int,
    all_fit: bool,
) -> None:
    """The target can go back to what the source can, as far as its budget goes."""
    for goal, seq in moves.items():
        back = {
            end + shift: [(token, at + shift) for token, at in text]
            for end, text in _going_back(source, seq).items()
            if p1 < 0 or end < p1
        }
        mine = _going_back(target, goal)
        assert mine.items() <= back.items()
        assert not all_fit or mine == back


def _going_back(cache: RecurrentCache, seq: int) -> dict[int, list[tuple[int, int]]]:
    """What is left of a sequence after going back to each of its checkpoints."""
    left = {}
    for end in cache.checkpoints(seq):
        with cache.transaction() as attempt:
            assert cache.rewind(seq, end + 1) == end + 1
            left[end] = text_of(cache, seq)
            check_texts(cache, {seq: left[end]})
            attempt.rollback()
    return left


@pytest.mark.parametrize("kinds", ["fws", "ws", "fw", "w"])
def test_going_back_after_a_load_gives_what_it_gave_before(kinds: str) -> None:
    source = cache_of(kinds, size=40)
    target = cache_of(kinds, like=source, size=40)
    for n in (5, 7, 4):
        put(source, 0, n)
    text = text_of(source, 0)
    put(target, 1, 3)
    state_set(target, state_get(source, [0]), [3])
    for end in (16, 12, 5):
        assert source.rewind(0, end) == target.rewind(3, end) == end
        check_texts(target, {3: text[:end]})
        check_texts(source, {0: text[:end]})
    put(target, 3, 9)
    earlier = state_get(source, [0], -1, 5)
    state_set(target, earlier, [2])
    check_texts(target, {2: text[:5]})


# -- failures


def prepared(kinds: str) -> tuple[Cache, SequenceData]:
    """A cache that is in use, whose cells are scattered, and a content that fits into it."""
    source = cache_of(kinds)
    target = cache_of(kinds, like=source, size=40)
    put(source, 0, 4)
    source.seq_cp(0, 1)
    put(source, 0, 5)
    put(source, 1, 1)
    put(target, 3, 6)
    put(target, 2, 3)
    target.rewind(3, 6)
    put(target, 3, 3)
    target.seq_rm(2)
    return target, state_get(source, [0, 1])


def assert_usable(cache: Cache) -> None:
    """No row that a failure spoilt is met by what comes next."""
    for seq in range(N_SEQ):
        put(cache, seq, 1)
    for part in cache.parts:
        part.check()
        if isinstance(part, AttentionCache):
            assert isinstance(part.store, SignatureStore)
            top = part.table.n_kv(part.spec.padding)
            assert (part.store.content[:top] != SPOILT).all()


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize(
    "error", [MemoryError(), KeyboardInterrupt(), AllocationError("rows", 1), CacheError("no")]
)
def test_a_store_that_fails_half_way_leaves_every_part_as_it_was(
    kinds: str, after: int, error: BaseException
) -> None:
    for part in range(len(kinds)):
        target, content = prepared(kinds)
        before = everything(target)
        failing = failing_of(target, part)
        is_states = "s" in kinds and part == len(kinds) - 1
        failing.after, failing.error = 0 if is_states else after, error
        with pytest.raises(type(error)):
            state_set(target, content, [0, 1])
        assert everything(target) == before
        assert_usable(target)


def test_rows_that_a_failure_left_are_wiped_only_if_they_were_known() -> None:
    target, content = prepared("fw")
    part = target.parts[0]
    assert isinstance(part, AttentionCache)
    part._sync.before_writing = lambda cells: None  # type: ignore[method-assign]  # noqa: ARG005
    failing_of(target, 0).after = 0
    with pytest.raises(MemoryError):
        state_set(target, content, [0, 1])
    with pytest.raises(AssertionError, match="not wiped"):
        assert_usable(target)


@pytest.mark.parametrize("kinds", KINDS)
def test_an_open_transaction_survives_a_load_that_fails_and_takes_back_one_that_does_not(
    kinds: str,
) -> None:
    target, content = prepared(kinds)
    before = everything(target)
    with target.transaction() as attempt:
        put(target, 3, 1)
        inside = everything(target)
        failing_of(target, len(kinds) - 1).after = 0
        with pytest.raises(MemoryError):
            state_set(target, content, [0, 1])
        assert everything(target) == inside
        state_set(target, content, [0, 1])
        taken = state_get(target, [1, 0])
        state_set(target, state_get(target, [0]), [2], shift=2)
        check_texts(target, {2: [(token, at + 2) for token, at in text_of(target, 0)]})
        assert taken.span(1) == content.span(0)
        attempt.rollback()
    assert everything(target) == before
    assert_usable(target)


def test_no_room_in_the_second_part_leaves_the_first_as_it_was() -> None:
    source = HybridCache([full(), full(window=3)])
    put(source, 0, 6)
    content = state_get(source, [0])
    target = HybridCache([full(24), full(8, window=3)])
    put(target, 1, 3)
    before = everything(target)
    with pytest.raises(CacheFull, match="6 cells needed, 5 free"):
        state_set(target, content, [0])
    assert everything(target) == before
    put(target, 0, 5)


def test_no_row_for_a_state_leaves_cells_as_they_were() -> None:
    source = hybrid("fws")
    put(source, 0, 9)
    put(source, 1, 2)
    target = HybridCache([full(), sliding()], recurrent(0, n_rows=2, like=source))
    put(target, 3, 2)
    content, before = state_get(source, [0, 1]), everything(target)
    with pytest.raises(CacheFull, match="all rows of states"):
        state_set(target, content, [0, 1])
    assert everything(target) == before
    put(target, 3, 4)


@pytest.mark.parametrize(
    ("one", "other"), [("fw", "fs"), ("fs", "fws"), ("fws", "fw"), ("ws", "fws")]
)
def test_caches_of_other_parts_are_refused(one: str, other: str) -> None:
    source, target = hybrid(one), hybrid(other)
    put(source, 0, 3)
    put(target, 1, 3)
    content, before = state_get(source, [0]), everything(target)
    with pytest.raises(SnapshotMismatch, match=r"groups of K and V|recurrent states"):
        state_set(target, content, [0])
    assert everything(target) == before


def test_a_full_window_in_a_hybrid_takes_pieces_and_refuses_what_slid() -> None:
    source, target = hybrid("fw"), HybridCache([full(), full(window=3)])
    put(source, 0, 20)
    before = everything(target)
    with pytest.raises(SnapshotMismatch, match="swa_full"):
        state_set(target, state_get(source, [0]), [0])
    assert everything(target) == before
    put(target, 1, 7)
    for lo, hi in ((0, 3), (3, 7)):
        state_set(target, state_get(target, [1], lo, hi), [2])
    check_texts(target, {2: text_of(target, 1)})


@pytest.mark.parametrize("kinds", ["fw", "fws", "f", "w", "s"])
def test_what_the_user_interrupts_is_retried(kinds: str) -> None:
    target, content = prepared(kinds)
    failing = failing_of(target, int(len(kinds) > 1))
    failing.after, failing.error = 0, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        state_set(target, content, [0, 1])
    state_set(target, content, [0, 1])
    assert content.span(0) == (0, 8)
    check_texts(target, {0: text_of(target, 0), 1: text_of(target, 1)})
    assert [at for _, at in text_of(target, 0)] == list(range(9))
    if "s" in kinds:
        assert states_of(target).broken is None
    with pytest.raises(KVCellarError, match=r"not empty|load it behind"):
        state_set(target, content, [0, 1])


@pytest.mark.parametrize("kinds", NOT_FULL)
def test_what_was_known_earlier_is_taken_within_a_transaction_too(kinds: str) -> None:
    cache = cache_of(kinds, size=40)
    put(cache, 0, 5)
    cache.seq_cp(0, 1)
    put(cache, 0, 4)
    text, before = text_of(cache, 0), everything(cache)
    with cache.transaction() as attempt:
        put(cache, 0, 14)
        put(cache, 1, 2)
        inside = everything(cache)
        content = state_get(cache, [0, 1], -1, 5)
        with pytest.raises(NotSupported, match="cannot be taken up to 7"):
            state_get(cache, [0], -1, 7)
        assert everything(cache) == inside
        state_set(cache, content, [2, 3])
        check_texts(cache, {2: text[:5], 3: text[:5]})
        attempt.rollback()
    assert everything(cache) == before
    put(cache, 1, 3)


@pytest.mark.parametrize("kinds", KINDS)
def test_nothing_is_taken_or_put_in_while_a_batch_is_decoded(kinds: str) -> None:
    cache = cache_of(kinds)
    put(cache, 0, 5)
    content, before = state_get(cache, [0]), everything(cache)
    with cache.place(Batch.of([1, 2], 1), 4) as placement:
        during = tables(cache)
        for p1 in (-1, 3):
            with pytest.raises(CacheError, match="being decoded"):
                state_get(cache, [0], -1, p1)
        with pytest.raises(CacheError, match="being decoded"):
            state_set(cache, content, [2])
        assert cache.is_decoding
        assert tables(cache) == during
        placement.release()
    assert everything(cache) == before


def tables(cache: Cache) -> list[bytes]:
    """The cells of all parts, which a check would refuse while a batch is decoded."""
    groups = [part for part in cache.parts if isinstance(part, AttentionCache)]
    return [array.tobytes() for part in groups for array in part.table.save().arrays]


# -- what is neither plain nor empty


@pytest.mark.parametrize("kinds", KINDS)
def test_a_sequence_that_is_empty_there_stays_as_it_is_here(kinds: str) -> None:
    source = cache_of(kinds)
    target = cache_of(kinds, like=source)
    for cache in (source, target):
        put(cache, 0, 4)
        cache.seq_cp(0, 1)
        put(cache, 0, 8)
        put(cache, 1, 1)
    text, ends = text_of(target, 0), checkpoints(target, 0)
    target.seq_rm(1, -1, -1)
    state_set(target, state_get(source, [3, 1]), [0, 1])
    assert checkpoints(target, 0) == ends
    check_texts(target, {0: text, 1: text_of(source, 1)})


def checkpoints(cache: Cache, seq: int) -> list[tuple[int, ...]]:
    """Where the parts of a cache can go back to."""
    parts = [one for one in cache.parts if isinstance(one, SlidingCache | RecurrentCache)]
    return [part.checkpoints(seq) for part in parts]


@pytest.mark.parametrize("kinds", NOT_FULL)
def test_neither_a_window_nor_a_state_can_be_cut_or_added_to(kinds: str) -> None:
    cache = cache_of(kinds, size=40)
    put(cache, 0, 4)
    cache.seq_cp(0, 1)
    put(cache, 0, 12)
    put(cache, 1, 1)
    before = everything(cache)
    with pytest.raises(NotSupported, match=r"up to 6: no state or window is kept .* ends at 4"):
        state_get(cache, [0], -1, 6)
    assert everything(cache) == before
    whole, piece = state_get(cache, [0]), state_get(cache, [0], 4)
    assert everything(cache) == before
    with pytest.raises(NotSupported, match="begins at position 4"):
        state_set(cache, piece, [2])
    with pytest.raises(NotSupported, match="sequence 1 is not empty"):
        state_set(cache, whole, [1], shift=20)
    with pytest.raises(PositionError, match="below 0"):
        state_set(cache, whole, [2], shift=-1)
    with pytest.raises(PositionError, match="largest"):
        state_set(cache, whole, [2], shift=MAX_POSITION - 15)
    assert everything(cache) == before
