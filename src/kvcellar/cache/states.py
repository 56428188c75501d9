"""The states of all sequences: which rows they need, and the texts that made them.

A row is free when no sequence, no checkpoint of one and no open transaction refers to it. There are
no reference counts: references are collected when a row is wanted.

:class:`SequenceState` and :class:`History` never change: a verb makes another value, sequences that
share a state refer to the same, and what refers to an old one (a checkpoint, a transaction) can
always go back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvcellar.cache.base import CheckpointPolicy
from kvcellar.cache.changes import Undo
from kvcellar.cache.content import StateData
from kvcellar.cache.state_placement import Piece
from kvcellar.cells import check_moved
from kvcellar.errors import InvariantError, NotSupported, PositionError
from kvcellar.types import MAX_POSITION, BoolArray, Int32Array, StateSpec

States = list["SequenceState | None"]


class StateTable:
    """What each sequence holds, None if it is empty.

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
        self._start: tuple[SequenceState | None, ...] = ()

    def remember(self) -> Undo:
        """Return what puts back what each sequence holds now."""
        self._start = of = tuple(self.of)
        saved, made = list(self.saved), self._made

        def undo() -> None:
            self.of[:] = of
            self.saved[:] = saved
            self._made = made

        return undo

    # -- rows

    def rows_at_start(self) -> set[int]:
        """The rows that were needed when the change began that is being made."""
        return {row for held in self._start if held for row in held.rows}

    def rows(self) -> list[int]:
        """For each sequence, the row of its state; the row behind the last if it has none."""
        return [self._n_rows if held is None else held.row for held in self.of]

    def unused(self) -> list[int]:
        """The rows that nothing refers to."""
        used = self._wanted_back()
        for held in self.of:
            used |= set() if held is None else held.rows
        return [row for row in range(self._n_rows) if row not in used]

    def spare(self) -> list[int]:
        """The rows that only checkpoints refer to and that can be evicted; the oldest first."""
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

    def evict(self, rows: Sequence[int]) -> None:
        """Drop the checkpoints in these rows."""
        if rows:
            self._change(lambda held: held.dropping(rows))

    def _checkpoint(self, held: SequenceState, serials: dict[int, int]) -> Checkpoint:
        self._made += 1
        return Checkpoint(held.history.n, held.row, serials.setdefault(held.row, self._made))

    def _serials(self) -> dict[int, int]:
        """For each row that a checkpoint keeps, when it was first kept."""
        return {one.row: one.serial for held in self.of if held for one in held.checkpoints}

    def _shrink(self) -> None:
        serials = self._serials()
        oldest = sorted(serials, key=lambda row: serials[row])
        self.evict(oldest[: max(0, len(oldest) - self.limit)])

    def _change(self, change: Callable[[SequenceState], SequenceState]) -> None:
        """Change what every sequence holds; those that share a state still do."""
        known = {held: change(held) for held in self.of if held}
        self.of[:] = [held and known[held] for held in self.of]

    # -- imports

    def adopt(
        self, content: StateData, seq_ids: Sequence[int], rows: Mapping[int, int], shift: int
    ) -> None:
        """Give sequences imported states, which were written into ``rows`` by their numbers.

        A sequence without one keeps what it has.
        """
        texts: dict[object, SequenceState] = {}  # those with the same text share its history
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
                texts[key] = SequenceState(rows[held.state], history, kept)
            self.of[seq] = texts[key]
        self._shrink()

    # -- decoding

    def absorb(self, pieces: Sequence[Piece]) -> None:
        """Give sequences the states that a batch made; old ones become checkpoints."""
        new = list(self.of)
        for piece in pieces:
            grown: dict[SequenceState | None, SequenceState] = {}
            for seq in piece.members:
                held = new[seq]
                if held not in grown:
                    start = held or SequenceState(piece.row, History.empty())
                    grown[held] = start.absorbed(piece.row, piece.tokens, piece.positions)
                new[seq] = grown[held]
        kept: dict[SequenceState, SequenceState] = {}
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
        self, old: SequenceState | None, new: SequenceState, serials: dict[int, int]
    ) -> SequenceState:
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
        """Raise InvariantError unless all references to a row mean the same state."""
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

    def _check_one(self, held: SequenceState) -> None:
        at, ends = held.history.positions, [one.n for one in held.checkpoints]
        _require(all(0 <= row < self._n_rows for row in held.rows), f"{held} has no such row")
        _require(len(at) > 0 and at[0] >= 0, f"{held} has absorbed nothing, or below 0")
        _require(bool((np.diff(at) >= 0).all()), f"positions of {held} descend")
        _require(ends == sorted({*ends}), f"checkpoints of {held} are in disorder")
        _require(all(0 < n <= len(at) for n in ends), f"a checkpoint of {held} lies beyond it")


