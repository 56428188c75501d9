"""States taken out and put in: what they absorbed, who shares them, what they can go back to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cache.recurrent import RecurrentCache
from kvcellar.cache.transfer import state_get, state_set
from kvcellar.errors import CacheError, CacheFull, NotSupported, PositionError
from kvcellar.types import MAX_POSITION
from tests.cache.porting_helpers import (
    N_SEQ,
    check_texts,
    everything,
    put,
    recurrent,
    text_of,
    texts_to_come,
)
from tests.profiles import examples

SEQS = st.integers(0, N_SEQ - 1)
OPS = st.one_of(
    st.tuples(st.just("put"), SEQS, st.integers(1, 4)),
    st.tuples(st.just("put"), SEQS, st.integers(1, 4)),
    st.tuples(st.just("seq_cp"), SEQS, SEQS),
    st.tuples(st.just("rewind"), SEQS, st.integers(0, 6)),
    st.tuples(st.just("seq_rm"), SEQS),
    st.tuples(st.just("seq_add"), SEQS, st.just(-1), st.just(-1), st.integers(0, 3)),
    st.tuples(st.just("checkpoint"), SEQS),
)
HISTORY = st.lists(OPS, min_size=2, max_size=8)


def run(cache: RecurrentCache, ops: Sequence[tuple[object, ...]]) -> None:
    """Give a cache a history."""
    for name, *args in ops:
        numbers = [int(str(arg)) for arg in args]
        if name == "put":
            put(cache, *numbers)
        else:
            getattr(cache, str(name))(*numbers)


def going_back(cache: RecurrentCache, seq: int) -> dict[int, list[tuple[int, int]]]:
    """What is left of a sequence after going back to each of its checkpoints."""
    left = {}
    for end in cache.checkpoints(seq):
        with cache.transaction() as attempt:
            assert cache.rewind(seq, end + 1) == end + 1
            left[end] = text_of(cache, seq)
            check_texts(cache, {seq: left[end]})
            attempt.rollback()
    return left


@examples(120)
@given(
    HISTORY,
    HISTORY,
    st.lists(SEQS, unique=True, min_size=1, max_size=3),
    st.permutations(range(N_SEQ)),
    st.sampled_from([-1, -1, 2, 4]),
    st.sampled_from([0, 0, 2, -1]),
    st.sampled_from([6, 30]),
)
def test_states_come_along_with_their_texts_and_what_they_can_go_back_to(
    history: list[tuple[object, ...]],
    other_history: list[tuple[object, ...]],
    seq_ids: list[int],
    goals: list[int],
    p1: int,
    shift: int,
    n_kept: int,
) -> None:
    source = recurrent(n_kept=6)
    target = recurrent(n_kept=n_kept, like=source)
    run(source, history)
    run(target, other_history)
    goals = goals[: len(seq_ids)]
    before = everything(source)
    try:
        content = state_get(source, seq_ids, -1, p1)
    except NotSupported:
        assert any(source.seq_pos_max(seq) >= p1 not in _ends(source, seq) for seq in seq_ids)
        return
    finally:
        assert everything(source) == before
    for seq in goals:
        target.seq_rm(seq)
    moves = dict(zip(goals, seq_ids, strict=True))
    wanted = texts_to_come(source, target, moves, p1, shift)
    before = everything(target)
    try:
        state_set(target, content, goals, shift=shift)
    except PositionError:
        assert shift < 0
        assert everything(target) == before
        return
    check_texts(target, wanted)
    _check_sharing(source, target, seq_ids, goals, p1)
    for goal, seq in zip(goals, seq_ids, strict=True):
        back = {
            end + shift: [(token, at + shift) for token, at in text]
            for end, text in going_back(source, seq).items()
            if p1 < 0 or end < p1
        }
        mine = going_back(target, goal)
        assert mine.items() <= back.items()
        assert n_kept == 6 or mine == back
    for seq in range(N_SEQ):
        put(target, seq, 2)
    target.check()


def _ends(cache: RecurrentCache, seq: int) -> list[int]:
    return [end + 1 for end in cache.checkpoints(seq)]


def _check_sharing(
    source: RecurrentCache,
    target: RecurrentCache,
    seq_ids: Sequence[int],
    goals: Sequence[int],
    p1: int,
) -> None:
    """Sequences that shared a state share one, and no others do."""
    if p1 >= 0:
        return  # going back may make them share what they did not share at their ends
    for a, b in itertools.combinations(range(len(seq_ids)), 2):
        old = [source.states.rows()[seq_ids[i]] for i in (a, b)]
        new = [target.states.rows()[goals[i]] for i in (a, b)]
        assert (old[0] == old[1]) == (new[0] == new[1])


# -- one by one


def test_shared_states_take_one_row() -> None:
    source = recurrent()
    put(source, 0, 3)
    for seq in (1, 2):
        source.seq_cp(0, seq)
    put(source, 2, 1)
    target = recurrent(like=source)
    content = state_get(source, [0, 1, 2], checkpoints=False)
    assert content.states is not None
    assert content.states.states.shape == (2, 1)
    state_set(target, content, [3, 0, 1])
    assert target.used == 2
    assert target.states.of[3] is target.states.of[0]
    assert target.checkpoints(1) == ()
    check_texts(target, {3: text_of(source, 0), 0: text_of(source, 0), 1: text_of(source, 2)})


def test_the_budget_keeps_the_latest_checkpoints() -> None:
    source = recurrent()
    for _ in range(4):
        put(source, 0, 2)
    assert source.checkpoints(0) == (1, 3, 5, 7)
    content = state_get(source, [0])
    for n_kept, ends in ((0, ()), (2, (5, 7)), (3, (3, 5, 7))):
        target = recurrent(n_kept, like=source)
        state_set(target, content, [1])
        assert target.checkpoints(1) == ends
        assert target.rewind(1, 6) == (0 if n_kept == 0 else 6)
        target.check()


def test_short_rows_take_checkpoints_first_and_then_the_place_of_states() -> None:
    source = recurrent()
    put(source, 0, 2)
    put(source, 0, 2)
    put(source, 1, 1)
    content = state_get(source, [0, 1])
    target = recurrent(like=source, n_rows=3)
    put(target, 3, 1)
    state_set(target, content, [0, 1])
    assert target.checkpoints(0) == (3,)  # the state itself is one: it needs no row of its own
    check_texts(target, {0: text_of(source, 0), 1: text_of(source, 1)})
    full = recurrent(like=source, n_rows=2)
    put(full, 3, 1)
    before = everything(full)
    with pytest.raises(CacheFull, match="2 cells needed, 1 free: all rows of states"):
        state_set(full, content, [0, 1])
    assert everything(full) == before


def test_within_a_transaction_rows_that_it_wants_back_are_not_filled() -> None:
    source = recurrent()
    put(source, 0, 2)
    target = recurrent(0, like=source, n_rows=2)
    put(target, 1, 1)
    before = everything(target)
    with target.transaction() as attempt:
        target.seq_rm(1)
        state_set(target, state_get(source, [0]), [1])
        target.seq_rm(1)
        state_set(target, state_get(source, [0]), [2])
        check_texts(target, {2: text_of(source, 0)})
        attempt.rollback()
    assert everything(target) == before


def test_a_state_cannot_be_cut_or_added_to() -> None:
    cache = recurrent()
    put(cache, 0, 3)
    put(cache, 0, 3)
    before = everything(cache)
    with pytest.raises(NotSupported, match=r"cannot be taken up to 5: .* ends at 3"):
        state_get(cache, [0], -1, 5)
    assert everything(cache) == before
    whole, piece = state_get(cache, [0]), state_get(cache, [0], 3)
    with pytest.raises(NotSupported, match="begins at position 3"):
        state_set(cache, piece, [1])
    with pytest.raises(NotSupported, match="sequence 0 is not empty"):
        state_set(cache, whole, [0], shift=6)
    with pytest.raises(PositionError, match="below 0"):
        state_set(cache, whole, [1], shift=-1)
    with pytest.raises(PositionError, match="largest"):
        state_set(cache, whole, [1], shift=MAX_POSITION - 5)
    assert everything(cache) == before
    assert piece.states is not None
    assert piece.states.held[0] is not None
    assert piece.states.held[0].positions.tolist() == [3, 4, 5]
    assert piece.states.held[0].checkpoints == ()


def test_positions_with_a_gap_can_be_cut_in_it() -> None:
    cache = recurrent()
    put(cache, 0, 2)
    put(cache, 0, 2)
    cache.seq_add(0, 2, -1, 5)
    for end in (2, 4, 7):
        content = state_get(cache, [0], -1, end)
        assert content.span(0) == (0, 1)


def test_a_sequence_that_is_empty_there_stays_as_it_is_here() -> None:
    source = recurrent()
    put(source, 1, 2)
    target = recurrent(like=source)
    put(target, 0, 3)
    text = text_of(target, 0)
    state_set(target, state_get(source, [3, 1]), [0, 1])
    check_texts(target, {0: text, 1: text_of(source, 1)})


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), CacheError("no")])
def test_a_store_that_fails_changes_nothing(error: BaseException) -> None:
    source = recurrent()
    put(source, 0, 3)
    target = recurrent(like=source)
    put(target, 1, 3)
    content, before = state_get(source, [0]), everything(target)
    store = target.store
    store.failing.after, store.failing.error = 0, error  # type: ignore[attr-defined]
    with pytest.raises(type(error)):
        state_set(target, content, [0])
    assert everything(target) == before
    for seq in range(N_SEQ):
        put(target, seq, 2)  # reads no row that was spoilt
