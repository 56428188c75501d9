r"""RWKV's vocabulary: pieces are strings of bytes, and the longest at each place is taken.

In the file a piece is written with ``\t``, ``\n``, ``\r``, ``\xHH`` for a byte, and ``\`` before
any other character that stands for itself. Nothing is normalised and nothing added.
"""

from __future__ import annotations

import re

from kvcellar.errors import TokenizerError
from kvcellar.text.pieces import PieceIndex
from kvcellar.text.vocab import PREFIX, TokenKind, Vocab

_ESCAPE = re.compile(rb"\\(?:x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_NAMED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


class RwkvEncoder:
    """Turn text into ids by the longest piece; special tokens are unknown here.

    Raises:
        TokenizerError: a piece ends within an escape.
    """

    strips_space = False

    def __init__(self, vocab: Vocab) -> None:
        barred = set(vocab.ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN))
        pieces: dict[bytes, int] = {}
        for i, text in enumerate(vocab.tokens):
            piece = unescape(text)
            if piece is None:
                raise TokenizerError(
                    f"{PREFIX}tokens[{i}] = {text[:40]!r} has an escape that is none of "
                    r"\t, \n, \r, \xHH, and \ with a character"
                )
            if i not in barred:
                pieces[piece] = i
        self._index = PieceIndex(pieces)

    def encode(self, text: str, *, continuing: bool) -> list[int]:
        """The ids of a text without special tokens.

        Raises:
            TokenizerError: the vocabulary has no piece that begins with a byte of it.
        """
        del continuing
        data = text.encode("utf-8")
        ids: list[int] = []
        at = 0
        while at < len(data):
            found = self._index.longest(data, at)
            if found is None or not found[0]:
                raise TokenizerError(f"no token begins with the byte 0x{data[at]:02x}")
            at += found[0]
            ids.append(found[1])
        return ids

    def piece_bytes(self, text: str, kind: int) -> bytes:
        """The bytes that a piece stands for."""
        del kind
        piece = unescape(text)
        return text.encode("utf-8", "surrogateescape") if piece is None else piece


def unescape(text: str) -> bytes | None:
    """Return the bytes of a piece as the file writes it, or None if an escape is not complete."""
    data = text.encode("utf-8", "surrogateescape")
    if b"\\" not in data:
        return data
    rest = _ESCAPE.sub(b"", data)
    if b"\\" in rest or re.search(rb"\\x(?![0-9A-Fa-f]{2})", data.replace(b"\\\\", b"")):
        return None
    return _ESCAPE.sub(_meaning, data)


def _meaning(match: re.Match[bytes]) -> bytes:
    code, letter = match.groups()
    return bytes([int(code, 16)]) if code else _NAMED.get(letter, letter)
