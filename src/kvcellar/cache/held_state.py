"""What a cache of states knows of one sequence, as a value.

A :class:`HeldState` never changes: a verb makes another one, sequences that share it refer to the
same, and what refers to an old one (a checkpoint, a transaction) can always go back to it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from kvcellar.cache.checkpoints import Checkpoint
from kvcellar.cache.history import History
from kvcellar.cells import check_moved
from kvcellar.errors import NotSupported, PositionError
from kvcellar.types import MAX_POSITION, BoolArray, Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class HeldState:
    """The state in ``row``, what it has absorbed (at least one token), and older ones to go to."""

    row: int
    history: History
    checkpoints: tuple[Checkpoint, ...] = ()  # by the tokens they have absorbed

    @property
    def rows(self) -> set[int]:
        """The rows that it needs."""
        return {self.row, *(kept.row for kept in self.checkpoints)}

    def absorbed(self, row: int, tokens: Int32Array | None, positions: Int32Array) -> HeldState:
        """What it is when further tokens have made the state in that row."""
        return HeldState(row, self.history.extended(tokens, positions), self.checkpoints)

    def keeping(self, new: Checkpoint) -> HeldState:
        """The same with one more to go back to, unless there is one at that token."""
        if any(kept.n == new.n for kept in self.checkpoints):
            return self
        kept = sorted((*self.checkpoints, new), key=lambda one: one.n)
        return replace(self, checkpoints=tuple(kept))

    def dropping(self, rows: Collection[int]) -> HeldState:
        """The same without what is kept in these rows."""
        kept = tuple(one for one in self.checkpoints if one.row not in rows)
        return self if len(kept) == len(self.checkpoints) else replace(self, checkpoints=kept)

    def back_to(self, checkpoint: Checkpoint) -> HeldState:
        """What it was when that one was made."""
        kept = tuple(one for one in self.checkpoints if one.n <= checkpoint.n)
        return HeldState(checkpoint.row, self.history.cut(checkpoint.n), kept)

    def removed(self, lo: int, hi: int) -> tuple[bool, HeldState | None]:
        """Whether the range of positions can be removed, and what is left; see ``seq_rm``."""
        last = self.history.last
        if 0 < lo <= last or 0 < hi <= last:
            n_left = self.history.n_before(lo)
            kept = next((one for one in self.checkpoints if one.n == n_left), None)
            if kept is None or not lo <= last < hi:
                return False, self
            return True, self.back_to(kept)
        return True, None if lo <= last < hi else self

    def rewound(self, p0: int) -> HeldState | None:
        """The newest that holds nothing from a position on; None: of nothing older."""
        n_left = self.history.n_before(p0)
        if n_left == self.history.n:
            return self
        older = [one for one in self.checkpoints if one.n <= n_left]
        return self.back_to(older[-1]) if older else None

    def shifted(self, lo: int, hi: int, delta: int) -> HeldState | None:
        """With positions in the range moved by delta; None: all of them fell below 0.

        Raises:
            PositionError: one would pass the largest position, or tokens would change their order.
            NotSupported: only some would fall below 0, and a state cannot forget these.
        """
        at = self.history.positions
        moving = (at >= lo) & (at < hi)
        if not moving.any() or delta == 0:
            return self
        check_moved(at[moving], delta)
        new = (at + max(delta, -MAX_POSITION) * moving.astype(np.int64)).astype(np.int32)
        _require_order(new, f"seq_add by {delta}")
        if new[-1] < 0:
            return None
        if new[0] < 0:
            raise NotSupported(
                f"seq_add by {delta} would drive position {at[0]} below 0: a state cannot forget "
                "some of its tokens; remove the sequence and decode what is wanted again"
            )
        return replace(self, history=self.history.at(new))

    def divided(self, lo: int, hi: int, d: int) -> HeldState:
        """With positions in the range divided by d, truncating.

        Raises:
            PositionError: tokens would change their order.
        """
        at = self.history.positions
        moving: BoolArray = (at >= lo) & (at < hi)
        new = np.where(moving, at // min(d, MAX_POSITION), at).astype(np.int32)
        _require_order(new, f"seq_div by {d}")
        return replace(self, history=self.history.at(new))


def _require_order(positions: Int32Array, verb: str) -> None:
    falls = np.flatnonzero(positions[1:] < positions[:-1])
    if len(falls):
        a, b = positions[falls[0]], positions[falls[0] + 1]
        raise PositionError(
            f"{verb} would put position {b} behind position {a}: a state has absorbed its tokens "
            "in their order"
        )
