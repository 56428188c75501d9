"""What a cache of a window remembers of the tokens that it holds no more.

The next token of a sequence, at q, attends to ``q - window + 1 … q - 1``. A sequence is *whole*
while no token that slid out is among those: then decoding on gives what a full cache would give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvcellar.types import BoolArray, Int32Array, Int64Array

Positions: TypeAlias = "Int32Array | Int64Array"

Move: TypeAlias = Callable[[Int64Array], Int64Array]
"""Where positions go."""

_NONE = np.empty((2, 0), np.int32)


@dataclass(frozen=True, slots=True)
class Slid:
    """The tokens of one sequence that slid out, in the order of their positions; a value.

    ``pieces`` are positions over token ids, ``[2, n]`` each, none more than half as long as the
    one before it: taking in more is cheap, and so is keeping what there was.
    """

    pieces: tuple[Int32Array, ...] = ()

    @classmethod
    def of(cls, positions: Positions, tokens: Int32Array) -> Slid:
        """These tokens, in the order of their positions."""
        order = np.argsort(positions, kind="stable")
        rows = np.stack((positions[order], tokens[order])).astype(np.int32)
        return cls((rows,) if len(order) else ())

    def __len__(self) -> int:
        return sum(piece.shape[1] for piece in self.pieces)

    @property
    def positions(self) -> Int32Array:
        """Where they stood, or would stand by now."""
        at: Int32Array = self._rows()[0]
        return at

    @property
    def tokens(self) -> Int32Array:
        """Their ids."""
        tokens: Int32Array = self._rows()[1]
        return tokens

    def grown(self, positions: Int32Array, tokens: Int32Array) -> Slid:
        """These and tokens behind them, in the order of their positions."""
        new = np.stack((positions, tokens)).astype(np.int32)
        pieces = list(self.pieces)
        while pieces and pieces[-1].shape[1] < 2 * new.shape[1]:
            new = np.concatenate((pieces.pop(), new), axis=1)
        return Slid((*pieces, new))

    def inside(self, lo: int, hi: int) -> Slid:
        """Those whose positions lie in the range."""
        return self._where(within(self.positions, lo, hi))

    def outside(self, lo: int, hi: int) -> Slid:
        """Those whose positions do not lie in the range."""
        return self._where(~within(self.positions, lo, hi))

    def joined(self, other: Slid) -> Slid:
        """These and others, in the order of their positions."""
        at, tokens = np.concatenate((self._rows(), other._rows()), axis=1)
        return Slid.of(at, tokens)

    def moved(self, lo: int, hi: int, move: Move) -> Slid:
        """Those in the range moved; positions below 0 go. Itself if nothing moves."""
        old = self.positions.astype(np.int64)
        new = np.where(within(old, lo, hi), move(old), old)
        if bool((new == old).all()):
            return self
        return Slid.of(new[new >= 0], self.tokens[new >= 0])

    def _where(self, mask: BoolArray) -> Slid:
        return self if bool(mask.all()) else Slid.of(self.positions[mask], self.tokens[mask])

    def _rows(self) -> Int32Array:
        return np.concatenate((_NONE, *self.pieces), axis=1)


def is_whole(slid: Positions, held: Positions, window: int) -> bool:
    """Whether a sequence with these positions is whole, what slid out lying before what is held."""
    if not len(slid):
        return True
    if not len(held):
        return False
    last = int(slid.max())
    return last < int(held.min()) and last <= int(held.max()) + 1 - window


def within(positions: Positions, lo: int, hi: int) -> BoolArray:
    """Which of the positions lie in the range."""
    inside: BoolArray = (positions >= lo) & (positions < hi)
    return inside


def closed(positions: Positions, lo: int, hi: int, shift: int) -> Positions:
    """Positions without those in the range, those behind it moved up by ``shift``."""
    left = positions[~within(positions, lo, hi)]
    return np.where(left < lo, left, left - shift)
