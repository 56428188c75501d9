"""What one microbatch touches: the cells it writes, and those that each of its tokens may read.

A :class:`Plan` adds to a microbatch where its K and V rows go and which cells each of its tokens
may attend to. Plans are values: a backend needs nothing else.

A token may attend to a cell if they share an owner and the cell's position is not after its own,
nor further back than the window, where there is one. :func:`attention_mask` and
:func:`cell_lists` say the same, as a mask or as lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcellar.batch import MicroBatch
from kvcellar.types import BoolArray, Float16Array, Int32Array, Int64Array, OwnerBits


@dataclass(frozen=True, slots=True)
class CellLists:
    """Token i may attend to ``cells[starts[i]:ends[i]]``, at least one; lists may overlap.

    They are in the order of the positions, wherever the cells lie, so that sums over them do not
    depend on that.
    """

    cells: Int32Array
    starts: Int32Array  # [n]
    ends: Int32Array  # [n]

    def of(self, i: int) -> Int32Array:
        """The cells of token i."""
        return self.cells[self.starts[i] : self.ends[i]]

    @classmethod
    def separate(cls, lists: Sequence[Int32Array]) -> CellLists:
        """Lists that have nothing in common."""
        ends = np.cumsum([len(cells) for cells in lists], dtype=np.int32)
        starts = np.concatenate((np.zeros(1, np.int32), ends[:-1]))
        return cls(np.concatenate(lists).astype(np.int32), starts, ends)


@dataclass(frozen=True, slots=True)
class CellPlan:
    """Where a group of attention layers reads and writes: cell ``cells[i]`` receives token i.

    ``mask[i, c]`` is 0 where token i may attend to cell c and -inf elsewhere; n_kv cells are
    looked at, a multiple of the padding (or the whole cache). There is either a mask or lists
    of cells that say the same; with lists, n_kv is 0.
    """

    cells: Int64Array  # [n]
    mask: Float16Array  # [n, n_kv]
    lists: CellLists | None = None

    @property
    def n_kv(self) -> int:
        """How many cells the mask is about."""
        return int(self.mask.shape[1])

    @property
    def is_contiguous(self) -> bool:
        """Whether the cells are one run."""
        return bool(np.all(np.diff(self.cells) == 1))


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Where recurrent layers read and write.

    The microbatch has equally many tokens per sequence, sequence after sequence. Sequence i
    starts from the state in row ``sources[i]`` and leaves its new one in row ``targets[i]``, a row
    that nothing else refers to; the row behind the last (``n_rows``) is a state of zeros.
    """

    sources: Int32Array  # [n_seqs]
    targets: Int64Array  # [n_seqs]

    @property
    def n_seqs(self) -> int:
        """How many sequences take part."""
        return len(self.sources)


@dataclass(frozen=True, slots=True)
class Plan:
    """A placed microbatch: what is computed, and where each kind of layer reads and writes."""

    micro: MicroBatch
    groups: tuple[CellPlan, ...]
    states: StatePlan | None = None

    @property
    def n_tokens(self) -> int:
        """How many tokens are computed."""
        return self.micro.n_tokens

    @property
    def cells(self) -> Int64Array:
        """The first group's cells."""
        return self.groups[0].cells

    @property
    def mask(self) -> Float16Array:
        """The first group's mask."""
        return self.groups[0].mask

    @property
    def lists(self) -> CellLists | None:
        """The first group's lists."""
        return self.groups[0].lists

    @property
    def n_kv(self) -> int:
        """How many cells the first group's mask is about."""
        return self.groups[0].n_kv

    @property
    def is_contiguous(self) -> bool:
        """Whether the first group's cells are one run."""
        return self.groups[0].is_contiguous


_MINUS_INF = np.uint16(0xFC00)  # the bits of float16's -inf; 0 is those of 0.0
_NEVER = np.int32(2**31 - 1)  # behind every position
_BLOCK = 1 << 18  # mask elements worked on at a time, so that they stay in the CPU's cache


