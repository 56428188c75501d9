"""Tokens that wait, as values: where they will stand, and edits of them."""

from __future__ import annotations

import pytest

from kvcellar.runtime.cached_text import PendingTokens


@pytest.mark.parametrize(
    ("n", "places", "end", "wanted"),
    [
        (3, [], 5, [5, 6, 7]),
        (0, [], 5, []),
        (3, [5, 6], 5, [5, 6, 7]),
        (3, [7, 9], 5, [7, 9, 10]),  # a gap was kept
        (3, [5, 5, 5], 5, [5, 6, 7]),  # they shared a position
        (2, [3, 4], 5, [5, 6]),  # someone has written below us
    ],
)
def test_they_stand_where_they_stood_and_the_rest_follows(
    n: int, places: list[int], end: int, wanted: list[int]
) -> None:
    pending = PendingTokens(range(n), places)
    assert pending.positions(end) == wanted
    assert pending.end(end) == (wanted[-1] + 1 if wanted else end)


def test_new_ones_come_last_and_old_ones_first() -> None:
    pending = PendingTokens([7], [4]).appended([8, 9])
    assert (pending.tokens, pending.places) == ([7, 8, 9], [4])
    both = pending.prepended(PendingTokens([5, 6], [2, 3]))
    assert (both.tokens, both.places) == ([5, 6, 7, 8, 9], [2, 3, 4])
    assert len(both) == 5
    assert not PendingTokens()


def test_what_is_removed_lets_the_rest_move_up() -> None:
    pending = PendingTokens([5, 6, 7, 8], [2, 3, 4])
    closed = pending.removed(1, 2, gap=1)
    assert (closed.tokens, closed.places) == ([5, 7, 8], [2, 3])
    kept = pending.removed(1, 2)
    assert (kept.tokens, kept.places) == ([5, 7, 8], [2, 4])
    assert pending.removed(3, 4).places == [2, 3, 4]
    assert pending.removed(0, 4).tokens == []
    assert pending.tokens == [5, 6, 7, 8]
