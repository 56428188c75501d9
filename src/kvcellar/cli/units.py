"""Sizes and ages as people write and read them: 20G, 7d, 22.5 KiB, 3 h."""

from __future__ import annotations

import re

from kvcellar.errors import OptionError
from kvcellar.stores.base import MAX_AGE_S

_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MAX_BYTES = 2**60
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(?:i?b)?", re.IGNORECASE | re.ASCII)
_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([smhdw])", re.IGNORECASE | re.ASCII)


def parse_size(text: str, option: str) -> int:
    """Return bytes; units are powers of 1024, whether K, KB or KiB.

    Raises:
        OptionError: no such size; names the option.
    """
    if (match := _SIZE.fullmatch(text.strip())) is None:
        raise OptionError(f"{option} {text!r}: give bytes, or a size such as 500M or 20G")
    n_bytes = float(match[1]) * _SIZES[match[2].lower()]
    if n_bytes > _MAX_BYTES:
        raise OptionError(f"{option} {text:.40}: give at most {_MAX_BYTES >> 40}T")
    return int(n_bytes)


def parse_age(text: str, option: str) -> float:
    """Return seconds.

    Raises:
        OptionError: no such age; names the option.
    """
    if (match := _AGE.fullmatch(text.strip())) is None:
        raise OptionError(f"{option} {text!r}: give an age such as 90s, 30m, 12h, 7d or 2w")
    seconds = float(match[1]) * _AGES[match[2].lower()]
    if seconds > MAX_AGE_S:
        raise OptionError(f"{option} {text:.40}: give at most {MAX_AGE_S // _AGES['d']}d")
    return seconds


def human_age(seconds: float) -> str:
    """Return an age in one unit: 3 h."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def human_bytes(n: float) -> str:
    """Return a size with its unit: 22.5 KiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
