"""The states of all sequences, and which rows they need.

A row is free when no sequence, no checkpoint of one and no open transaction refers to it. Nothing
is counted up and down: who refers to what is asked when a row is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvcellar.cache.checkpoints import Checkpoint, CheckpointPolicy
from kvcellar.cache.content import StateContent
from kvcellar.cache.held_state import HeldState
from kvcellar.cache.history import History
from kvcellar.cache.state_placement import Piece
from kvcellar.errors import InvariantError
from kvcellar.types import StateSpec

States = list["HeldState | None"]


class HeldStates:
    """Of each sequence what is held, None if it is empty.

    Args:
        spec: the shape of the store.
        policy: which older states are kept.
    """

    def __init__(self, spec: StateSpec, policy: CheckpointPolicy) -> None:
        self.of: States = [None] * spec.n_seq_max
        self.saved: list[States] = []  # what open transactions may want back
        self.limit = policy.limit(spec.row_bytes)
        self._every = policy.every
        self._n_rows = spec.n_rows
        self._made = 0

    # -- rows

    def rows(self) -> list[int]:
        """Of each sequence the row of its state; the one behind the last if it has none."""
        return [self._n_rows if held is None else held.row for held in self.of]

    def unused(self) -> list[int]:
        """The rows that nobody refers to."""
        used = self._wanted_back()
        for held in self.of:
            used |= set() if held is None else held.rows
        return [row for row in range(self._n_rows) if row not in used]

    def spare(self) -> list[int]:
        """The rows of checkpoints alone, which can be given up; the oldest first."""
        fixed = self._wanted_back() | set(self.rows())
        serials = self._serials()
        return sorted(serials.keys() - fixed, key=lambda row: serials[row])

    def _wanted_back(self) -> set[int]:
        return {row for states in self.saved for held in states if held for row in held.rows}

    # -- checkpoints

    def keep(self, seq: int) -> bool:
        """Keep a sequence's state to go back to; False: there is none, or no budget."""
        held = self.of[seq]
        if held is None or self.limit == 0:
            return False
        self.of[seq] = held.keeping(self._checkpoint(held, self._serials()))
        self._shrink()
        return True

    def give_up(self, rows: Sequence[int]) -> None:
        """Drop the checkpoints in these rows."""
        if rows:
            self._change(lambda held: held.dropping(rows))

    def _checkpoint(self, held: HeldState, serials: dict[int, int]) -> Checkpoint:
        self._made += 1
        return Checkpoint(held.history.n, held.row, serials.setdefault(held.row, self._made))

    def _serials(self) -> dict[int, int]:
        """Of each row that is kept when it was first."""
        return {one.row: one.serial for held in self.of if held for one in held.checkpoints}

    def _shrink(self) -> None:
        serials = self._serials()
        oldest = sorted(serials, key=lambda row: serials[row])
        self.give_up(oldest[: max(0, len(oldest) - self.limit)])

    def _change(self, change: Callable[[HeldState], HeldState]) -> None:
        """Change what is held of every sequence; those that share it share it still."""
        known = {held: change(held) for held in self.of if held}
        self.of[:] = [held and known[held] for held in self.of]

    # -- what was taken out of a cache and is put in

    def adopt(
        self, content: StateContent, seq_ids: Sequence[int], rows: Mapping[int, int], shift: int
    ) -> None:
        """Let sequences hold states that were written into ``rows``, by their numbers.

        A sequence for which there is none keeps what it has.
        """
        texts: dict[object, HeldState] = {}  # those with the same text share its history
        serials = {state: self._made + i for i, state in enumerate(reversed(rows), 1)}
        self._made += len(rows)
        for number, seq in enumerate(seq_ids):
            if (held := content.held[number]) is None:
                continue
            kept = tuple(
                Checkpoint(n, rows[state], serials[state])
                for n, state in held.checkpoints
                if state in rows
            )
            key = (held.state, held.tokens.tobytes(), held.positions.tobytes(), kept)
            if key not in texts:
                at = held.positions + np.int32(shift)
                history = History.empty().extended(held.tokens, at)
                texts[key] = HeldState(rows[held.state], history, kept)
            self.of[seq] = texts[key]
        self._shrink()

    # -- decoding

    def absorb(self, pieces: Sequence[Piece]) -> None:
        """Let sequences have what a batch made of their states; old ones become checkpoints."""
        new = list(self.of)
        for piece in pieces:
            grown: dict[HeldState | None, HeldState] = {}
            for seq in piece.members:
                held = new[seq]
                if held not in grown:
                    start = held or HeldState(piece.row, History.empty())
                    grown[held] = start.absorbed(piece.row, piece.tokens, piece.positions)
                new[seq] = grown[held]
        kept: dict[HeldState, HeldState] = {}
        serials = self._serials()
        for seq in sorted({seq for piece in pieces for seq in piece.members}):
            held = new[seq]
            assert held is not None
            if held not in kept:
                kept[held] = self._with_checkpoints(self.of[seq], held, serials)
            new[seq] = kept[held]
        self.of[:] = new
        self._shrink()

    def _with_checkpoints(
        self, old: HeldState | None, new: HeldState, serials: dict[int, int]
    ) -> HeldState:
        if self.limit == 0:
            return new
        n_old = 0 if old is None else old.history.n
        by_ones = new.history.n - n_old == 1
        if old is not None:
            last = old.checkpoints[-1].n if old.checkpoints else 0
            if not by_ones or n_old - last >= self._every:
                new = new.keeping(self._checkpoint(old, serials))
        return new if by_ones else new.keeping(self._checkpoint(new, serials))

    # -- proof

    def check(self) -> None:
        """Raise InvariantError unless everybody who refers to a row means the same state."""
        texts: dict[int, bytes] = {}
        for held in [*self.of, *(held for states in self.saved for held in states)]:
            if held is not None:
                self._check_one(held)
                for row, n in [
                    (held.row, held.history.n),
                    *((c.row, c.n) for c in held.checkpoints),
                ]:
                    text = held.history.tokens[:n].tobytes()
                    _require(texts.setdefault(row, text) == text, f"row {row} is two states")
        n_kept = len(self._serials())
        _require(n_kept <= self.limit, f"{n_kept} checkpoints, but {self.limit} are allowed")

    def _check_one(self, held: HeldState) -> None:
        at, ends = held.history.positions, [one.n for one in held.checkpoints]
        _require(all(0 <= row < self._n_rows for row in held.rows), f"{held} has no such row")
        _require(len(at) > 0 and at[0] >= 0, f"{held} has absorbed nothing, or below 0")
        _require(bool((np.diff(at) >= 0).all()), f"positions of {held} descend")
        _require(ends == sorted({*ends}), f"checkpoints of {held} are in disorder")
        _require(all(0 < n <= len(at) for n in ends), f"a checkpoint of {held} lies beyond it")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(f"states contradict each other: {what}")