def attention_mask(
    micro: MicroBatch,
    positions: Int32Array,
    owners: OwnerBits,
    out: Float16Array | None = None,
    *,
    window: int = 0,
) -> Float16Array:
    """The mask of a microbatch over cells at these positions, with these owners.

    Args:
        micro: the tokens that attend.
        positions: of the n_kv cells looked at, ``[n_kv]``; those just placed belong to them.
        owners: of the same cells, ``[n_words, n_kv]``.
        out: where to build it, at least ``[n, n_kv]``; the result is then a view of this array.
        window: how many positions a token sees, its own included; 0: all.
    """
    shape = (len(micro.positions), len(positions))
    if out is None:
        out = np.empty(shape, np.float16)
    mask = out[: shape[0], : shape[1]]
    bits = mask.view(np.uint16)
    for rows, wanted in _owner_sets(micro.owners):
        allowed = _owned(owners, wanted)
        if len(rows) == 1:
            allowed &= positions <= micro.positions[rows[0]]
            if window:
                allowed &= positions > micro.positions[rows[0]] - window
            np.multiply(~allowed, _MINUS_INF, out=bits[rows[0]])
        else:
            keys = np.where(allowed, positions, _NEVER)
            _fill_rows(bits, rows, micro.positions, keys, window)
    return mask


def cell_lists(
    micro: MicroBatch, positions: Int32Array, owners: OwnerBits, window: int = 0
) -> CellLists:
    """The cells that each token may attend to: those where :func:`attention_mask` has a 0.

    Tokens with the same owners share a list, of which each sees a stretch.
    """
    found: list[Int32Array] = []
    starts, ends = np.empty((2, len(micro.positions)), np.int32)
    n = 0
    for rows, wanted in _owner_sets(micro.owners):
        cells, at = _by_position(np.flatnonzero(_owned(owners, wanted)), positions)
        where = micro.positions[rows]
        ends[rows] = n + np.searchsorted(at, where, side="right")
        starts[rows] = n
        if window:
            starts[rows] += np.searchsorted(at, where - window, side="right").astype(np.int32)
        found.append(cells.astype(np.int32))
        n += len(cells)
    return CellLists(found[0] if len(found) == 1 else np.concatenate(found), starts, ends)


def _by_position(cells: Int64Array, positions: Int32Array) -> tuple[Int64Array, Int32Array]:
    """Cells in the order of their positions, and these."""
    at = positions[cells]
    if bool((at[1:] >= at[:-1]).all()):
        return cells, at
    order = np.argsort(at, kind="stable")
    return cells[order], at[order]


def _owner_sets(owners: OwnerBits) -> list[tuple[Int64Array, OwnerBits]]:
    """The distinct owner sets of tokens, each with the rows that have it."""
    n = owners.shape[1]
    if n == 1 or bool((owners == owners[:, :1]).all()):
        return [(np.arange(n), owners[:, 0])]
    rows_of: dict[bytes, list[int]] = {}
    columns = np.ascontiguousarray(owners.T)
    for row in range(n):
        rows_of.setdefault(columns[row].tobytes(), []).append(row)
    return [(np.array(rows, np.int64), columns[rows[0]]) for rows in rows_of.values()]


def _owned(owners: OwnerBits, wanted: OwnerBits) -> BoolArray:
    words = np.flatnonzero(wanted)
    result = np.zeros(owners.shape[1], np.bool_)
    for i, word in enumerate(words):
        shared = (owners[word] & wanted[word]) != 0
        result = shared if i == 0 else result | shared
    return result


def _fill_rows(
    bits: np.ndarray[tuple[int, ...], np.dtype[np.uint16]],
    rows: Int64Array,
    positions: Int32Array,
    keys: Int32Array,
    window: int,
) -> None:
    """Fill mask rows from the cells' positions; a cell of another owner has one never reached."""
    step = max(1, _BLOCK // max(1, len(keys)))
    dense = int(rows[-1]) - int(rows[0]) == len(rows) - 1
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        hidden = keys > positions[part, np.newaxis]
        if window:
            hidden |= keys <= positions[part, np.newaxis] - window
        if dense:
            np.multiply(hidden, _MINUS_INF, out=bits[int(part[0]) : int(part[-1]) + 1])
        else:
            bits[part] = np.multiply(hidden, _MINUS_INF)
