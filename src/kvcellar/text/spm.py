"""SentencePiece's BPE: merge the neighbours whose union has the best score, until none has one.

Spaces are written "▁". What is no piece is spelled in byte tokens ``<0xNN>``. Of equal scores the
leftmost pair goes first. No library is used: it would need a list of merges, derived from 262144
pieces at each start (Gemma: seconds), and such a list breaks ties differently.
"""

from __future__ import annotations

import heapq

from kvcellar.errors import TokenizerError
from kvcellar.text.pieces import SPACE, WordCache, find_byte_tokens, spaced_bytes
from kvcellar.text.vocab import PREFIX, Metadata, TokenKind, Vocab, read_flag


class SpmEncoder:
    """Turn text into ids by scores; special tokens are unknown here.

    Raises:
        TokenizerError: the file has no scores, or a byte token is not written ``<0xNN>``.
    """

    def __init__(self, vocab: Vocab, metadata: Metadata) -> None:
        if vocab.scores is None:
            raise TokenizerError(f"{PREFIX}scores is missing: SentencePiece merges by score")
        self.strips_space = read_flag(metadata, PREFIX + "add_space_prefix", True)
        self._bytes = find_byte_tokens(vocab)
        self._unknown_id = vocab.unknown_id
        # Text must not spell control or byte tokens, so they are no pieces here.
        self._pieces = dict(vocab.ids)
        for i in vocab.ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.BYTE):
            del self._pieces[vocab.tokens[i]]
        self._scores: list[float] = vocab.scores.tolist()
        self._words = WordCache(self._pieces, self._spell)

    def encode(self, text: str, *, continuing: bool) -> list[int]:
        """The ids of a text without special tokens."""
        escaped = text.replace(" ", SPACE)
        if self.strips_space and not continuing:
            escaped = SPACE + escaped
        return self._words.encode(escaped)

    def piece_bytes(self, text: str, kind: int) -> bytes:
        """The bytes that a piece stands for."""
        return spaced_bytes(text, kind)

    def _spell(self, word: str) -> list[int]:
        ids: list[int] = []
        for symbol in _Chain(word, self._pieces, self._scores).merge():
            token = self._pieces.get(symbol)
            if token is None:
                ids += self._spell_bytes(symbol)
            else:
                ids.append(token)
        return ids

    def _spell_bytes(self, symbol: str) -> list[int]:
        ids = [self._bytes.get(byte) for byte in symbol.encode("utf-8")]
        known = [i for i in ids if i is not None]
        if len(known) == len(ids):
            return known
        if self._unknown_id is None:
            raise TokenizerError(
                f"no token for {symbol!r}: the vocabulary lacks byte tokens and an unknown token"
            )
        return [self._unknown_id]


class _Chain:
    """The symbols of a word as a linked list, with a heap of the pairs that could merge."""

    def __init__(self, word: str, pieces: dict[str, int], scores: list[float]) -> None:
        self._pieces = pieces
        self._scores = scores
        self._symbols: list[str] = list(word)
        self._before = list(range(-1, len(word) - 1))
        self._after = list(range(1, len(word) + 1))
        self._heap: list[tuple[float, int, int, str]] = []
        for i in range(len(word) - 1):
            self._consider(i, i + 1)

    def merge(self) -> list[str]:
        """Merge what can be merged; returns the pieces."""
        symbols, heap = self._symbols, self._heap
        while heap:
            _, left, right, union = heapq.heappop(heap)
            # A symbol that was merged away is empty, and a pair that grew spells another union.
            if symbols[left] and symbols[right] and symbols[left] + symbols[right] == union:
                symbols[left], symbols[right] = union, ""
                self._unlink(left, right)
        return [symbol for symbol in symbols if symbol]

    def _unlink(self, left: int, right: int) -> None:
        follower = self._after[right]
        self._after[left] = follower
        if follower < len(self._symbols):
            self._before[follower] = left
            self._consider(left, follower)
        if self._before[left] >= 0:
            self._consider(self._before[left], left)

    def _consider(self, left: int, right: int) -> None:
        union = self._symbols[left] + self._symbols[right]
        token = self._pieces.get(union)
        if token is not None:
            heapq.heappush(self._heap, (-self._scores[token], left, right, union))
