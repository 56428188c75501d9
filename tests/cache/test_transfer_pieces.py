"""Pieces saved while a text grows, joined, are what the whole text gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cache.base import Cache
from kvcellar.cache.content import CellData, SequenceData, join, n_kept
from kvcellar.cache.hybrid import HybridCache
from kvcellar.cache.transfer import state_get, state_set
from kvcellar.errors import OptionError, SnapshotFileError
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


@examples(80)
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
    joined = join([*pieces, empty], [0, WINDOW])
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
