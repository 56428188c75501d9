"""The attention cache as plainly as it can be written: a list of cells, loops, no derived value.

It is the oracle of the clever one, so it shares no code with it beyond the errors. ``content``
stands for the K and V bytes of a cell, ``rotation`` for the position its K row is rotated to.
A transaction is a copy of everything. :func:`naive_moves` compacts, a hole and a cell at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvcellar.errors import CacheFull
from kvcellar.types import Float16Array


@dataclass
class NaiveCell:
    """One cell; ``k_rows`` and ``v_rows`` are its bytes once a test has noted them.

    They have to stay the same from then on, those of K until a rotation.
    """

    pos: int = -1
    pending: int = 0
    token: int = -1
    owners: set[int] = field(default_factory=set)
    content: int = -1
    turns: int = 0  # how often the K row has been rotated
    k_rows: tuple[bytes, ...] | None = None  # a layer each
    v_rows: tuple[bytes, ...] | None = None

    @property
    def rotation(self) -> int:
        """The position that the K row is rotated to."""
        return self.pos - self.pending


@dataclass(frozen=True)
class NaiveToken:
    """A token of a batch."""

    token: int
    pos: int
    owners: frozenset[int]
    content: int = -1


class NaiveCache:
    """An attention cache of ``size`` cells."""

    def __init__(self, size: int, on_shared: str = "copy") -> None:
        self.cells = [NaiveCell() for _ in range(size)]
        self.on_shared = on_shared
        self.head = 0
        self.reserved: frozenset[int] = frozenset()

    # -- questions

    @property
    def used(self) -> int:
        """How many cells have an owner."""
        return sum(bool(cell.owners) for cell in self.cells)

    @property
    def token_count(self) -> int:
        """The sum of owners over cells."""
        return sum(len(cell.owners) for cell in self.cells)

    @property
    def n_free(self) -> int:
        """How many cells may be filled."""
        return len(self._free_cells())

    @property
    def cell_max(self) -> int:
        """The index behind the last used cell."""
        return max((i + 1 for i, cell in enumerate(self.cells) if cell.owners), default=0)

    def positions(self, seq: int) -> list[int]:
        """The positions of a sequence, ascending."""
        return sorted(cell.pos for cell in self.cells if seq in cell.owners)

    def pos_max(self, seq: int) -> int:
        """The largest position of a sequence, -1 when it is empty."""
        return max(self.positions(seq), default=-1)

    def pos_min(self, seq: int) -> int:
        """The smallest position of a sequence, -1 when it is empty."""
        return min(self.positions(seq), default=-1)

    def contents(self, seq: int) -> list[tuple[int, int]]:
        """The map of invariant 7 for a sequence: (position, content), ascending."""
        return sorted((cell.pos, cell.content) for cell in self.cells if seq in cell.owners)

    # -- verbs; ranges have been closed: 0 <= p0, and p1 is a number

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        """Drop a sequence, or every one (-1), from the range."""
        freed = []
        for i in self._in_range(p0, p1):
            cell = self.cells[i]
            if seq == -1 or seq in cell.owners:
                cell.owners -= cell.owners if seq == -1 else {seq}
                freed += self._free_if_ownerless(i)
        self.head = min([self.head, *freed])

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Share src's cells in the range with dst, in place of dst's own."""
        if src != dst:
            self.seq_rm(dst, p0, p1)
            for i in self._in_range(p0, p1):
                if src in self.cells[i].owners:
                    self.cells[i].owners.add(dst)
        self.head = 0

    def seq_keep(self, seq: int) -> None:
        """Drop every other sequence."""
        foreign = [i for i, cell in enumerate(self.cells) if seq not in cell.owners]
        for i, cell in enumerate(self.cells):
            cell.owners &= {seq}
            self._free_if_ownerless(i)
        self.head = min([self.head, *foreign])

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move positions in the range; cells driven below 0 are freed."""
        if p1 <= p0:
            return
        moving = self._moving(seq, p0, p1, {p: p + delta for p in self.positions(seq)})
        freed = []
        for i in moving:
            cell = self.cells[i]
            cell.pos, cell.pending = cell.pos + delta, cell.pending + delta
            if cell.pos < 0:
                cell.owners.clear()
                freed += self._free_if_ownerless(i)
        self.head = min(freed, default=0)

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Divide positions in the range, truncating."""
        for i in self._moving(seq, p0, p1, {p: p // d for p in self.positions(seq)}):
            cell = self.cells[i]
            new = cell.pos // d
            cell.pos, cell.pending = new, cell.pending + new - cell.pos

    def clear(self) -> None:
        """Empty the cache."""
        self.cells = [NaiveCell() for _ in self.cells]
        self.head = 0

    def update(self) -> None:
        """Rotate what is pending."""
        for cell in self.cells:
            if cell.pending:
                cell.pending, cell.turns, cell.k_rows = 0, cell.turns + 1, None

    def defrag(self, max_moves: int) -> None:
        """Compact, moving at most ``max_moves`` runs."""
        top = self.cell_max
        fixed = {i for i in self.reserved if i < top}
        held = {i for i in range(top) if self.cells[i].owners} | fixed
        moves = naive_moves([bool(cell.owners) for cell in self.cells], max_moves, fixed)
        for src, dst in moves:
            self.cells[dst], self.cells[src] = self.cells[src], NaiveCell()
        if moves:
            self.head = len(held)

    def resize(self, size: int) -> None:
        """Grow or shrink, compacted if the cells would not fit."""
        if self.used > size:
            raise CacheFull(self.used, size)
        if self.cell_max > size:
            self.defrag(len(self.cells))
        missing = size - len(self.cells)
        self.cells = [*self.cells[:size], *(NaiveCell() for _ in range(missing))]
        self.head = self.head if self.head < size else 0

    def reserve(self) -> None:
        """Fill no cell that is used now, as within a transaction."""
        self.reserved |= {i for i, cell in enumerate(self.cells) if cell.owners}

    # -- decoding

    def find(self, n: int) -> list[int]:
        """The cells that n tokens would take."""
        size = len(self.cells)
        free = self._free_cells()
        if len(free) < n:
            raise CacheFull(n, len(free))
        head = 0 if self.head > self.used + 2 * n else self.head
        starts = [i for i in (*range(head, size), *range(head)) if i + n <= size]
        for start in starts:
            if all(i in free for i in range(start, start + n)):
                return list(range(start, start + n))
        return [*(i for i in free if i >= head), *(i for i in free if i < head)][:n]

    def place(self, tokens: Sequence[NaiveToken], n_ubatch: int) -> list[int]:
        """Place a batch, microbatch after microbatch; returns the cells taken."""
        if self.n_free < len(tokens):
            raise CacheFull(len(tokens), self.n_free)
        self.update()
        taken: list[int] = []
        for start in range(0, len(tokens), n_ubatch):
            part = tokens[start : start + n_ubatch]
            cells = self.find(len(part))
            for i, token in zip(cells, part, strict=True):
                owners = set(token.owners)
                self.cells[i] = NaiveCell(token.pos, 0, token.token, owners, token.content)
            self.head = (cells[-1] + 1) % len(self.cells)
            taken += cells
        return taken

    def is_coupled(self, owners: Iterable[int]) -> bool:
        """Whether these sequences hold the same cells."""
        group = set(owners)
        return all(group <= cell.owners or not group & cell.owners for cell in self.cells)

    def copy(self) -> NaiveCache:
        """An independent copy."""
        other = NaiveCache(0, self.on_shared)
        other.cells = [replace(cell, owners={*cell.owners}) for cell in self.cells]
        other.head, other.reserved = self.head, self.reserved
        return other

    # -- steps

    def _free_cells(self) -> list[int]:
        cells = enumerate(self.cells)
        return [i for i, cell in cells if not cell.owners and i not in self.reserved]

    def _in_range(self, p0: int, p1: int) -> list[int]:
        return [i for i, cell in enumerate(self.cells) if cell.owners and p0 <= cell.pos < p1]

    def _free_if_ownerless(self, i: int) -> list[int]:
        if self.cells[i].owners:
            return []
        self.cells[i] = NaiveCell()
        return [i]

    def _moving(self, seq: int, p0: int, p1: int, goal: dict[int, int]) -> list[int]:
        """The cells to change in place, after the sequence got copies of those it shares."""
        mine = [i for i in self._in_range(p0, p1) if seq in self.cells[i].owners]
        mine = [i for i in mine if goal[self.cells[i].pos] != self.cells[i].pos]
        if self.on_shared == "move":
            return mine
        shared = [i for i in mine if len(self.cells[i].owners) > 1]
        staying = [i for i in shared if goal[self.cells[i].pos] >= 0]
        copies = self.find(len(staying)) if staying else []
        for i in shared:
            self.cells[i].owners.remove(seq)
        for i, j in zip(staying, copies, strict=True):
            old = self.cells[i]
            self.cells[j] = replace(old, owners={seq})
        return sorted({*mine, *copies} - {*shared})


def naive_mask(tokens: Sequence[NaiveToken], cells: Sequence[NaiveCell], n_kv: int) -> Float16Array:
    """The mask of tokens over the first n_kv cells, one pair at a time."""
    mask = np.full((len(tokens), n_kv), -np.inf, np.float16)
    for i, token in enumerate(tokens):
        for c, cell in enumerate(cells[:n_kv]):
            if token.owners & cell.owners and cell.pos <= token.pos:
                mask[i, c] = 0
    return mask


def naive_moves(
    occupied: Sequence[bool], max_moves: int, fixed: Iterable[int] = ()
) -> list[tuple[int, int]]:
    """The moves that compact these cells, one hole and one cell at a time, by source.

    Fixed cells, used or not, are neither holes nor moved.
    """
    stuck = set(fixed)
    movable = {i for i, used in enumerate(occupied) if used and i not in stuck}
    held = movable | stuck
    n_held = len(held)
    moves: list[tuple[int, int]] = []
    n_runs, i = 0, 0
    while i < n_held:
        if i in held:
            i += 1
            continue
        hole = 1
        while i + hole < n_held and i + hole not in held:
            hole += 1
        sources = sorted(j for j in movable if j >= n_held)[-hole:]
        for k, src in enumerate(sources):
            if k == 0 or src != sources[k - 1] + 1:
                if n_runs == max_moves:
                    return sorted(moves)
                n_runs += 1
            moves.append((src, i + k))
        movable -= set(sources)
        i += hole
    return sorted(moves)