@dataclass(frozen=True, slots=True, eq=False)
class SequenceState:
    """The state in ``row``, the tokens it absorbed (at least one), and older ones to go back to."""

    row: int
    history: History
    checkpoints: tuple[Checkpoint, ...] = ()  # by the tokens they have absorbed

    @property
    def rows(self) -> set[int]:
        """The rows that it needs."""
        return {self.row, *(kept.row for kept in self.checkpoints)}

    def absorbed(self, row: int, tokens: Int32Array | None, positions: Int32Array) -> SequenceState:
        """What it is when further tokens have made the state in that row."""
        return SequenceState(row, self.history.extended(tokens, positions), self.checkpoints)

    def keeping(self, new: Checkpoint) -> SequenceState:
        """The same with one more to go back to, unless there is one at that token."""
        if any(kept.n == new.n for kept in self.checkpoints):
            return self
        kept = sorted((*self.checkpoints, new), key=lambda one: one.n)
        return replace(self, checkpoints=tuple(kept))

    def dropping(self, rows: Collection[int]) -> SequenceState:
        """The same without what is kept in these rows."""
        kept = tuple(one for one in self.checkpoints if one.row not in rows)
        return self if len(kept) == len(self.checkpoints) else replace(self, checkpoints=kept)

    def back_to(self, checkpoint: Checkpoint) -> SequenceState:
        """What it was when that one was made."""
        kept = tuple(one for one in self.checkpoints if one.n <= checkpoint.n)
        return SequenceState(checkpoint.row, self.history.cut(checkpoint.n), kept)

    def removed(self, lo: int, hi: int) -> tuple[bool, SequenceState | None]:
        """Whether the range of positions can be removed, and what is left; see ``seq_rm``."""
        last = self.history.last
        if 0 < lo <= last or 0 < hi <= last:
            n_left = self.history.n_before(lo)
            kept = next((one for one in self.checkpoints if one.n == n_left), None)
            if kept is None or not lo <= last < hi:
                return False, self
            return True, self.back_to(kept)
        return True, None if lo <= last < hi else self

    def rewound(self, p0: int) -> SequenceState | None:
        """The newest that holds nothing from a position on; None: of nothing older."""
        n_left = self.history.n_before(p0)
        if n_left == self.history.n:
            return self
        older = [one for one in self.checkpoints if one.n <= n_left]
        return self.back_to(older[-1]) if older else None

    def shifted(self, lo: int, hi: int, delta: int) -> SequenceState | None:
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

    def divided(self, lo: int, hi: int, d: int) -> SequenceState:
        """With positions in the range divided by d, truncating.

        Raises:
            PositionError: tokens would change their order.
        """
        at = self.history.positions
        moving: BoolArray = (at >= lo) & (at < hi)
        new = np.where(moving, at // min(d, MAX_POSITION), at).astype(np.int32)
        _require_order(new, f"seq_div by {d}")
        return replace(self, history=self.history.at(new))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A row that holds the state after the first ``n`` tokens of a sequence."""

    n: int
    row: int
    serial: int  # the later it was made, the larger


class History:
    """The tokens that a state has absorbed, and where they stand: the first ``n`` of a log.

    Histories that grew out of each other share one log, of which each sees a beginning; the one
    that sees all of it can be extended without copying. So appending costs what is appended, and
    forks, checkpoints and rollbacks cost nothing until one of them continues differently.
    """

    __slots__ = ("_log", "n")

    def __init__(self, log: _Log, n: int) -> None:
        self._log = log
        self.n = n

    @classmethod
    def empty(cls) -> History:
        """The history of a state of zeros."""
        none = np.empty(0, np.int32)
        return cls(_Log(none, none), 0)

    @property
    def tokens(self) -> Int32Array:
        """Their ids in the order in which they were absorbed; -1 where an embedding was."""
        return self._log.rows[0, : self.n]

    @property
    def positions(self) -> Int32Array:
        """Where they stand; never descending."""
        return self._log.rows[1, : self.n]

    @property
    def last(self) -> int:
        """The position of the last token, -1 if there is none."""
        return int(self._log.rows[1, self.n - 1]) if self.n else -1

    def n_before(self, p0: int) -> int:
        """How many tokens stand before a position."""
        return int(np.searchsorted(self.positions, p0))

    def extended(self, tokens: Int32Array | None, positions: Int32Array) -> History:
        """Append tokens; embeddings have none."""
        log = self._log
        if self.n < log.n:  # something else has followed already
            log = _Log(self.tokens, self.positions)
        log.append(tokens, positions)
        return History(log, log.n)

    def cut(self, n: int) -> History:
        """Its first n tokens."""
        return History(self._log, n)

    def at(self, positions: Int32Array) -> History:
        """The same tokens at other positions."""
        return History(_Log(self.tokens, positions), self.n)


class _Log:
    """Tokens and positions in arrays with room to grow; only ever appended to."""

    def __init__(self, tokens: Int32Array, positions: Int32Array) -> None:
        self.rows = np.stack((tokens, positions))
        self.n = len(tokens)

    def append(self, tokens: Int32Array | None, positions: Int32Array) -> None:
        end = self.n + len(positions)
        if end > self.rows.shape[1]:
            grown = np.empty((2, max(16, 2 * end)), np.int32)
            grown[:, : self.n] = self.rows[:, : self.n]
            self.rows = grown
        self.rows[0, self.n : end] = -1 if tokens is None else tokens
        self.rows[1, self.n : end] = positions
        self.n = end


def _require_order(positions: Int32Array, verb: str) -> None:
    falls = np.flatnonzero(positions[1:] < positions[:-1])
    if len(falls):
        a, b = positions[falls[0]], positions[falls[0] + 1]
        raise PositionError(
            f"{verb} would put position {b} behind position {a}: a state has absorbed its tokens "
            "in their order"
        )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(f"states contradict each other: {what}")
