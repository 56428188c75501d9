"""What a cache looks like at one moment, as a value that later changes do not reach.

Printing a view shows a glyph a cell: the owner, ``+`` for several, a dot for a free cell. Large
caches are shown in buckets of neighbouring cells, each by what most of them hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvcellar.errors import OptionError
from kvcellar.types import Int32Array, OwnerBits, unpack_owners

if TYPE_CHECKING:
    from rich.text import Text

    from kvcellar.cells import CellTable

FREE, SHARED = -1, -2
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WIDTH = 64
_MAX_GLYPHS = 1024
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")


@dataclass(frozen=True)
class CacheView:
    """The cells of a cache, and how full and how fragmented it is.

    ``token_count`` counts a shared cell once for each owner, ``used_cells`` once.
    """

    n_cells: int
    n_seq_max: int  # owners shown a cell, the smallest first
    token_count: int
    used_cells: int
    positions: Int32Array  # [n_cells], -1 in a free cell
    tokens: Int32Array  # [n_cells], -1 where not known
    owners: OwnerBits  # [n_words, n_cells]

    @classmethod
    def of(cls, table: CellTable, n_seq_max: int | None = None) -> CacheView:
        """The state of a table, with at most n_seq_max owners (None: all) shown a cell."""
        shown = table.n_seq_max if n_seq_max is None else n_seq_max
        if shown < 1:
            raise OptionError(f"n_seq_max is {shown}: it must be at least 1")
        arrays = (table.positions.copy(), table.tokens.copy(), table.owners.copy())
        for array in arrays:
            array.flags.writeable = False
        return cls(table.size, shown, table.token_count, table.used, *arrays)

    @cached_property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """The owners of each cell, ascending, at most ``n_seq_max`` of them."""
        rows, seq_ids = unpack_owners(self.owners)
        ends = np.searchsorted(rows, np.arange(self.n_cells + 1))
        bounds = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ids = seq_ids.tolist()
        return tuple(tuple(ids[a : min(b, a + self.n_seq_max)]) for a, b in bounds)

    @cached_property
    def _longest_free(self) -> tuple[int, int]:
        free = np.concatenate(([False], self.positions < 0, [False]))
        edges = np.flatnonzero(free[1:] != free[:-1])
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        if not len(starts):
            return 0, -1
        best = int(lengths.argmax())
        return int(lengths[best]), int(starts[best])

    @property
    def max_contiguous(self) -> int:
        """How long the longest run of free cells is."""
        return self._longest_free[0]

    @property
    def max_contiguous_idx(self) -> int:
        """Where the longest run of free cells starts, -1 if no cell is free."""
        return self._longest_free[1]

    @cached_property
    def _holders(self) -> Int32Array:
        """For each cell its owner, ``SHARED`` or ``FREE``."""
        rows, seq_ids = unpack_owners(self.owners)
        holders = np.full(self.n_cells, FREE, np.int32)
        holders[rows] = seq_ids
        holders[rows[1:][rows[1:] == rows[:-1]]] = SHARED
        return holders

    def _glyphs(self) -> Iterator[int]:
        """What each glyph stands for: a sequence, ``SHARED`` or ``FREE``."""
        step = -(-self.n_cells // _MAX_GLYPHS)
        if step == 1:
            yield from self._holders.tolist()
            return
        for start in range(0, self.n_cells, step):
            kinds, counts = np.unique(self._holders[start : start + step], return_counts=True)
            yield int(kinds[counts.argmax()])

    def _summary(self) -> str:
        step = -(-self.n_cells // _MAX_GLYPHS)
        scale = "" if step == 1 else f", {step} cells a glyph"
        return (
            f"{self.used_cells} of {self.n_cells} cells used, {self.token_count} tokens, "
            f"longest free run {self.max_contiguous}{scale}"
        )

    def __str__(self) -> str:
        text = "".join(_glyph(kind) for kind in self._glyphs())
        lines = (text[i : i + _WIDTH] for i in range(0, len(text), _WIDTH))
        return "\n".join((self._summary(), *lines))

    def __rich__(self) -> Text:
        """The view in colours: a colour an owner, dim dots for free cells."""
        from rich.text import Text

        text = Text(self._summary())
        for i, kind in enumerate(self._glyphs()):
            text.append("\n" if i % _WIDTH == 0 else "")
            text.append(_glyph(kind), _style(kind))
        return text


def _glyph(kind: int) -> str:
    if kind == FREE:
        return "."
    return "+" if kind == SHARED else _DIGITS[kind % len(_DIGITS)]


def _style(kind: int) -> str:
    if kind == FREE:
        return "dim"
    return "bold white" if kind == SHARED else _COLOURS[kind % len(_COLOURS)]
