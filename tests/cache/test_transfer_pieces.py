"""Pieces saved while a text grows, joined, are what the whole text gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cache.base import Cache
from kvcellar.cache.content import CellData, SequenceData, between, join, n_kept
from kvcellar.cache.hybrid import HybridCache
from kvcellar.cache.transfer import state_get, state_set
from kvcellar.errors import NotSupported, OptionError, SnapshotFileError
from tests.cache.kinds import (
    WINDOW,
    check_texts,
    full,
    hybrid,
    put,
    recurrent,
    sliding,
    text_of,
)
from tests.profiles import examples

Make = Callable[["Cache | None"], Cache]


def of_kinds(kinds: str) -> Make:
    """Makes hybrid caches of such parts."""
    return lambda like: hybrid(kinds, 20, like if "s" in kinds else None, 60)


CACHES: dict[str, tuple[Make, tuple[int, ...]]] = {
    "plain": (lambda _: full(60), (0,)),
    "window": (lambda _: sliding(n_kept=20), (WINDOW,)),
    "narrow window": (lambda _: sliding(1, 20), (1,)),
    "wide window": (lambda _: sliding(7, 20), (7,)),
    "states": (lambda like: recurrent(20, like=like), ()),
    "fw": (of_kinds("fw"), (0, WINDOW)),
    "fs": (of_kinds("fs"), (0,)),
    "ws": (of_kinds("ws"), (WINDOW,)),
    "fws": (of_kinds("fws"), (0, WINDOW)),
    "both full": (lambda _: HybridCache([full(60), full(60, window=WINDOW)]), (0, 0)),
}
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@examples(40)
@given(
    st.sampled_from(sorted(CACHES)), LENGTHS, st.booleans(), st.sampled_from([0, 2]), st.booleans()
)
def test_joined_pieces_are_the_whole(
    kind: str, lengths: list[int], at_once: bool, shift: int, disturbed: bool
) -> None:
    make, windows = CACHES[kind]
    source = make(None)
    pieces, at = [], 0
    for n in lengths:
        put(source, 1, n)
        source.checkpoint(1)  # single tokens leave none by themselves
        if disturbed and "window" in kind:
            put(source, 0, 5)  # so that what is behind the window goes
        at += n
        if at_once:
            pieces.append(state_get(source, [1], at - n, at))
    if not at_once:  # when the text has gone on already
        ends = np.cumsum(lengths).tolist()
        for lo, hi in zip([0, *ends], ends, strict=False):
            pieces.append(state_get(source, [1], lo, hi))
    joined, whole = join(pieces, windows), state_get(source, [1], checkpoints=False)
    _check_same(joined, whole, windows)
    target = make(source)
    put(target, 3, 4)
    state_set(target, joined, [2], shift=shift)
    text = [(token, position + shift) for token, position in text_of(source, 1)]
    check_texts(target, {2: text, 3: text_of(target, 3)})
    put(target, 2, 3)
    target.check()


def _check_same(joined: SequenceData, whole: SequenceData, windows: tuple[int, ...]) -> None:
    """The same text and rows; of a window no more than it needs is held."""
    assert joined.start == whole.start
    assert joined.span(0) == whole.span(0)
    for mine, full_, window in zip(joined.groups, whole.groups, windows, strict=True):
        assert mine.text_of(0).tolist() == full_.text_of(0).tolist()
        n = len(mine.positions)
        if window:
            assert n == min(n_kept(window), mine.text_of(0).shape[1])
        else:
            assert n == len(full_.positions)
        assert [_bytes(mine, -i - 1) for i in range(n)] == [_bytes(full_, -i - 1) for i in range(n)]
        assert mine.checkpoints == ()
    if whole.states is not None:
        assert joined.states is not None
        assert joined.states.states.tobytes() == whole.states.states.tobytes()
        (a,), (b,) = joined.states.held, whole.states.held
        assert a is not None
        assert b is not None
        assert (a.positions.tolist(), a.tokens.tolist()) == (
            b.positions.tolist(),
            b.tokens.tolist(),
        )
        assert (a.state, a.checkpoints) == (0, ())


def _bytes(group: CellData, i: int) -> bytes:
    """K and V of a cell."""
    return b"".join(rows[i].tobytes() for rows in (*group.rows.k, *group.rows.v))


# -- one by one


def pieces_of(cache: Cache, *ends: int) -> list[SequenceData]:
    """Pieces of sequence 0, made while it grows."""
    found = []
    for lo, hi in zip((0, *ends), ends, strict=False):
        put(cache, 0, hi - lo)
        found.append(state_get(cache, [0], lo, hi))
    return found


def test_pieces_that_begin_later_join_into_a_piece() -> None:
    source, target = full(), full()
    pieces = pieces_of(source, 3, 5, 9)
    joined = join(pieces[1:], [0])
    assert (joined.start, joined.span(0)) == (3, (3, 8))
    for piece in (pieces[0], joined):
        state_set(target, piece, [2])
    check_texts(target, {2: text_of(source, 0)})


def test_an_empty_piece_changes_nothing() -> None:
    source = hybrid("fws")
    pieces = pieces_of(source, 4, 6)
    empty = state_get(source, [0], 6, 9)
    assert empty.span(0) == (-1, -1)
    joined = join([*pieces, empty, empty], [0, WINDOW])
    target = hybrid("fws", like=source)
    state_set(target, joined, [0])
    check_texts(target, {0: text_of(source, 0)})
    nothing = join([state_get(source, [3]), state_get(source, [3])], [0, WINDOW])
    state_set(target, nothing, [1])
    assert target.seq_pos_max(1) == -1


def test_pieces_that_do_not_follow_each_other_are_refused() -> None:
    cache = hybrid("fws")
    a, b, c = pieces_of(cache, 3, 5, 9)
    put(cache, 1, 2)
    windows = [0, WINDOW]
    for pieces in ([a, c], [b, a], [a, a], [a, b, b]):
        with pytest.raises(SnapshotFileError, match=r"a piece ends at \d, the next begins at \d"):
            join(pieces, windows)
    with pytest.raises(SnapshotFileError, match="of 2 sequences"):
        join([a, state_get(cache, [0, 1], 3)], windows)
    for other in (replace(b, states=None), replace(b, groups=b.groups[:1])):
        with pytest.raises(SnapshotFileError, match="different shapes"):
            join([a, other], windows)
    with pytest.raises(OptionError, match="no pieces"):
        join([], windows)
    with pytest.raises(OptionError, match="1 windows for 2 groups"):
        join([a, b], [0])


def test_a_gap_within_a_piece_is_refused() -> None:
    a, b = pieces_of(full(), 3, 6)
    (group,) = b.groups
    later = group.positions + np.int32(1)
    with pytest.raises(SnapshotFileError, match="position 4 comes after 2"):
        join([a, replace(b, groups=(replace(group, positions=later),))], [0])
    states = recurrent()
    c, d = pieces_of(states, 3, 6)
    assert d.states is not None
    held = d.states.held[0]
    assert held is not None
    moved = replace(held, positions=held.positions + np.int32(1))
    with pytest.raises(SnapshotFileError, match="position 4 comes after 2"):
        join([c, replace(d, states=replace(d.states, held=(moved,)))], [])


def test_the_pieces_stay_as_they_are() -> None:
    pieces = pieces_of(sliding(), 5, 9, 15)
    before = [piece.groups[0].text_of(0).tolist() for piece in pieces]
    joined = join(pieces, [WINDOW])
    joined.groups[0].rows.k[0][:] = 0
    assert [piece.groups[0].text_of(0).tolist() for piece in pieces] == before
    assert all(piece.groups[0].rows.k[0].any() for piece in pieces)


# -- a piece cut out of a content


def shared_texts(cache: Cache) -> None:
    """Sequence 1 begins as sequence 0 does, and each goes on by itself."""
    put(cache, 0, 6)
    cache.seq_cp(0, 1, 0, 4)
    put(cache, 1, 5)
    put(cache, 0, 2)


def assert_same(one: SequenceData, other: SequenceData) -> None:
    """See that contents of cells alone are equal, whatever the order of owners."""
    assert (one.n_seqs, one.start) == (other.n_seqs, other.start)
    for a, b in zip(one.groups, other.groups, strict=True):
        for name in ("positions", "tokens"):
            assert getattr(a, name).tolist() == getattr(b, name).tolist()
        pairs = [sorted(map(tuple, group.owners.T.tolist())) for group in (a, b)]
        assert pairs[0] == pairs[1]
        assert [_bytes(a, i) for i in range(len(a.positions))] == [
            _bytes(b, i) for i in range(len(b.positions))
        ]
        assert [text.tolist() for text in a.evicted] == [text.tolist() for text in b.evicted]


@given(st.integers(0, 10), st.integers(0, 10))
def test_what_is_cut_out_is_what_would_have_been_taken(lo: int, hi: int) -> None:
    for cache in (full(), HybridCache([full(), full(window=WINDOW)])):
        shared_texts(cache)
        whole = state_get(cache, [0, 1])
        cut = between(whole, lo, max(lo, hi))
        if lo == 0 and hi >= 9:
            assert cut is whole
        else:
            assert_same(cut, state_get(cache, [0, 1], lo, max(lo, hi)))


def test_a_piece_of_a_piece_begins_where_it_begins() -> None:
    cache = full()
    put(cache, 0, 9)
    piece = state_get(cache, [0], 3)
    assert between(piece, 0, 99) is piece
    assert between(piece, 0, 7).start == 3
    assert between(piece, 5, 99).start == 5
    assert between(piece, 5, 5).start == 5


@pytest.mark.parametrize("kinds", ["w", "fw"])
def test_a_cut_piece_is_refused_where_there_are_windows(kinds: str) -> None:
    """Also of a text so short that nothing has left them."""
    source = sliding() if kinds == "w" else hybrid(kinds)
    target = sliding() if kinds == "w" else hybrid(kinds, like=source)
    put(source, 0, 3)
    whole = state_get(source, [0], checkpoints=False)
    assert not whole.has_evicted
    for piece in (between(whole, 1, 9), between(whole, 2, 3)):
        with pytest.raises(NotSupported, match=r"this piece begins at position \d"):
            state_set(target, piece, [0])
        assert target.used == 0
    state_set(target, between(whole, 0, 2), [0])
    assert target.seq_positions(0).tolist() == [0, 1]


def test_states_and_what_left_a_window_cannot_be_cut() -> None:
    for cache in (recurrent(), sliding(), hybrid("fs"), hybrid("fw")):
        put(cache, 0, 12)
        put(cache, 1, 10)  # takes cells behind the window
        whole = state_get(cache, [0], checkpoints=False)
        assert whole.has_evicted or whole.states is not None
        for lo, hi in ((0, 5), (5, 99), (11, 12)):
            with pytest.raises(NotSupported, match="cannot be cut"):
                between(whole, lo, hi)


def test_the_end_of_several_windows() -> None:
    """Each piece has lost tokens; what is joined counts those of all as evicted."""
    source = sliding(2, 20)
    pieces = []
    for lo, hi in ((0, 7), (7, 14), (14, 15)):
        put(source, 0, hi - lo)
        put(source, 1, 6)  # takes cells behind the window
        pieces.append(state_get(source, [0], lo, hi))
    assert [piece.groups[0].evicted[0].shape[1] > 0 for piece in pieces] == [True, True, False]
    (joined,) = join(pieces, [2]).groups
    assert joined.evicted[0].tolist() == [
        list(range(13)),
        state_get(source, [0]).groups[0].text_of(0)[1, :13].tolist(),
    ]
    assert joined.positions.tolist() == [13, 14]
