"""Stop strings: the same for every way of cutting the text into parts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import OptionError
from kvcellar.runtime.stopping import StopMatcher


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the first place where a stop string begins."""
    places = [text.index(stop) for stop in stops if stop in text]
    return (text[: min(places)], True) if places else (text, False)


def run(parts: list[str], stops: list[str]) -> tuple[str, bool]:
    """Push parts as a generation loop does."""
    matcher = StopMatcher(stops)
    shown = ""
    for part in parts:
        emit, stopped = matcher.push(part)
        shown += emit
        assert stopped == matcher.stopped
        if stopped:
            assert matcher.finish() == ""
            return shown, True
    shown += matcher.finish()
    return shown, matcher.stopped


@given(
    parts=st.lists(st.text("ab", max_size=6), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
def test_any_cutting_gives_what_the_whole_text_gives(parts: list[str], stops: list[str]) -> None:
    assert run(parts, stops) == naive("".join(parts), stops)


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_text_is_held_back_only_while_a_stop_string_may_come(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, stopped = "", False
    for i, letter in enumerate(text, 1):
        emit, stopped = matcher.push(letter)
        shown += emit
        if stopped:
            return
        held = text[len(shown) : i]
        possible = not held or any(stop.startswith(held) or stop in held for stop in stops)
        assert possible


def test_a_stop_string_over_several_parts() -> None:
    matcher = StopMatcher(["\n\n", "END"])
    assert matcher.push("one\n") == ("one", False)
    assert matcher.push("two E") == ("\ntwo ", False)
    assert matcher.push("N") == ("", False)
    assert matcher.push("D, and more") == ("", True)
    assert matcher.push("ignored") == ("", True)
    assert matcher.finish() == ""


def test_a_partial_match_is_shown_at_the_end() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.finish() == "EN"
    assert not matcher.stopped


def test_the_stop_string_that_begins_first_wins_even_if_it_ends_last() -> None:
    assert run(["xab", "cd"], ["abcd", "bc"]) == ("x", True)
    assert run(["xab", "ce"], ["abcd", "bc"]) == ("xa", True)


def test_no_stop_strings_hold_nothing_back() -> None:
    matcher = StopMatcher()
    assert matcher.push("text") == ("text", False)
    assert matcher.finish() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""], [7], "END", [None], [["a"]], b"a", 5, None])
def test_bad_stop_strings_are_refused(stops: Any) -> None:
    with pytest.raises(OptionError, match="stop"):
        StopMatcher(stops)


def test_a_long_repetitive_stop_string_takes_no_quadratic_time() -> None:
    matcher = StopMatcher(["a" * 50_000 + "b"])
    emit, stopped = matcher.push("a" * 100_000)
    assert (len(emit), stopped) == (50_000, False)
    assert matcher.push("b") == ("", True)
