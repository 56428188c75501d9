"""What one decode touches: the pieces it is computed in, the cells each writes and may read.

A :class:`MicroBatch` is what is computed at once; a :class:`Plan` adds where its K and V rows go
and which cells each of its tokens may attend to. Plans are values: a backend needs nothing else.

The ``split_*`` functions take the owners of a batch's rows and say which rows each microbatch has:
every row once, the rows of a sequence in their order, at most ``n_ubatch`` rows a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcellar.errors import OptionError
from kvcellar.types import (
    Float16Array,
    Float32Array,
    Int32Array,
    Int64Array,
    OwnerBits,
)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """At most ``n_ubatch`` tokens (or embeddings) that are computed together.

    ``rows`` says which token of the batch each one was; ``outputs`` are the places within this
    microbatch whose logits are wanted.
    """

    rows: Int32Array  # [n]
    tokens: Int32Array | None  # [n]
    embeddings: Float32Array | None  # [n, n_embd]
    positions: Int32Array  # [n]
    owners: OwnerBits  # [n_words, n]
    outputs: Int32Array  # [n_outputs], ascending

    @property
    def n_tokens(self) -> int:
        """How many tokens are computed."""
        return len(self.positions)


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

    The microbatch's tokens are those of sequence after sequence, equally many of each. Sequence i
    starts from the state in row ``sources[i]`` and leaves its new one in row ``targets[i]``, a row
    that nobody else refers to; the row behind the last (``n_rows``) is a state of zeros.
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


def split_simple(n_rows: int, n_ubatch: int) -> list[Int64Array]:
    """Neighbouring rows, as many as fit; what attention needs."""
    _check_ubatch(n_ubatch)
    return [np.arange(i, min(i + n_ubatch, n_rows)) for i in range(0, n_rows, n_ubatch)]


def split_by_sequence(owners: OwnerBits, n_ubatch: int) -> list[Int64Array]:
    """Rows of one owner set each."""
    _check_ubatch(n_ubatch)
    return [
        np.array(rows[i : i + n_ubatch], np.int64)
        for groups in _segments(owners)
        for rows in groups
        for i in range(0, len(rows), n_ubatch)
    ]


def split_equal(owners: OwnerBits, n_ubatch: int) -> list[Int64Array]:
    """Equally many rows of each owner set that takes part, set after set; for recurrent states."""
    _check_ubatch(n_ubatch)
    result = []
    for groups in _segments(owners):
        left = groups
        while left:
            part = left[:n_ubatch]
            n = min(min(map(len, part)), n_ubatch // len(part))
            result.append(np.array([row for rows in part for row in rows[:n]], np.int64))
            left = [rows[n:] for rows in part if len(rows) > n] + left[n_ubatch:]
    return result


def _check_ubatch(n_ubatch: int) -> None:
    if n_ubatch < 1:
        raise OptionError(f"n_ubatch is {n_ubatch}: it must be at least 1")


def _segments(owners: OwnerBits) -> list[list[list[int]]]:
    """Stretches of rows within which owner sets are equal or disjoint; in each, rows by set.

    Sets that overlap without being equal share a sequence, whose rows must stay in order: the
    second of them starts a new stretch.
    """
    segments: list[list[list[int]]] = []
    groups: dict[int, list[int]] = {}
    seen = 0
    for row, column in enumerate(owners.T.tolist()):
        bits = sum(word << (64 * i) for i, word in enumerate(column))
        if bits not in groups and bits & seen:
            segments.append(list(groups.values()))
            groups, seen = {}, 0
        groups.setdefault(bits, []).append(row)
        seen |= bits
    return [*segments, list(groups.values())] if groups else segments
