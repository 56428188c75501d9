"""A sequence's text as the cache holds it, and the edits of it that move positions.

Tokens are counted from the start of the text and turned into positions here; the cells are changed
by llama.cpp's verbs. Whatever could make the second of two verbs fail is tried before the first,
so that an edit is done as a whole or not at all (invariant 5).

Where positions have been divided, tokens share them, and positions no longer tell their order. It
is remembered in ``grouped``, for the tokens before position ``grouped_end``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from kvcellar._cellsets import cell_count
from kvcellar.cache.attention import AttentionCache
from kvcellar.errors import CacheFull, NotSupported, OptionError, ShiftUnsupported
from kvcellar.runtime.options import check_range
from kvcellar.runtime.shifting import ContextShift
from kvcellar.types import MAX_POSITION, Int32Array, Int64Array

Gap: TypeAlias = Literal["close", "keep"]
"""What becomes of the positions behind removed tokens: they move up, or stay where they are."""


class HeldText:
    """What a cache holds of one sequence, as a text."""

    def __init__(self, cache: AttentionCache, seq_id: int) -> None:
        self.cache = cache
        self.seq_id = seq_id
        self.grouped: tuple[int, ...] = ()
        self.grouped_end = 0

    def __len__(self) -> int:
        return self.cache.table.seq_count(self.seq_id)

    @property
    def cells(self) -> Int64Array:
        """The cells in the order of their positions."""
        return self.cache.table.cells_of(self.seq_id)

    @property
    def positions(self) -> Int32Array:
        """Where the tokens stand, ascending."""
        at: Int32Array = self.cache.table.positions[self.cells]
        return at

    @property
    def tokens(self) -> list[int]:
        """The token ids in the order of the text."""
        held = [int(token) for token in self.cache.table.tokens_of(self.seq_id)]
        n = len(self.grouped)
        # Someone may have edited the cells below us; then they are right, and not what we know.
        is_known = n > 0 and sorted(held[:n]) == sorted(self.grouped)
        return [*self.grouped, *held[n:]] if is_known else held

    @property
    def end(self) -> int:
        """The position of the next token."""
        return self.cache.seq_pos_max(self.seq_id) + 1

    def share_with(self, other: HeldText) -> None:
        """Let another one, which is empty, hold the same cells."""
        self.cache.seq_cp(self.seq_id, other.seq_id, -1, -1)
        other.grouped, other.grouped_end = self.grouped, self.grouped_end

    def drop_tail(self, n_tokens: int) -> tuple[int, list[int]]:
        """Drop the last tokens; returns where the first of them stood.

        Tokens that share a position go together; those of them that were to stay are returned, to
        be computed again.
        """
        tokens, at = self.tokens, self.positions
        n_left = len(at) - n_tokens
        first = int(at[n_left])
        n_before = int(np.searchsorted(at, first))
        self.cache.seq_rm(self.seq_id, first, -1)
        self.grouped = self.grouped[:n_before]
        self.grouped_end = min(self.grouped_end, first)
        return first, tokens[n_before:n_left]

    def remove(self, start: int, stop: int, gap: Gap) -> None:
        """Remove tokens ``[start, stop)``, at least one.

        Raises:
            OptionError: the range would part tokens that share a position.
            ShiftUnsupported, CacheFull, NotSupported: what follows cannot be moved.
        """
        cells, at = self.cells, self.positions
        for cut in (start, stop):
            if 0 < cut < len(at) and at[cut] == at[cut - 1]:
                raise OptionError(
                    f"tokens {cut - 1} and {cut} share position {at[cut]}: remove both or neither"
                )
        closes = gap == "close" and stop < len(at)
        p0, p1 = int(at[start]), int(at[stop]) if stop < len(at) else self.end
        if closes:
            self._require_moving(cells[stop:], cells[start:stop])
        if not self.cache.seq_rm(self.seq_id, p0, p1):
            raise NotSupported("this cache cannot remove tokens from the middle of a sequence")
        if closes:
            self.cache.seq_add(self.seq_id, p1, -1, p0 - p1)
            self.grouped_end = max(min(self.grouped_end, p0), self.grouped_end - (p1 - p0))
        self.grouped = self.grouped[:start] + self.grouped[stop:]

    def shift_span(self, shift: ContextShift) -> tuple[int, int]:
        """Which tokens a context shift discards."""
        return shift.span(self.positions, self.cache.spec.size)

    def span_to_discard(
        self, n_tokens: int, n_max: int, shift: ContextShift
    ) -> tuple[int, int] | None:
        """What to discard for ``n_tokens`` more to fit, at positions below n_max; None: they fit.

        One shift may not be enough.

        Raises:
            CacheFull: it would free no cell.
        """
        free = self.cache.table.n_free()
        if n_tokens == 0 or len(self) < 2:
            return None
        if n_tokens <= free and self.end + n_tokens <= n_max:
            return None
        start, stop = self.shift_span(shift)
        cells = self.cells
        if n_tokens > free and self._n_freed(cells[start:stop]) <= self._n_copies(cells[stop:]):
            hint = "a context shift would free none: other sequences or a transaction keep them"
            raise CacheFull(n_tokens, free, hint)
        return start, stop

    def self_extend(self, group: int, width: int) -> None:
        """Divide the positions of every whole window behind what is grouped.

        Raises:
            OptionError: group or width does not fit.
            ShiftUnsupported, CacheFull, NotSupported: positions cannot be moved.
        """
        check_range("group", group, 1, MAX_POSITION)
        if check_range("width", width, 1, MAX_POSITION) % group:
            raise OptionError(f"width={width}: must be a multiple of group={group}")
        n_windows = max(0, (self.end - self.grouped_end) // width)
        if group == 1 or n_windows == 0:
            return
        highest = self.end + (group - 1) * (self.grouped_end + n_windows * width // group)
        if highest >= MAX_POSITION:
            raise OptionError(f"group={group}: positions would pass the largest one on the way")
        self._require_moving(self.cells[self.positions >= max(self.grouped_end, 1)])
        order = self.tokens
        for _ in range(n_windows):
            self._divide_window(group, width)
        self.grouped = tuple(order[: int(np.searchsorted(self.positions, self.grouped_end))])

    def _divide_window(self, group: int, width: int) -> None:
        start, cache, seq_id = self.grouped_end, self.cache, self.seq_id
        # Lifted so that the window starts at group times its place: division maps it there.
        lift = (group - 1) * start
        behind = start + lift + width
        cache.seq_add(seq_id, start, -1, lift)
        cache.seq_div(seq_id, start + lift, behind, group)
        self.grouped_end += width // group
        cache.seq_add(seq_id, behind, -1, self.grouped_end - behind)

    def _n_freed(self, cells: Int64Array) -> int:
        """How many cells dropping these would make free to be filled."""
        table = self.cache.table
        if table.reserved is not None:
            cells = cells[~table.reserved[cells]]
        return len(cells) - cell_count(table.shared(cells))

    def _n_copies(self, cells: Int64Array) -> int:
        """How many cells moving these would take: shared ones are copied."""
        if self.cache.on_shared == "move":
            return 0
        return cell_count(self.cache.table.shared(cells))

    def _require_moving(self, cells: Int64Array, doomed: Int64Array | None = None) -> None:
        """Raise unless these cells can be moved once the doomed ones have been given up."""
        if not self.cache.can_shift:
            raise ShiftUnsupported(
                "positions would have to move, but the K rows of this cache cannot be rotated: "
                'remove(…, gap="keep") leaves them, or decode the tokens again'
            )
        n_copies = self._n_copies(cells)
        if n_copies and not self.cache.store.can_copy:
            raise NotSupported("moving shared cells needs a store that can copy cells")
        free = self.cache.table.n_free() + (0 if doomed is None else self._n_freed(doomed))
        if n_copies > free:
            raise CacheFull(n_copies, free, "cells shared with others have to be copied to move")
