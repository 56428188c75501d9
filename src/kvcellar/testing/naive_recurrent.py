"""What a cache of states should do, said with lists: a text a sequence, copied whenever it forks.

Every state that was ever computed has a number, its *mark*; sequences with the same mark share one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field


@dataclass
class NaiveState:
    """What a sequence knows: tokens with their positions, and how many of them older states had."""

    mark: int
    text: list[tuple[int, int]]  # token, position
    kept: dict[int, int] = field(default_factory=dict)  # number of tokens to mark

    @property
    def tokens(self) -> list[int]:
        """The token ids."""
        return [token for token, _ in self.text]

    @property
    def positions(self) -> list[int]:
        """Where they stand."""
        return [at for _, at in self.text]


class NaiveStates:
    """The sequences of a cache that keeps at most ``limit`` older states."""

    def __init__(self, limit: int, every: int) -> None:
        self.of: dict[int, NaiveState] = {}
        self.limit = limit
        self.every = every
        self._ages: dict[int, int] = {}  # by mark, of those that were kept
        self._n_marks = 0
        self._n_kept = 0

    def copy(self) -> NaiveStates:
        """An independent copy."""
        return deepcopy(self)

    def last(self, seq: int) -> int:
        """The position of the last token, -1 if there is none."""
        return self.of[seq].positions[-1] if seq in self.of else -1

    def mark(self, seq: int) -> int:
        """Tells the sequence's state from others; 0 is that of zeros."""
        return self.of[seq].mark if seq in self.of else 0

    @property
    def shared(self) -> list[list[int]]:
        """The groups of sequences that share one state."""
        marks = sorted({state.mark for state in self.of.values()})
        groups = [sorted(s for s in self.of if self.of[s].mark == mark) for mark in marks]
        return sorted(group for group in groups if len(group) > 1)

    # -- verbs; ranges have been closed: 0 <= p0, and p1 is a number

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        """Drop a sequence, or every one (-1), from the range, or none of them."""
        before = deepcopy(self.of)
        for one in list(self.of) if seq == -1 else [seq]:
            if not self._remove(one, p0, p1):
                self.of = before
                return False
        return True

    def _remove(self, seq: int, p0: int, p1: int) -> bool:
        last = self.last(seq)
        if last < 0 or not (0 < p0 <= last or 0 < p1 <= last):
            if p0 == 0 and p1 > last:
                self.of.pop(seq, None)
            return True
        n_left = sum(at < p0 for at in self.of[seq].positions)
        if p1 > last >= p0 and n_left in self.of[seq].kept:
            self._go_back(seq, n_left)
            return True
        return False

    def rewind(self, seq: int, p0: int) -> int:
        """Go back to the newest state that has nothing from p0 on."""
        if seq in self.of:
            n_left = sum(at < p0 for at in self.of[seq].positions)
            if n_left < len(self.of[seq].text):
                self._go_back(seq, max([0, *(n for n in self.of[seq].kept if n <= n_left)]))
        return min(p0, self.last(seq) + 1)

    def _go_back(self, seq: int, n: int) -> None:
        if n == 0:
            del self.of[seq]
            return
        state = self.of[seq]
        state.mark = state.kept[n]
        state.text = state.text[:n]
        state.kept = {kept: mark for kept, mark in state.kept.items() if kept <= n}

    def seq_cp(self, src: int, dst: int) -> None:
        """Share src's state with dst."""
        if src != dst:
            self.of.pop(dst, None)
            if src in self.of:
                self.of[dst] = deepcopy(self.of[src])

    def seq_keep(self, seq: int) -> None:
        """Drop every other sequence."""
        self.of = {one: state for one, state in self.of.items() if one == seq}

    def move(self, seq: int, p0: int, p1: int, moved: dict[int, int]) -> bool:
        """Change recorded positions in the range; False: the cache has to refuse that."""
        if seq not in self.of:
            return True
        text = [(t, moved[at] if p0 <= at < p1 else at) for t, at in self.of[seq].text]
        positions = [at for _, at in text]
        if positions[-1] < 0 and positions == sorted(positions):
            del self.of[seq]
            return True
        if positions != sorted(positions) or positions[0] < 0:
            return False
        self.of[seq].text = text
        return True

    def clear(self) -> None:
        """Forget everything."""
        self.of = {}

    # -- decoding

    def can_share(self, owners: Sequence[frozenset[int]]) -> bool:
        """Whether no token would mix two states."""
        marks = {seq: self.mark(seq) for group in owners for seq in group}
        for i, group in enumerate(owners):
            if len({marks[seq] for seq in group}) > 1:
                return False
            marks.update(dict.fromkeys(group, -1 - i))
        return True

    def absorb(self, batch: Iterable[tuple[int, int, frozenset[int]]]) -> None:
        """Decode tokens, each with its position and its owners."""
        before = deepcopy(self.of)
        for token, at, group in batch:
            self._n_marks += 1
            for seq in group:
                state = self.of.setdefault(seq, NaiveState(0, []))
                state.text = [*state.text, (token, at)]
                state.mark = self._n_marks
        grown = [seq for seq in self.of if self.mark(seq) != _mark(before, seq)]
        for seq in sorted(grown):
            self._keep_around(before.get(seq), self.of[seq])
        self._shrink()

    def _keep_around(self, old: NaiveState | None, new: NaiveState) -> None:
        n_old = len(old.text) if old else 0
        several = len(new.text) - n_old > 1
        if old and (several or n_old - max(old.kept, default=0) >= self.every):
            self._keep(new, n_old, old.mark)
        if several:
            self._keep(new, len(new.text), new.mark)

    def checkpoint(self, seq: int) -> bool:
        """Keep what a sequence knows."""
        if seq not in self.of or not self.limit:
            return False
        self._keep(self.of[seq], len(self.of[seq].text), self.of[seq].mark)
        self._shrink()
        return True

    def _keep(self, state: NaiveState, n: int, mark: int) -> None:
        if n not in state.kept and self.limit:
            if mark not in self._kept_marks():
                self._n_kept += 1
                self._ages[mark] = self._n_kept
            state.kept[n] = mark

    def _kept_marks(self) -> Iterator[int]:
        return (mark for state in self.of.values() for mark in state.kept.values())

    def _shrink(self) -> None:
        marks = sorted(set(self._kept_marks()), key=lambda mark: self._ages[mark])
        for gone in marks[: max(0, len(marks) - self.limit)]:
            for state in self.of.values():
                state.kept = {n: mark for n, mark in state.kept.items() if mark != gone}


def _mark(states: dict[int, NaiveState], seq: int) -> int:
    return states[seq].mark if seq in states else 0
