"""A vocabulary as llguidance wants it: the bytes of each token, and which tokens are no text.

Control tokens, unknown and unused ones and tokens that end a text are marked as special: they
match no text, whatever a grammar says about it. Built once for a tokenizer and kept with it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kvcellar.errors import LibraryError, TokenizerError
from kvcellar.text.tokenizer import Tokenizer
from kvcellar.text.vocab import TokenKind
from kvcellar.types import BoolArray

_NO_TEXT = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.UNUSED)


class GrammarVocab:
    """The vocabulary of one tokenizer.

    Attributes:
        n_vocab: number of tokens.
        stop_ids: tokens that end a text.
        special: which tokens are no text, ``[n_vocab]``.
        names: ids of special tokens by their name.
        tokenizer: the ``LLTokenizer``.
        compiled: grammars that were compiled for it, least recent first.

    Raises:
        TokenizerError: the model has no vocabulary.
        LibraryError: llguidance is not installed, or does not take the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.has_text:
            raise TokenizerError(
                "this model has no tokenizer, so no grammar can say what it spells"
            )
        llguidance = library()
        self.compiled: dict[object, Any] = {}
        vocab = tokenizer.vocab
        self.n_vocab = len(vocab)
        self.stop_ids = frozenset(tokenizer.stop_ids)
        marked = sorted({*vocab.ids_of(*_NO_TEXT), *self.stop_ids})
        self.special: BoolArray = np.zeros(self.n_vocab, np.bool_)
        self.special[marked] = True
        self.names = {vocab.tokens[i]: i for i in marked}
        pieces = [
            vocab.tokens[i].encode("utf-8", "replace") if marks else tokenizer.token_bytes(i)
            for i, marks in enumerate(self.special.tolist())
        ]
        stops = sorted(self.stop_ids)
        try:
            # Without a stop token the library adds one of its own behind the last.
            self.tokenizer = llguidance.LLTokenizer(
                _Pieces(pieces, marked, stops), eos_token=stops or None
            )
        except ValueError as error:
            raise LibraryError(f"llguidance does not take the vocabulary: {error}") from error


class _Pieces:
    """What ``LLTokenizer`` reads of a tokenizer; no grammar of ours lets it tokenize."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], stops: list[int]) -> None:
        self.tokens: Sequence[bytes] = tokens
        self.special_token_ids = special
        self.eos_token_id = stops[0] if stops else None

    def __call__(self, _text: object) -> list[int]:
        return []


_known: WeakKeyDictionary[Tokenizer, GrammarVocab] = WeakKeyDictionary()
_lock = threading.Lock()


def vocab_of(tokenizer: Tokenizer) -> GrammarVocab:
    """Return the vocabulary of a tokenizer, built at the first call."""
    with _lock:
        if tokenizer not in _known:
            _known[tokenizer] = GrammarVocab(tokenizer)
        return _known[tokenizer]


def library() -> Any:
    """Return llguidance.

    Raises:
        LibraryError: it is not installed, or cannot be loaded.
    """
    try:
        import llguidance
    except ImportError as error:
        raise LibraryError('grammars need llguidance: pip install "kvcellar[grammar]"') from error
    return llguidance
