"""Token healing: the last token of a prompt, replaced by one that its text begins.

A prompt that ends within what the model knows as one token ("http:", where "://" is one) leaves it
a beginning that it has hardly ever seen. Its last token is left open then, and the first one that
is generated has to begin with the same text.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from kvcellar.text.tokenizer import Tokenizer
from kvcellar.types import BoolArray


def can_heal(tokenizer: Tokenizer, tokens: Sequence[int]) -> bool:
    """Whether the last of these tokens may be the beginning of a longer one.

    It has to be text of whole characters, so that what comes behind it can be told from it.
    """
    if not tokens or not tokenizer.has_text:
        return False
    last = int(tokens[-1])
    if tokenizer.is_special(last) or tokenizer.is_matched_whole(last):
        return False
    piece = tokenizer.token_bytes(last)
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return bool(piece) and int(beginning_with(tokenizer, piece).sum()) > 1


def beginning_with(tokenizer: Tokenizer, text: bytes) -> BoolArray:
    """Return which tokens are text that begins with these bytes: ``[n_vocab]``."""
    allowed = np.zeros(tokenizer.n_vocab, np.bool_)
    allowed[_pieces_of(tokenizer).beginning_with(text)] = True
    return allowed


class _SortedPieces:
    """The tokens that are text, in the order of their bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [
            (tokenizer.token_bytes(i), i)
            for i in range(tokenizer.n_vocab)
            if not tokenizer.is_special(i) and i not in tokenizer.stop_ids
        ]
        pieces.sort()
        self._pieces = [piece for piece, _ in pieces]
        self._ids = np.array([i for _, i in pieces], np.int64)

    def beginning_with(self, text: bytes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        begin = bisect_left(self._pieces, text)
        end = begin
        while end < len(self._pieces) and self._pieces[end].startswith(text):
            end += 1
        return self._ids[begin:end]


_known: WeakKeyDictionary[Tokenizer, _SortedPieces] = WeakKeyDictionary()
_lock = threading.Lock()


def _pieces_of(tokenizer: Tokenizer) -> _SortedPieces:
    with _lock:
        if tokenizer not in _known:
            _known[tokenizer] = _SortedPieces(tokenizer)
        return _known[tokenizer]
