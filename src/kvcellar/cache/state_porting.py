"""States taken out of a cache, and put into one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcellar.backends.base import StateStore
from kvcellar.cache.content import HeldContent, StateContent
from kvcellar.cache.held_states import HeldStates
from kvcellar.errors import CacheFull
from kvcellar.types import Int64Array


class PortsStates:
    """What a cache of states needs for :mod:`kvcellar.cache.porting`."""

    store: StateStore
    states: HeldStates

    def port_out(self, seq_ids: Sequence[int], lo: int, checkpoints: bool) -> StateContent:
        """The states of sequences, and the texts from a position on that made them."""
        rows: dict[int, int] = {}  # of each row its number among the states
        held: list[HeldContent | None] = []
        for seq in seq_ids:
            mine = self.states.of[seq]
            if mine is None or (first := mine.history.n_before(lo)) == mine.history.n:
                held.append(None)
                continue
            kept = mine.checkpoints if checkpoints else ()
            state = rows.setdefault(mine.row, len(rows))
            pairs = tuple((one.n, rows.setdefault(one.row, len(rows))) for one in kept)
            at, tokens = mine.history.positions[first:], mine.history.tokens[first:]
            held.append(HeldContent(at.copy(), tokens.copy(), state, pairs))
        return StateContent(self.store.read(np.array(list(rows), np.int64)), tuple(held))

    def port_in(self, content: StateContent, seq_ids: Sequence[int], shift: int) -> None:
        """Let empty sequences have sound states; of checkpoints as many as there is room for.

        Raises:
            CacheFull: fewer rows are free than sequences need.
        """
        wanted = [None if held is None else held.state for held in content.held]
        needed = list(dict.fromkeys(state for state in wanted if state is not None))
        free = self.states.unused()
        if len(needed) > len(free):
            hint = "all rows of states are in use: remove sequences or use a larger n_seq_max"
            raise CacheFull(len(needed), len(free), hint)
        n_kept = min(self.states.limit, len(free) - len(needed))
        chosen = [*needed, *_latest(content, needed, n_kept)]
        rows = dict(zip(chosen, free, strict=False))
        self.store.write(_array(list(rows.values())), content.states[_array(chosen)])
        self.states.adopt(content, seq_ids, rows, shift)


def _latest(content: StateContent, taken: Sequence[int], n: int) -> list[int]:
    """At most n states of checkpoints alone, those after the most tokens first."""
    ends: dict[int, int] = {}
    for held in content.held:
        for end, state in () if held is None else held.checkpoints:
            ends[state] = max(end, ends.get(state, 0))
    alone = [state for state in ends if state not in taken]
    return sorted(alone, key=lambda state: -ends[state])[:n]


def _array(numbers: Sequence[int]) -> Int64Array:
    return np.array(numbers, np.int64)
