"""SentencePiece's unigram model (T5, XLM-R): the pieces of a text whose scores add up to the most.

Text is normalised first: characters are replaced (:mod:`kvcellar.text.charsmap`), runs of spaces
become one and those at the ends go where the file says ``remove_extra_whitespaces``, a space is put
in front where it says ``add_space_prefix``, and spaces are written "▁". What no piece spells is one
unknown token, however long.
"""

from __future__ import annotations

import re

import numpy as np

from kvcellar.errors import TokenizerError
from kvcellar.text.charsmap import Charsmap
from kvcellar.text.pieces import SPACE, PieceIndex, WordCache, spaced_bytes
from kvcellar.text.vocab import PREFIX, Metadata, TokenKind, Vocab, read_flag

_UNKNOWN_PENALTY = np.float32(10)
_SPACES = re.compile(" +")


class UnigramEncoder:
    """Turn text into ids by the sum of scores; special tokens are unknown here.

    Raises:
        TokenizerError: the file has no scores or no unknown token, or its replacements of
            characters are damaged.
    """

    def __init__(self, vocab: Vocab, metadata: Metadata) -> None:
        if vocab.scores is None:
            raise TokenizerError(f"{PREFIX}scores is missing: a unigram model adds up scores")
        if vocab.unknown_id is None:
            raise TokenizerError(f"{PREFIX}unknown_token_id is missing: it stands for the rest")
        self._prefixes = read_flag(metadata, PREFIX + "add_space_prefix", False)
        self._merges_spaces = read_flag(metadata, PREFIX + "remove_extra_whitespaces", False)
        self.strips_space = self._prefixes or self._merges_spaces
        self._charsmap = Charsmap.from_metadata(metadata)
        self._unknown_id = vocab.unknown_id
        normal, user = (vocab.ids_of(kind) for kind in (TokenKind.NORMAL, TokenKind.USER_DEFINED))
        self._scores: list[float] = vocab.scores.tolist()
        for i in user:  # scores are logarithms: nothing is likelier
            self._scores[i] = 0.0
        least = vocab.scores[normal].min() if normal else np.float32(0)
        self._unknown_score = float(least - _UNKNOWN_PENALTY)
        ids = [*normal, *user, *vocab.ids_of(TokenKind.UNUSED)]
        pieces = {vocab.tokens[i]: i for i in ids}
        self._index = PieceIndex(pieces)
        self._words = WordCache(pieces, self._spell)

    def encode(self, text: str, *, continuing: bool) -> list[int]:
        """The ids of a text without special tokens."""
        ids = self._words.encode(self._normalize(text, continuing=continuing))
        unknown = self._unknown_id
        if unknown not in ids:
            return ids
        before = [-1, *ids]
        return [i for i, last in zip(ids, before, strict=False) if not i == last == unknown]

    def piece_bytes(self, text: str, kind: int) -> bytes:
        """The bytes that a piece stands for."""
        return spaced_bytes(text, kind)

    def _normalize(self, text: str, *, continuing: bool) -> str:
        text = self._charsmap.normalize(text)
        if self._merges_spaces:
            starts_anew = not continuing or text.startswith(" ")
            text = _SPACES.sub(" ", text).strip(" ")
            prefix = " " if text and starts_anew else ""
        else:
            # The prefix goes before the first character that is no space.
            n_spaces = len(text) - len(text.lstrip(" "))
            prefix = " " if self._prefixes and not continuing and n_spaces < len(text) else ""
        return (prefix + text).replace(" ", SPACE)

    def _spell(self, word: str) -> list[int]:
        """The best pieces of a word, found from its beginning on (Viterbi's algorithm)."""
        n = len(word)
        best = [0.0] + [-np.inf] * n
        came_from: list[tuple[int, int]] = [(0, self._unknown_id)] * (n + 1)
        for at in range(n):
            so_far = best[at]
            has_one = False
            for length, token in self._index.matches(word, at):
                has_one |= length == 1
                if so_far + self._scores[token] > best[at + length]:
                    best[at + length] = so_far + self._scores[token]
                    came_from[at + length] = at, token
            if not has_one and so_far + self._unknown_score > best[at + 1]:
                best[at + 1] = so_far + self._unknown_score
                came_from[at + 1] = at, self._unknown_id
        ids: list[int] = []
        at = n
        while at:
            at, token = came_from[at]
            ids.append(token)
        return ids[::-1]
