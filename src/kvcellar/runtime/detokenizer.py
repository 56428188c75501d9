"""Tokens back to text as they arrive, whole characters only.

Invariants:

1. Whatever the tokens, ``push`` over all of them and ``finish`` concatenate to
   ``Tokenizer.decode`` of the same tokens.
2. No text that was returned is ever taken back or completed: bytes of an unfinished character
   wait; bytes that cannot become one turn into U+FFFD.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcellar.runtime.tokenizer import Tokenizer


class Detokenizer:
    """Text of a stream of tokens.

    Args:
        tokenizer: whose tokens they are.
        skip_special: leave control tokens out rather than spell them.
        continuing: the tokens follow others, so the space that SentencePiece vocabularies put
            before a text is a real one.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, continuing: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next = tokenizer.strips_space and not continuing

    def push(self, token: int) -> str:
        """The text that this token completes, often empty.

        Raises:
            TokenizerError: no such token.
        """
        tokenizer = self._tokenizer
        piece = tokenizer.token_bytes(token)
        if tokenizer.is_matched_whole(token):
            self._strip_next = tokenizer.strips_space
            if self._skip_special and tokenizer.is_special(token):
                return ""
        elif self._strip_next and piece:
            self._strip_next = False
            piece = piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What is still held back, as U+FFFD; nothing is held back afterwards."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
