"""DRY, "don't repeat yourself": make tokens less likely that would go on with a repetition.

A token that would follow a repetition of ``length`` tokens as it was followed before loses
``multiplier * base ** (length - allowed_length)``. No repetition reaches across a sequence breaker.
The rule is that of llama.cpp's ``llama_sampler_dry_apply``, the breakers are found as in its
``get_overlapping_token_sequences``; both go back to p-e-w's text-generation-webui#5677 and pi6am's
koboldcpp#982.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from kvcellar.errors import OptionError, TokenizerError
from kvcellar.text.sampling.candidates import Candidates, Float64Array
from kvcellar.text.sampling.options import Breaker, SamplerOptions
from kvcellar.text.sampling.penalties import Past
from kvcellar.types import Int64Array

_MAX_TAIL = 20
"""Tokens of a breaker behind its first one; llama.cpp cuts longer ones there too."""

_LARGEST = 88.7228391
"""Logarithm of the largest number of single precision: penalties stay below it."""

_PASSES = 4
"""Repetitions are measured one by one if that cannot take longer than so many passes."""


class Spelling(Protocol):
    """What DRY asks a tokenizer: see :class:`kvcellar.text.tokenizer.Tokenizer`."""

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes of every token."""

    def encode(self, text: str, *, add_special: bool, continuing: bool) -> list[int]:
        """The tokens of a text."""


class Breakers:
    """Sequences of tokens that end a repetition, by their first token.

    A string breaks wherever tokens spell it: a token that has it inside, or one that ends with its
    beginning before the tokens of its rest.

    Args:
        breakers: strings and token ids.
        tokenizer: spells the strings; without any string it is not needed.

    Raises:
        OptionError: there are strings and no tokenizer.
    """

    def __init__(self, breakers: Sequence[Breaker], tokenizer: Spelling | None) -> None:
        self._tails: dict[int, list[tuple[int, ...]]] = {}
        strings = [one.encode("utf-8", "replace") for one in breakers if isinstance(one, str)]
        if strings and tokenizer is None:
            raise OptionError(
                "dry_sequence_breakers holds strings, which need a tokenizer: give Sampler(options,"
                " tokenizer=model.tokenizer), or breakers that are token ids"
            )
        for one in breakers:
            if not isinstance(one, str):
                self._add(one[0], one[1:])
        if strings and tokenizer is not None:
            for head, tail in _spelled(strings, tokenizer):
                self._add(head, tail)

    def single(self, token: int) -> bool:
        """Return whether a token breaks by itself."""
        return () in self._tails.get(token, ())

    def limit(self, tokens: Sequence[int]) -> int:
        """Return how many of the last tokens come behind the last breaker."""
        for place in range(len(tokens) - 1, -1, -1):
            if tails := self._tails.get(tokens[place]):
                rest = tuple(tokens[place + 1 : place + 1 + _MAX_TAIL])
                fitting = [len(tail) for tail in tails if rest[: len(tail)] == tail]
                if fitting:
                    return len(tokens) - 1 - place - max(fitting)
        return len(tokens)

    def _add(self, head: int, tail: tuple[int, ...]) -> None:
        tails = self._tails.setdefault(head, [])
        if tail[:_MAX_TAIL] not in tails:
            tails.append(tail[:_MAX_TAIL])


def apply_dry(
    candidates: Candidates, options: SamplerOptions, past: Past, breakers: Breakers
) -> None:
    """Penalize what would go on with a repetition."""
    tokens, allowed = past.last(options.dry_penalty_last_n), options.dry_allowed_length
    if len(tokens) <= allowed or tokens.count(tokens[-1]) == 1:
        return
    limit = breakers.limit(tokens)
    if limit < allowed:
        return
    longest: dict[int, int] = {}
    for end, length in repeats(tokens, allowed, min(limit, _most_length(options))):
        token = tokens[end + 1]
        if length > longest.get(token, 0) and not breakers.single(token):
            longest[token] = length
    if not longest:
        return
    found = np.array(sorted(longest))
    places, which = candidates.find(found)
    lengths = np.array([longest[token] for token in found[which].tolist()], np.int64)
    values: Float64Array = candidates.values[places].astype(np.float64)
    penalties = options.dry_multiplier * options.dry_base ** (lengths - allowed)
    candidates.set(places, values - penalties)


