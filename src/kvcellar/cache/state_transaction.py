"""Taking back what happened to states: a list of references, as no state is changed in its row.

Rows that were in use when a transaction began stay as they are until it ends, whoever has given
them up inside; ``CacheFull`` counts them as not free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcellar.cache.held_states import HeldStates
from kvcellar.cache.undoable import Nested, NestHost, Remember


class StateHost(NestHost, Protocol):
    """What a transaction needs of a cache of states."""

    def zero_unused(self) -> None:
        """Zero the rows that nobody refers to."""


class StateTransaction(Nested):
    """States, positions and checkpoints, as they are when it begins."""

    def __init__(
        self,
        host: StateHost,
        states: HeldStates,
        nest: list[StateTransaction],
        watchers: Sequence[Remember],
    ) -> None:
        super().__init__(host, nest, watchers)
        self.zero_later = False
        self._cache = host
        self._states = states
        self._all = nest
        nest.append(self)
        states.saved.append(list(states.of))

    def _take_back(self) -> None:
        self._states.of[:] = self._states.saved[-1]

    def _ended(self, *, kept: bool) -> None:
        self._all.pop()
        self._states.saved.pop()
        if kept and self.zero_later:
            if self._all:
                self._all[-1].zero_later = True
            else:
                self._cache.zero_unused()
