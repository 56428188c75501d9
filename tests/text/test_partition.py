"""Cutting text at tokens that are matched whole."""

from __future__ import annotations

import time

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
    partition = Partition([("<x>", 1), ("<y>", 2), ("b", 3)], strip_after={1})
    assert partition.split("a <x> \n b<x> <y> ") == ["a ", 1, 3, 1, 2, " "]


def test_white_space_before_a_match_can_go() -> None:
    partition = Partition([("<x>", 1), ("<yy>", 2)], strip_before={1})
    assert partition.split("a \n<x> <yy> <x>\t") == ["a", 1, " ", 2, 1, "\t"]


def test_space_that_was_stripped_is_no_other_token() -> None:
    assert Partition([("<x>", 1), ("\n", 2)], strip_after={1}).split("<x>\n\n<") == [1, "<"]


def test_a_long_text_full_of_tokens_takes_no_quadratic_time() -> None:
    tokens = [f"<{i}>" for i in range(10000)]
    partition = Partition([(token, i) for i, token in enumerate(tokens)])
    begin = time.process_time()
    assert partition.split("".join(tokens)) == list(range(10000))
    assert time.process_time() - begin < 10


def test_nothing_gives_nothing() -> None:
    assert Partition([("a", 1)]).split("") == []
    assert Partition([]).split("abc") == ["abc"]
