"""Sizes and ages, as people write and read them."""

from __future__ import annotations

import pytest

from kvcellar.cli.units import human_age, human_bytes, parse_age, parse_size
from kvcellar.errors import OptionError
from kvcellar.stores.base import MAX_AGE_S


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("0", 0),
        ("1234", 1234),
        ("20G", 20 * 2**30),
        ("20 GiB", 20 * 2**30),
        ("500mb", 500 * 2**20),
        ("1.5k", 1536),
        (" 2T ", 2 * 2**40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, n: int) -> None:
    assert parse_size(text, "--x") == n


@pytest.mark.parametrize("text", ["", "G", "-1", "1e9", "20X", "1,5G", "nan", "20 G G", "²"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(OptionError, match=r"--cache-bytes .*20G"):
        parse_size(text, "--cache-bytes")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("7d", 604800), ("2W", 1209600), ("0d", 0)],
)
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text, "--x") == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "7y", "7 days", "1d12h"])
def test_what_is_no_age_is_named(text: str) -> None:
    with pytest.raises(OptionError, match=r"--older-than .*7d"):
        parse_age(text, "--older-than")


@pytest.mark.parametrize("text", ["1048577T", f"{'9' * 400}", f"{'9' * 400}.5T"])
def test_absurd_sizes_are_named(text: str) -> None:
    with pytest.raises(OptionError, match=r"--max-bytes [0-9.T]{1,40}: give at most 1048576T$"):
        parse_size(text, "--max-bytes")
    assert parse_size("1048576T", "--x") == 2**60


@pytest.mark.parametrize("text", ["99999999999999w", "36500.1d", f"{'9' * 400}s"])
def test_absurd_ages_are_named(text: str) -> None:
    with pytest.raises(OptionError, match=r"--cache-ttl [0-9.wds]{1,40}: give at most 36500d$"):
        parse_age(text, "--cache-ttl")
    assert parse_age("36500d", "--x") == MAX_AGE_S


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (90000, "1 d"), (1e7, "116 d")],
)
def test_how_long_ago(seconds: float, text: str) -> None:
    assert human_age(seconds) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (23040, "22.5 KiB"),
        (2**40, "1.0 TiB"),
        (2**51, "2048.0 TiB"),
    ],
)
def test_bytes_for_people(n: int, text: str) -> None:
    assert human_bytes(n) == text
