"""Pieces of a vocabulary in text: which begin at a place, and where text can be cut for a cache.

SentencePiece writes a space "▁", and a byte that is no piece ``<0xNN>``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from kvcellar.errors import TokenizerError
from kvcellar.text.vocab import PREFIX, TokenKind, Vocab

SPACE = "▁"
MAX_PIECE = 1024
"""Characters or bytes of the longest piece that a :class:`PieceIndex` takes."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PLAIN = frozenset({TokenKind.NORMAL, TokenKind.UNUSED, TokenKind.UNDEFINED})
_MAX_CACHED_WORDS = 16384
_MAX_CACHED_CHARS = 32

Text = TypeVar("Text", str, bytes)


class PieceIndex(Generic[Text]):
    """Finds the pieces that a text has at a place, in time that does not grow with the text.

    Pieces are sorted. All that begin a text are beginnings of the last one that is not behind it in
    that order, and each piece knows the longest of the others that it begins with.

    Args:
        pieces: ids by piece; all are text, or all are bytes.

    Raises:
        TokenizerError: a piece is longer than :data:`MAX_PIECE`.
    """

    def __init__(self, pieces: Mapping[Text, int]) -> None:
        self._sorted: list[Text] = sorted(pieces)
        self._ids = [pieces[piece] for piece in self._sorted]
        self._longest = max(map(len, self._sorted), default=0)
        if self._longest > MAX_PIECE:
            i = next(i for piece, i in pieces.items() if len(piece) > MAX_PIECE)
            raise TokenizerError(
                f"{PREFIX}tokens[{i}] has a length of {self._longest}: at most {MAX_PIECE} is known"
            )
        self._parents = self._find_parents()

    def longest(self, text: Text, at: int) -> tuple[int, int] | None:
        """The length and the id of the longest piece at a place; None if there is none."""
        return next(self.matches(text, at), None)

    def matches(self, text: Text, at: int) -> Iterator[tuple[int, int]]:
        """The lengths and the ids of all pieces at a place, the longest first."""
        window = text[at : at + self._longest]
        i = bisect_right(self._sorted, window) - 1
        while i >= 0 and not window.startswith(self._sorted[i]):
            i = self._parents[i]
        while i >= 0:
            yield len(self._sorted[i]), self._ids[i]
            i = self._parents[i]

    def _find_parents(self) -> list[int]:
        """For each piece, the place of the longest other one that it begins with, or -1."""
        parents: list[int] = []
        open_ones: list[int] = []
        for i, piece in enumerate(self._sorted):
            while open_ones and not piece.startswith(self._sorted[open_ones[-1]]):
                open_ones.pop()
            parents.append(open_ones[-1] if open_ones else -1)
            open_ones.append(i)
        return parents


class WordCache:
    """Tokenizes text a word at a time, and remembers short words.

    Text is cut before a "▁" that no piece can span. Few pieces have an inner "▁"; text is not cut
    after the letters before those.

    Args:
        pieces: the pieces of the vocabulary.
        spell: gives the ids of a word.
    """

    def __init__(self, pieces: Iterable[str], spell: Callable[[str], list[int]]) -> None:
        self._spell = spell
        self._cached: dict[str, list[int]] = {}
        spanned = set(re.findall(f"([^{SPACE}\0]){SPACE}", "\0".join(pieces)))
        joined = "".join(map(re.escape, sorted(spanned)))
        inside = f"(?:[^{SPACE}]|(?<=[{joined}]){SPACE}+)" if joined else f"[^{SPACE}]"
        self._word = re.compile(f"{SPACE}+{inside}*|{inside}+", re.DOTALL)

    def encode(self, text: str) -> list[int]:
        """The ids of a text in which spaces are written "▁"."""
        ids: list[int] = []
        for word in self._word.findall(text):
            found = self._cached.get(word)
            if found is None:
                found = self._spell(word)
                if len(word) <= _MAX_CACHED_CHARS and len(self._cached) < _MAX_CACHED_WORDS:
                    self._cached[word] = found
            ids += found
        return ids


def find_byte_tokens(vocab: Vocab) -> dict[int, int]:
    """The ids of byte tokens by byte.

    Raises:
        TokenizerError: one is not written ``<0xNN>``.
    """
    found: dict[int, int] = {}
    for i in vocab.ids_of(TokenKind.BYTE):
        match = _BYTE.fullmatch(vocab.tokens[i])
        if match is None:
            raise TokenizerError(
                f"{PREFIX}tokens[{i}] = {vocab.tokens[i][:40]!r} is a byte token, written <0xNN>"
            )
        found[int(match[1], 16)] = i
    return found


def spaced_bytes(text: str, kind: int) -> bytes:
    """The bytes of a piece that writes spaces "▁" and bytes ``<0xNN>``."""
    if kind == TokenKind.BYTE and (match := _BYTE.fullmatch(text)):
        return bytes([int(match[1], 16)])
    if kind in _PLAIN:
        text = text.replace(SPACE, " ")
    return text.encode("utf-8", "surrogateescape")