def repeats(tokens: Sequence[int], least: int, most: int) -> list[tuple[int, int]]:
    """Return where the last tokens were before, and how many of them.

    Args:
        tokens: a text.
        least: leave out shorter repetitions; at least 1.
        most: count no further; at least ``least``.

    Returns:
        The places, before the last, where repetitions end, and their lengths in ``[least, most]``.
    """
    last, tail = len(tokens) - 1, tokens[max(0, len(tokens) - least) :]
    ends = [i for i, token in enumerate(tokens) if token == tokens[last]][:-1]
    ends = [i for i in ends if tokens[max(0, i + 1 - least) : i + 1] == tail]
    if len(ends) * min(most, last) > _PASSES * last:
        lengths = _common_suffixes(tokens)
        return [(i, min(lengths[i], most)) for i in ends]
    return [(i, _common_suffix(tokens, i, least, most)) for i in ends]


def _common_suffix(tokens: Sequence[int], end: int, length: int, most: int) -> int:
    """How many tokens up to a place are the last ones, of which some are known to be."""
    last, most = len(tokens) - 1, min(most, end + 1)
    while length < most and tokens[end - length] == tokens[last - length]:
        length += 1
    return length


def _common_suffixes(tokens: Sequence[int]) -> list[int]:
    """For each place, how many tokens up to it are the last ones: the Z algorithm, backwards."""
    tokens = tokens[::-1]
    n, left, right = len(tokens), 0, 0
    lengths = [0] * n
    for i in range(1, n):
        length = min(right - i, lengths[i - left]) if i < right else 0
        while i + length < n and tokens[length] == tokens[i + length]:
            length += 1
        if i + length > right:
            left, right = i, i + length
        lengths[i] = length
    return lengths[::-1]


def _most_length(options: SamplerOptions) -> int:
    """The length from which on the penalty does not grow any more."""
    if options.dry_base <= 1.000001:
        return options.dry_allowed_length
    return options.dry_allowed_length + int(_LARGEST / math.log(options.dry_base))


def _spelled(
    strings: Sequence[bytes], tokenizer: Spelling
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the sequences of tokens that spell one of the strings: first token, and the rest."""
    pieces = tokenizer.pieces
    ends = np.cumsum([len(piece) for piece in pieces])
    joined = b"".join(pieces)
    for string in strings:
        inside = {
            token
            for token, place in _found(string, joined, ends)
            if place + len(string) <= ends[token]
        }
        for token in sorted(inside):
            yield token, ()
        for n in range(1, len(string)):
            tail = _encoded(string[n:], tokenizer)
            for token, place in _found(string[:n], joined, ends):
                if place + n == ends[token] and token not in inside and tail is not None:
                    yield token, tail


def _found(text: bytes, joined: bytes, ends: Int64Array) -> Iterator[tuple[int, int]]:
    """Yield where a text begins within joined pieces: which piece, and where in all."""
    places: list[int] = []
    place = joined.find(text)
    while place >= 0:
        places.append(place)
        place = joined.find(text, place + 1)
    yield from zip(ends.searchsorted(places, side="right").tolist(), places, strict=True)


def _encoded(text: bytes, tokenizer: Spelling) -> tuple[int, ...] | None:
    """The tokens of a text; None if it begins within a character or cannot be spelled."""
    try:
        return tuple(tokenizer.encode(text.decode(), add_special=False, continuing=True))
    except (UnicodeDecodeError, TokenizerError):
        return None
