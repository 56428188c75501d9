"""SentencePiece's normalisation: replacements of characters, as vocabularies carry them.

``tokenizer.ggml.precompiled_charsmap`` is, in little endian: the size of a trie in bytes, the trie,
and replacements that end in a zero byte. The trie is a double array whose units are 32 bits:

| bits | of a node | of a value |
|---|---|---|
| 0-7 | the byte that led here | |
| 8 | whether a value hangs on it | |
| 9 | whether the offset is shifted by 8 | |
| 10-31 | the offset of its children | |
| 0-30 | | the place of the replacement |

The child of a node for a byte is at (place XOR offset XOR byte); its value is where a child for
byte 0 would be. Bit 31 is set in values only.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

import numpy as np

from kvcellar.errors import TokenizerError
from kvcellar.text.vocab import PREFIX, Metadata, describe

KEY = PREFIX + "precompiled_charsmap"
MAX_KEY = 256
"""Bytes of the longest key that is looked for."""

_VALUE_BIT = 1 << 31
_PLAIN = "".join(map(chr, range(0x20, 0x7F)))


class Charsmap:
    """Replaces the longest key at each place of a text.

    Args:
        units: those of the trie.
        texts: the replacements.
    """

    def __init__(self, units: Sequence[int] = (), texts: bytes = b"") -> None:
        self._units = units
        self._texts = texts
        # Most text is plain: where no key begins with plain letters only, one could be only at
        # others or right before them.
        is_plain = not any(self._begins_key(letter) for letter in _PLAIN)
        self._place = re.compile("[^ -~]|[ -~](?=[^ -~])" if is_plain else ".", re.DOTALL)

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Charsmap:
        """Return the replacements of a GGUF file; none if it has no such key.

        Raises:
            TokenizerError: they are not laid out as the module says.
        """
        value = metadata.get(KEY)
        if value is None:
            return cls()
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.itemsize != 1:
            raise TokenizerError(f"{KEY} must be an array of bytes, found {describe(value)}")
        blob = value.tobytes()
        size = int.from_bytes(blob[:4], "little")
        if len(blob) < 4 or size + 4 >= len(blob):
            raise TokenizerError(f"{KEY} has {len(blob)} bytes, too few for a trie of {size}")
        units = np.frombuffer(blob[4 : 4 + size - size % 4], "<u4").astype(np.uint32)
        return cls(array("I", units.tobytes()), blob[4 + size :])

    def normalize(self, text: str) -> str:
        """The text with its replacements.

        Raises:
            TokenizerError: the file's are damaged.
        """
        if not self._units:
            return text
        parts: list[str] = []
        done = 0
        match = self._place.search(text)
        while match is not None:
            at = match.start()
            length, replacement = self._longest(text, at)
            if length:
                parts += (text[done:at], replacement)
                done = at + length
            match = self._place.search(text, at + max(1, length))
        return "".join(parts) + text[done:]

    def _longest(self, text: str, at: int) -> tuple[int, str]:
        """The length of the longest key at a place, 0 if there is none, and its replacement."""
        length, place = 0, 0
        base = self._offset(0)
        for n, letter in enumerate(text[at : at + MAX_KEY]):
            unit = 0
            for byte in letter.encode("utf-8"):
                node = base ^ byte
                unit = self._unit(node)
                if not byte or unit & (_VALUE_BIT | 0xFF) != byte:
                    return length, self._replacement(place) if length else ""
                base = node ^ self._offset(node)
            if unit >> 8 & 1:
                length, place = n + 1, self._unit(base) & ~_VALUE_BIT
        return length, self._replacement(place) if length else ""

    def _begins_key(self, letter: str) -> bool:
        """Whether a letter is a key, or begins one that goes on with a plain letter."""
        if not self._units:
            return False
        node = self._offset(0) ^ ord(letter)
        unit = self._unit(node)
        if unit & (_VALUE_BIT | 0xFF) != ord(letter):
            return False
        base = node ^ self._offset(node)
        following = (self._unit(base ^ ord(other)) & (_VALUE_BIT | 0xFF) for other in _PLAIN)
        return bool(unit >> 8 & 1) or any(map(int.__eq__, following, map(ord, _PLAIN)))

    def _unit(self, place: int) -> int:
        # Where a child could be there need not be one: outside there is none.
        return self._units[place] if place < len(self._units) else 0

    def _offset(self, place: int) -> int:
        unit = self._unit(place)
        return unit >> 10 << ((unit & 1 << 9) >> 6)

    def _replacement(self, place: int) -> str:
        end = self._texts.find(b"\0", place)
        try:
            if end >= place:
                return self._texts[place:end].decode("utf-8")
        except UnicodeDecodeError:
            pass
        raise TokenizerError(f"{KEY} is damaged: no text at {place} of its replacements")
