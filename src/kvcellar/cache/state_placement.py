"""Which rows the states of a batch are read from and written to.

* A sequence's first microbatch reads the row that it has (the row of zeros if it has none) and
  writes a row that nothing refers to. So until the batch is committed every state is as it was, and
  a batch that fails is simply forgotten.
* Later ones go on in place, in the row that the batch has taken, unless sequences that shared a
  token part there.

Rows that were filled in vain are not wiped: a row is written as a whole before it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvcellar.batch import MicroBatch
from kvcellar.cellsets import unpack_owners
from kvcellar.errors import BatchError, CacheFull
from kvcellar.plan import StatePlan
from kvcellar.types import Int32Array


class RowPlans(NamedTuple):
    """Which rows the microbatches of a batch read and write."""

    members: list[list[tuple[int, ...]]]  # for each microbatch, the owners of its stretches
    plans: list[StatePlan]
    taken: list[int]  # the rows that were free and are not any more


def members_of(micro: MicroBatch) -> list[tuple[int, ...]]:
    """The sequences that own each stretch of a microbatch, one after the other.

    Raises:
        BatchError: the stretches are not equally long, or a sequence takes part in two.
    """
    owners = micro.owners
    starts = [0, *(np.flatnonzero((owners[:, 1:] != owners[:, :-1]).any(axis=0)) + 1).tolist()]
    found: list[list[int]] = [[] for _ in starts]
    for stretch, seq in zip(*unpack_owners(owners[:, starts]), strict=True):
        found[stretch].append(int(seq))
    lengths = np.diff([*starts, micro.n_tokens]).tolist()
    if len(set(lengths)) > 1:
        raise BatchError(
            f"a microbatch has {lengths} tokens of sequences {found}: states need equally many of "
            "each, as split_equal gives them"
        )
    if max(Counter(seq for seqs in found for seq in seqs).values()) > 1:
        raise BatchError(f"a microbatch computes a sequence twice at once: {found}")
    return [tuple(seqs) for seqs in found]


def plan_rows(
    micros: Sequence[MicroBatch], rows: Sequence[int], pool: Sequence[int], hint: str
) -> RowPlans:
    """Give every microbatch the rows it needs; changes nothing.

    Args:
        micros: the batch.
        rows: for each sequence, the row that it reads.
        pool: rows that may be filled, in the order in which they are.
        hint: what to do about it if there are too few.

    Raises:
        BatchError: a microbatch that states cannot compute.
        CacheFull: too few rows are free.
    """
    now, n_taken = list(rows), 0
    all_members, plans = [], []
    for micro in micros:
        members = members_of(micro)
        users, taken = Counter(now), set(pool[:n_taken])
        sources = [now[seqs[0]] for seqs in members]
        moves = [  # to a row that nothing refers to yet
            row not in taken or users[row] > len(seqs)
            for row, seqs in zip(sources, members, strict=True)
        ]
        free = [row for row in pool if row not in users]
        if sum(moves) > len(free):
            raise CacheFull(sum(moves), len(free), hint)
        rest = iter(free)
        targets = [next(rest) if m else row for m, row in zip(moves, sources, strict=True)]
        for seqs, target in zip(members, targets, strict=True):
            for seq in seqs:
                now[seq] = target
        n_taken = max(n_taken, *(pool.index(target) + 1 for target in targets))
        all_members.append(members)
        plans.append(StatePlan(np.array(sources, np.int32), np.array(targets, np.int64)))
    return RowPlans(all_members, plans, list(pool[:n_taken]))


class Piece(NamedTuple):
    """Tokens that sequences have absorbed, and the row where that left their state."""

    members: tuple[int, ...]
    row: int
    tokens: Int32Array | None
    positions: Int32Array


class StatePlacement:
    """The rows of one batch, taken and neither committed nor released.

    Args:
        micros: the batch.
        rows: which rows it reads and writes.
        keep: called with what was absorbed, in order, when it is committed.
        forget: called when it is released.
    """

    def __init__(
        self,
        micros: Sequence[MicroBatch],
        rows: RowPlans,
        keep: Callable[[Sequence[Piece]], None],
        forget: Callable[[], None],
    ) -> None:
        self._micros = tuple(micros)
        self._rows = rows
        self._keep = keep
        self._forget = forget

    def plan(self, i: int) -> StatePlan:
        """What microbatch i reads and writes."""
        return self._rows.plans[i]

    def commit(self) -> None:
        """Give the sequences their new states."""
        self._keep(self._pieces())

    def release(self) -> None:
        """Put everything back as it was before."""
        self._forget()

    def _pieces(self) -> list[Piece]:
        pieces = []
        for micro, members, plan in zip(
            self._micros, self._rows.members, self._rows.plans, strict=True
        ):
            n = micro.n_tokens // len(members)
            for i, seqs in enumerate(members):
                part = slice(i * n, (i + 1) * n)
                tokens = None if micro.tokens is None else micro.tokens[part]
                row = int(plan.targets[i])
                pieces.append(Piece(seqs, row, tokens, micro.positions[part]))
        return pieces
