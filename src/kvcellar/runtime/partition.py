"""Cutting text at the tokens that are matched as they stand, before anything else.

Longer tokens first, over the whole text, as llama.cpp does it: of two that overlap the longer one
wins, wherever it begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

Fragment = str | int
"""Text still to be tokenized, or the id of a token that was found."""

_KEY_CHARS = 3


class Partition:
    """Splits text at a fixed set of token texts.

    Args:
        texts: ``(text, id)`` pairs; texts are not empty.
        strip_after: drop white space that follows a match.
    """

    def __init__(self, texts: Iterable[tuple[str, int]], *, strip_after: bool = False) -> None:
        # A vocabulary may have thousands of them, hardly ever present: one search for a common
        # beginning rules out a whole group.
        self._groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for text, token in texts:
            self._groups[text[:_KEY_CHARS]].append((text, token))
        self._strip_after = strip_after

    def split(self, text: str) -> list[Fragment]:
        """The fragments of a text, in order; no empty strings among them."""
        if not text:
            return []
        fragments: list[Fragment] = [text]
        for needle, token in self._present(text):
            fragments = self._split_at(fragments, needle, token)
        return fragments

    def _present(self, text: str) -> list[tuple[str, int]]:
        found = [
            item
            for key, group in self._groups.items()
            if key in text
            for item in group
            if item[0] in text
        ]
        return sorted(found, key=lambda item: -len(item[0].encode("utf-8", "surrogatepass")))

    def _split_at(self, fragments: list[Fragment], needle: str, token: int) -> list[Fragment]:
        result: list[Fragment] = []
        for fragment in fragments:
            if isinstance(fragment, int) or needle not in fragment:
                result.append(fragment)
                continue
            for i, part in enumerate(fragment.split(needle)):
                if i:
                    result.append(token)
                    part = part.lstrip(" \t\n\r\v\f") if self._strip_after else part
                if part:
                    result.append(part)
        return result
