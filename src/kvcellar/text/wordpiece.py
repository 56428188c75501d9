"""WordPiece (BERT): a word is spelled by the longest pieces, from left to right, or is unknown.

Control characters and, where the file says so, case and accents are dropped; white space,
punctuation and Chinese characters end words. A piece that begins a word begins with "▁", so a
space goes before every word, whether there was one or not: text comes back normalised only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.errors import TokenizerError
from kvcellar.text.pieces import SPACE, PieceIndex, spaced_bytes
from kvcellar.text.vocab import PREFIX, Metadata, TokenKind, Vocab, read_flag

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer

_MAX_CACHED_WORDS = 16384


class WordPieceEncoder:
    """Turn text into ids word by word; special tokens are unknown here.

    Raises:
        TokenizerError: the file names no unknown token.
    """

    strips_space = True

    def __init__(self, vocab: Vocab, metadata: Metadata) -> None:
        from tokenizers.pre_tokenizers import BertPreTokenizer

        if vocab.unknown_id is None:
            raise TokenizerError(f"{PREFIX}unknown_token_id is missing: it stands for words")
        self._unknown_id = vocab.unknown_id
        barred = set(vocab.ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN))
        self._index = PieceIndex({text: i for text, i in vocab.ids.items() if i not in barred})
        self._normalizer = _build_normalizer(metadata)
        self._pre_tokenizer = BertPreTokenizer()
        self._cached: dict[str, list[int]] = {}

    def encode(self, text: str, *, continuing: bool) -> list[int]:
        """The ids of a text without special tokens; it may continue a word."""
        normal = self._normalizer.normalize_str(text)
        # Letters that continue a text may continue a word, which an "a" before them stands for.
        parts = self._pre_tokenizer.pre_tokenize_str("a" + normal if continuing else normal)
        words = [SPACE + word for word, _ in parts]
        if continuing:
            words[0] = words[0][2:]
        return [i for word in words for i in self._spell_cached(word)]

    def piece_bytes(self, text: str, kind: int) -> bytes:
        """The bytes that a piece stands for."""
        return spaced_bytes(text, kind)

    def _spell_cached(self, word: str) -> list[int]:
        found = self._cached.get(word)
        if found is None:
            found = self._spell(word)
            if len(self._cached) < _MAX_CACHED_WORDS:
                self._cached[word] = found
        return found

    def _spell(self, word: str) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(word):
            found = self._index.longest(word, at)
            if found is None:
                return [self._unknown_id]
            at += found[0]
            ids.append(found[1])
        return ids


def _build_normalizer(metadata: Metadata) -> Normalizer:
    from tokenizers.normalizers import BertNormalizer

    lowercase = read_flag(metadata, PREFIX + "normalizer.lowercase", True)
    strip_accents = read_flag(metadata, PREFIX + "normalizer.strip_accents", lowercase)
    return BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )
