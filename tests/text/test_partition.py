"""Cutting text at tokens that are matched whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.text.tokenizer import Partition


def naive_split(text: str, tokens: list[tuple[str, int]]) -> list[str | int]:
    """Take the longest token's first place, then the same left and right of it."""
    for needle, token in sorted(tokens, key=lambda item: -len(item[0].encode())):
        left, found, right = text.partition(needle)
        if found:
            return [*naive_split(left, tokens), token, *naive_split(right, tokens)]
    return [text] if text else []


@given(
    text=st.text("abc", max_size=30),
    tokens=st.lists(st.text("abc", min_size=1, max_size=5), unique=True, max_size=6),
)
def test_splits_as_the_definition_says(text: str, tokens: list[str]) -> None:
    pairs = [(token, i) for i, token in enumerate(tokens)]
    fragments = Partition(pairs).split(text)
    assert fragments == naive_split(text, pairs)
    assert "".join(tokens[f] if isinstance(f, int) else f for f in fragments) == text


def test_the_longer_of_two_that_overlap_wins() -> None:
    assert Partition([("ab", 1), ("bcd", 2)]).split("abcd") == ["a", 2]


def test_white_space_after_a_match_can_go() -> None:
    partition = Partition([("<x>", 1)], strip_after=True)
    assert partition.split("a <x> \n b<x>") == ["a ", 1, "b", 1]


def test_nothing_gives_nothing() -> None:
    assert Partition([("a", 1)]).split("") == []
    assert Partition([]).split("abc") == ["abc"]
