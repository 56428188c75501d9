"""PLaMo 2's tokenizer: the pieces of a text that cost the least, found from its end.

A piece costs its score, negated and rounded to 1e-4; a character that is no piece costs 1000 and is
spelled in byte tokens. Of equal costs the longest piece at a place is taken. A byte order mark at
the beginning is dropped.
"""

from __future__ import annotations

from math import copysign, isfinite, trunc

from kvcellar.errors import TokenizerError
from kvcellar.text.pieces import PieceIndex, find_byte_tokens
from kvcellar.text.vocab import PREFIX, TokenKind, Vocab

_UNIT = 1e4
_UNKNOWN_COST = 10_000_000
_TOO_MUCH = 20_000_000
_BYTE_ORDER_MARK = "\ufeff"


class PlamoEncoder:
    """Turn text into ids by the sum of costs; special tokens are unknown here.

    Raises:
        TokenizerError: the file has no scores, or lacks a byte token.
    """

    strips_space = False

    def __init__(self, vocab: Vocab) -> None:
        if vocab.scores is None:
            raise TokenizerError(f"{PREFIX}scores is missing: PLaMo's tokenizer adds up scores")
        self._bytes = find_byte_tokens(vocab)
        missing = next((byte for byte in range(256) if byte not in self._bytes), None)
        if missing is not None:
            raise TokenizerError(f"{PREFIX}tokens lacks the byte token <0x{missing:02X}>")
        barred = vocab.ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.BYTE)
        costs = {i: _cost(score) for i, score in enumerate(vocab.scores.tolist())}
        for i in barred:
            del costs[i]
        self._costs = {i: cost for i, cost in costs.items() if cost < _TOO_MUCH}
        self._index = PieceIndex({vocab.tokens[i]: i for i in self._costs})

    def encode(self, text: str, *, continuing: bool) -> list[int]:
        """The ids of a text without special tokens."""
        if not continuing:
            text = text.removeprefix(_BYTE_ORDER_MARK)
        ids: list[int] = []
        at = 0
        steps = self._find_steps(text)
        while at < len(text):
            length, token = steps[at]
            ids += self._spell_bytes(text[at]) if token is None else [token]
            at += length
        return ids

    def piece_bytes(self, text: str, kind: int) -> bytes:
        """The bytes that a piece stands for."""
        if kind == TokenKind.BYTE:
            return bytes([int(text[3:5], 16)])
        return text.encode("utf-8", "surrogateescape")

    def _find_steps(self, text: str) -> list[tuple[int, int | None]]:
        """The length and the id of the piece to take at each place; None: spell a character."""
        n = len(text)
        costs = [0] * (n + 1)
        steps: list[tuple[int, int | None]] = [(1, None)] * n
        for at in range(n - 1, -1, -1):
            best: int | None = None
            for length, token in self._index.matches(text, at):
                cost = costs[at + length] + self._costs[token]
                if best is None or cost < best:
                    best, steps[at] = cost, (length, token)
            unknown = costs[at + 1] + _UNKNOWN_COST
            if best is None or unknown < best:
                best, steps[at] = unknown, (1, None)
            costs[at] = best
        return steps

    def _spell_bytes(self, letter: str) -> list[int]:
        return [self._bytes[byte] for byte in letter.encode("utf-8")]


def _cost(score: float) -> int:
    """A score in units, rounded half away from zero; one that is not finite costs too much."""
    if not isfinite(score):
        return _TOO_MUCH
    scaled = score * _UNIT
    return -trunc(scaled + copysign(0.5, scaled))
