"""The tokens that a state has absorbed, and where they stand: a value that grows cheaply.

A :class:`History` never changes. Those that grew out of each other share one log, of which each
sees a beginning; the one that sees all of it can be extended without copying. So appending costs
what is appended, and forks, checkpoints and rollbacks cost nothing until one of them goes its own
way.
"""

from __future__ import annotations

import numpy as np

from kvcellar.types import Int32Array


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


class History:
    """The first ``n`` tokens of a log."""

    __slots__ = ("_log", "n")

    def __init__(self, log: _Log, n: int) -> None:
        self._log = log
        self.n = n

    @classmethod
    def empty(cls) -> History:
        """That of a state of zeros."""
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
        """This and what follows it; embeddings have no tokens."""
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
