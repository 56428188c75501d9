"""Example counts follow the profile, and only ``dev`` asks for fewer than tests are worth."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.profiles import FEWEST, PER_HUNDRED, examples, load_profiles


@pytest.fixture(autouse=True)
def _afterwards_as_before() -> Iterator[None]:
    before = settings()
    yield
    settings.register_profile("before", before)
    settings.load_profile("before")


@pytest.fixture(params=PER_HUNDRED)
def profile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setenv("HYPOTHESIS_PROFILE", name)
    load_profiles()
    return name


def test_counts_follow_the_profile(profile: str) -> None:
    expected = {"dev": 25, "ci": 250, "soak": 5000}[profile]
    assert examples(250).max_examples == expected
    assert settings().max_examples == PER_HUNDRED[profile]  # tests that say nothing


@pytest.mark.parametrize("count", [1, FEWEST, 15])
def test_a_test_is_left_with_some_examples(profile: str, count: int) -> None:
    assert examples(count).max_examples >= min(count, FEWEST)
    if profile == "ci":
        assert examples(count).max_examples == count


def test_no_profile_looks_at_the_clock(profile: str) -> None:
    found = examples(10, steps=7)
    assert (found.deadline, found.print_blob, found.stateful_step_count) == (None, True, 7)
    assert examples(10).stateful_step_count == 50
    assert not found.derandomize
    assert examples(10, derandomize=True).derandomize == (profile != "soak")


def test_without_a_word_it_is_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPOTHESIS_PROFILE", raising=False)
    load_profiles()
    assert examples(40).max_examples == 40
