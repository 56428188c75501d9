"""What sequences and tokens of a file are called here."""

from __future__ import annotations

import numpy as np

from kvcellar.errors import SnapshotFileError, SnapshotMismatch
from kvcellar.snapshot.llama.value import FileCells, LlamaFile
from kvcellar.types import Int32Array, Int64Array


class Naming:
    """The sequences of a file, numbered 0, 1, … in the order of their ids.

    Raises:
        SnapshotMismatch: there are more than a cache may have.
        SnapshotFileError: a cell of a session belongs to nobody, or to a negative id.
    """

    def __init__(self, file: LlamaFile, n_seq_max: int) -> None:
        self._is_session = file.kind == "session"
        self.ids: tuple[int, ...] = (0,)
        if not self._is_session:
            return
        every = [stream.cells for part in file.parts for stream in part]
        if file.states is not None:
            every.append(file.states.cells)
        known = np.unique(np.concatenate([cells.ids for cells in every]))
        if any(bool((cells.counts == 0).any()) for cells in every):
            raise SnapshotFileError("llama.cpp's file: a cell belongs to no sequence")
        if len(known) and known[0] < 0:
            raise SnapshotFileError(f"llama.cpp's file: a cell of sequence {known[0]}")
        if len(known) > n_seq_max:
            hint = "use a larger n_seq_max"
            raise SnapshotMismatch("sequences", len(known), f"at most {n_seq_max}", hint)
        self.ids = tuple(known.tolist())

    def owners(self, cells: FileCells) -> Int64Array:
        """Pairs of a cell and the number of a sequence; a file of one sequence has but one."""
        if not self._is_session:
            every = np.arange(len(cells), dtype=np.int64)
            return np.stack((every, np.zeros_like(every)))
        which, ids = cells.owners
        return np.stack((which, np.searchsorted(self.ids, ids)))


class Tokens:
    """The token ids of cells.

    A cell of a file has none. Those in the head are taken for sequence 0's if they are as many as
    its tokens, and these stand at 0, 1, …. All others are -1.

    Args:
        listed: those in the head.
        positions: where the tokens of sequence 0 stand.
        n_vocab: ids must be below it.

    Raises:
        SnapshotMismatch: one is not in the vocabulary.
    """

    def __init__(self, listed: Int32Array, positions: Int32Array, n_vocab: int) -> None:
        fits = np.array_equal(positions, np.arange(len(listed)))
        self._known = listed if fits else listed[:0]
        bad = self._known[(self._known < -1) | (self._known >= n_vocab)]
        if len(bad):
            raise SnapshotMismatch("token", int(bad[0]), f"one of {n_vocab}")

    def at(self, seq: int, positions: Int32Array) -> Int32Array:
        """The ids of a sequence's tokens at positions."""
        found = np.full(len(positions), -1, np.int32)
        known = positions < (len(self._known) if seq == 0 else 0)
        found[known] = self._known[positions[known]]
        return found

    def of_cells(self, positions: Int32Array, owners: Int64Array) -> Int32Array:
        """The ids of cells."""
        found = np.full(len(positions), -1, np.int32)
        mine = owners[0][owners[1] == 0]
        found[mine] = self.at(0, positions[mine])
        return found
