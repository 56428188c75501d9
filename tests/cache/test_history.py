"""Histories grow cheaply, share what they have in common, and never change."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cache.states import History
from kvcellar.types import Int32Array


def array(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def items(history: History) -> list[tuple[int, int]]:
    return list(zip(history.tokens.tolist(), history.positions.tolist(), strict=True))


def test_an_empty_history_ends_nowhere() -> None:
    empty = History.empty()
    assert (empty.n, empty.last, empty.n_before(5)) == (0, -1, 0)
    assert items(empty) == []


def test_embeddings_have_no_tokens() -> None:
    assert items(History.empty().extended(None, array(0, 1))) == [(-1, 0), (-1, 1)]


def test_positions_are_found() -> None:
    history = History.empty().extended(array(7, 8, 9), array(2, 3, 7))
    assert [history.n_before(p0) for p0 in (0, 2, 3, 4, 7, 8)] == [0, 0, 1, 2, 2, 3]
    assert history.last == 7


def test_appending_one_by_one_seldom_copies() -> None:
    history = History.empty()
    logs = set()
    for i in range(5000):
        history = history.extended(array(i), array(i))
        logs.add(history.tokens.__array_interface__["data"][0])

    assert history.tokens.tolist() == list(range(5000))
    assert len(logs) < 20


def test_what_was_extended_twice_is_two_histories() -> None:
    base = History.empty().extended(array(1, 2), array(0, 1))
    one = base.extended(array(3), array(2))
    other = base.extended(array(4, 5), array(2, 3))
    moved = one.at(array(5, 6, 7))

    assert items(base) == [(1, 0), (2, 1)]
    assert items(one) == [(1, 0), (2, 1), (3, 2)]
    assert items(other) == [(1, 0), (2, 1), (4, 2), (5, 3)]
    assert items(moved) == [(1, 5), (2, 6), (3, 7)]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["extend", "cut", "move"])), max_size=30)
)
def test_no_history_ever_changes(steps: list[tuple[int, str]]) -> None:
    histories, wanted = [History.empty()], [list[tuple[int, int]]()]
    for number, (which, what) in enumerate(steps):
        i = which % len(histories)
        old, text = histories[i], wanted[i]
        if what == "extend":
            histories.append(old.extended(array(number, number), array(number, number + 1)))
            wanted.append([*text, (number, number), (number, number + 1)])
        elif what == "cut":
            histories.append(old.cut(old.n // 2))
            wanted.append(text[: old.n // 2])
        else:
            histories.append(old.at(old.positions + np.int32(3)))
            wanted.append([(token, at + 3) for token, at in text])
    assert [items(history) for history in histories] == wanted
