"""What sequences hold, taken out of a cache: values that a cache of the same shape can take in.

Sequences are numbered 0, 1, … here, whatever their ids were. Cells that several share are there
once. K rows stand at their positions: no shift is pending. Rows are as a store's ``read_raw`` gives
them, whatever way V lies there.

A content whose ``start`` is above 0 is a piece of a text: what stood before is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvcellar.types import ByteArray, Float32Array, Int32Array, Int64Array

NO_TOKENS = np.empty((2, 0), np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class RowBytes:
    """K and V of n cells in each layer, ``[n, row_bytes]``; V has no bytes where it lies in K."""

    k: tuple[ByteArray, ...]
    v: tuple[ByteArray, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(rows.nbytes for rows in (*self.k, *self.v))


@dataclass(frozen=True, slots=True, eq=False)
class WindowContent:
    """A checkpoint of a window: the end of a text, and who can go back to it.

    ``slid`` are positions over ids of the tokens before ``positions``, ``[2, n]``.
    """

    positions: Int32Array
    tokens: Int32Array
    rows: RowBytes
    slid: Int32Array
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CellContent:
    """Cells of K and V.

    Attributes:
        positions: where each stands, ``[n]``; the cells of a sequence ascend.
        tokens: their ids, -1 where an embedding was decoded, ``[n]``.
        owners: pairs of a cell (an index into these) and a sequence, ``[2, n_pairs]``.
        rows: their K and V.
        slid: of each sequence positions over ids of the tokens that left its window, ``[2, n]``.
        checkpoints: windows to go back to, by their age.
    """

    positions: Int32Array
    tokens: Int32Array
    owners: Int64Array
    rows: RowBytes
    slid: tuple[Int32Array, ...]
    checkpoints: tuple[WindowContent, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows.n_bytes + sum(one.rows.n_bytes for one in self.checkpoints)

    def cells_of(self, seq: int) -> Int64Array:
        """The cells of a sequence, in the order of their positions."""
        cells: Int64Array = self.owners[0][self.owners[1] == seq]
        return cells[np.argsort(self.positions[cells], kind="stable")]

    def text_of(self, seq: int) -> Int32Array:
        """Positions over ids of a sequence's tokens, those that slid out first."""
        cells = self.cells_of(seq)
        held = np.stack((self.positions[cells], self.tokens[cells]))
        return np.concatenate((self.slid[seq], held), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class HeldContent:
    """A sequence's state: the text that made it, and where it lies among the states.

    ``checkpoints`` are pairs of a number of tokens and the state after them, ascending.
    """

    positions: Int32Array
    tokens: Int32Array
    state: int
    checkpoints: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StateContent:
    """States ``[n, n_values]``, those that several share once; of each sequence what it holds."""

    states: Float32Array
    held: tuple[HeldContent | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CacheContent:
    """What ``n_seqs`` sequences hold in every part of a cache, from position ``start`` on."""

    n_seqs: int
    groups: tuple[CellContent, ...]
    states: StateContent | None = None
    start: int = field(default=0)

    def span(self, seq: int) -> tuple[int, int]:
        """The first and the last position of a sequence, (-1, -1) if it is empty.

        What slid out counts.
        """
        found = [group.text_of(seq)[0] for group in self.groups]
        if self.states is not None and (held := self.states.held[seq]) is not None:
            found.append(held.positions)
        held_by = [at for at in found if len(at)]
        if not held_by:
            return -1, -1
        return min(int(at[0]) for at in held_by), max(int(at[-1]) for at in held_by)

    def text_of(self, seq: int) -> Int32Array:
        """Positions over ids of a sequence's tokens, as the part tells that has most of them."""
        if self.groups:
            return self.groups[0].text_of(seq)
        held = None if self.states is None else self.states.held[seq]
        return NO_TOKENS if held is None else np.stack((held.positions, held.tokens))

    @property
    def has_slid(self) -> bool:
        """Whether tokens have left a window."""
        return any(slid.shape[1] > 0 for group in self.groups for slid in group.slid)

    @property
    def n_bytes(self) -> int:
        """Bytes of K, V and states."""
        states = 0 if self.states is None else self.states.states.nbytes
        return states + sum(group.n_bytes for group in self.groups)
