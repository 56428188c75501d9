"""Which tokens a context shift discards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import OptionError
from kvcellar.runtime.options import ContextShift


@pytest.mark.parametrize(
    ("keep", "discard", "n_tokens", "n_ctx", "span"),
    [
        (0, None, 10, 16, (0, 5)),  # half of what is not kept
        (4, None, 10, 16, (4, 7)),
        (4, 2, 10, 16, (4, 6)),
        (4, 100, 10, 16, (4, 9)),  # the last token stays
        (100, None, 10, 100, (8, 9)),  # keep leaves two, of which one goes
        (100, None, 16, 16, (12, 14)),  # and four cells of the context
        (5, 1, 3, 4, (0, 1)),
        (0, None, 2, 2, (0, 1)),
    ],
)
def test_numbers_are_clamped_as_the_server_does(
    keep: int, discard: int | None, n_tokens: int, n_ctx: int, span: tuple[int, int]
) -> None:
    assert ContextShift(keep, discard).clamped(n_tokens, n_ctx) == span


@given(st.integers(0, 50), st.none() | st.integers(1, 50), st.integers(2, 40), st.integers(0, 9))
def test_one_goes_and_one_stays_whatever_is_asked(
    keep: int, discard: int | None, n_tokens: int, spare: int
) -> None:
    n_ctx = n_tokens + spare
    start, stop = ContextShift(keep, discard).clamped(n_tokens, n_ctx)
    assert 0 <= start < stop < n_tokens
    assert start <= keep
    assert discard is None or stop - start <= discard


@pytest.mark.parametrize("n_tokens", [0, 1])
def test_fewer_than_two_tokens_cannot_be_shifted(n_tokens: int) -> None:
    with pytest.raises(OptionError, match=str(n_tokens)):
        ContextShift().clamped(n_tokens, 16)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"keep": -1}, "keep=-1"),
        ({"discard": 0}, "discard=0"),
        ({"discard": -4}, "discard=-4"),
        ({"keep": 1.5}, "keep=1.5"),
        ({"keep": True}, "keep=True"),
    ],
)
def test_wrong_numbers_are_refused_by_name(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        ContextShift(**arguments)


@pytest.mark.parametrize(
    ("positions", "keep", "discard", "span"),
    [
        ([0, 0, 1, 1, 2, 2, 3, 4], 1, 2, (2, 4)),  # keep grows to a whole group
        ([0, 0, 1, 1, 2, 2, 3, 4], 2, 3, (2, 4)),  # discard shrinks to one
        ([0, 0, 1, 1, 1, 1, 2, 3], 2, 1, (2, 6)),  # or grows, so that something goes
        ([0, 5, 9, 20], 1, 1, (1, 2)),  # gaps do not matter
    ],
)
def test_tokens_that_share_a_position_go_together(
    positions: list[int], keep: int, discard: int, span: tuple[int, int]
) -> None:
    at = np.array(positions, np.int32)
    assert ContextShift(keep, discard).span(at, 64) == span


@pytest.mark.parametrize("positions", [[0, 0, 0], [0, 1, 1, 1]])
def test_if_the_rest_shares_one_position_nothing_can_go(positions: list[int]) -> None:
    with pytest.raises(OptionError, match="shares one position"):
        ContextShift(1).span(np.array(positions, np.int32), 64)
