"""What can be asked of a cache of states."""

from __future__ import annotations

import numpy as np

from kvcellar.backends.base import StateStore
from kvcellar.cache.held_state import HeldState
from kvcellar.cache.held_states import HeldStates
from kvcellar.cache.history import History
from kvcellar.cache.view import CacheView
from kvcellar.cells import CellTable
from kvcellar.cellsets import checked_id, pack_owners
from kvcellar.types import CacheSpec, Int32Array


class Recorded:
    """Questions about sequences, answered from ``states``. A cell is a row with an owner."""

    spec: CacheSpec
    store: StateStore
    states: HeldStates

    @property
    def can_shift(self) -> bool:
        """Whether positions can be moved: they are only recorded, so they can."""
        return True

    @property
    def used(self) -> int:
        """How many rows are the state of a sequence; those of checkpoints do not count."""
        return len({held.row for held in self.states.of if held})

    @property
    def token_count(self) -> int:
        """The sum of owners over rows: how many sequences have a state."""
        return sum(held is not None for held in self.states.of)

    def seq_pos_min(self, seq_id: int) -> int:
        """The position of the last token, for which alone a state stands; -1 when empty."""
        return self.seq_pos_max(seq_id)

    def seq_pos_max(self, seq_id: int) -> int:
        """The position of the last token, -1 when the sequence is empty."""
        return self._history(seq_id).last

    def n_free(self) -> int:
        """How many more tokens fit: always as many as the context was made for."""
        return self.spec.size

    def seq_count(self, seq_id: int) -> int:
        """How many tokens the sequence's state has absorbed."""
        return self._history(seq_id).n

    def seq_tokens(self, seq_id: int) -> Int32Array:
        """Their ids in their order; -1 where an embedding was decoded."""
        tokens: Int32Array = self._history(seq_id).tokens.copy()
        return tokens

    def seq_positions(self, seq_id: int) -> Int32Array:
        """Where they stand, never descending."""
        at: Int32Array = self._history(seq_id).positions.copy()
        return at

    def checkpoints(self, seq_id: int) -> tuple[int, ...]:
        """The positions of the last tokens of older states that a sequence can go back to."""
        held = self._held(seq_id)
        if held is None:
            return ()
        return tuple(int(held.history.positions[one.n - 1]) for one in held.checkpoints)

    def view(self, n_seq_max: int | None = None) -> CacheView:
        """The rows as a value: of each its owners, and the last token of the first of them."""
        table = CellTable(self.store.spec.n_rows, self.spec.n_seq_max)
        owners: dict[int, list[int]] = {}
        for seq, held in enumerate(self.states.of):
            if held is not None:
                owners.setdefault(held.row, []).append(seq)
        for row, seqs in owners.items():
            text = self._history(seqs[0])
            bits = pack_owners(np.zeros(len(seqs), np.int64), np.array(seqs), 1, len(table.owners))
            table.place(np.array([row]), text.positions[-1:], bits, text.tokens[-1:])
        return CacheView.of(table, n_seq_max)

    def check(self) -> None:
        """Prove that nobody who refers to a row means another state than the others do."""
        self.states.check()

    def _history(self, seq_id: int) -> History:
        held = self._held(seq_id)
        return History.empty() if held is None else held.history

    def _held(self, seq_id: int) -> HeldState | None:
        return self.states.of[checked_id(seq_id, self.spec.n_seq_max)]
