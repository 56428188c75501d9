"""A sequence's text as the cache holds it, and the edits of it that move positions.

Tokens are counted from the start of the text and turned into positions here; the cells are changed
by llama.cpp's verbs. An edit is done as a whole or not at all (invariant 5): several verbs happen
within a transaction.

Not every cache can forget any token: a state is only exchanged for an older one, what has left a
window is gone, and some K rows cannot be rotated. Then the text goes back to where the cache can,
and the tokens that went too much are returned, to be computed again.

Where positions have been divided, tokens share them, and positions no longer tell their order. It
is remembered in ``self_extended``, for the tokens before position ``self_extended_end``.

Tokens of a sequence that wait to be computed, and where they will stand.

Those that were computed before, until an edit took their cells or their state back, know their
positions. They come first; what follows, sampled or typed, follows on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import numpy as np

from kvcellar.cache.base import Cache
from kvcellar.errors import CacheFull, NotSupported, OptionError, check_range
from kvcellar.runtime.options import ContextShift
from kvcellar.types import MAX_POSITION, Int32Array


class PendingTokens:
    """Tokens to compute, in order; the first ``len(places)`` of them stood somewhere before."""

    def __init__(self, tokens: Iterable[int] = (), places: Iterable[int] = ()) -> None:
        self.tokens = list(tokens)
        self.places = list(places)

    def __len__(self) -> int:
        return len(self.tokens)

    def positions(self, end: int) -> list[int]:
        """Where each will stand, behind a text that ends before ``end``.

        They rise: of tokens that shared a position, each gets its own.
        """
        result: list[int] = []
        for i in range(len(self.tokens)):
            end = max(end, self.places[i]) if i < len(self.places) else end
            result.append(end)
            end += 1
        return result

    def end(self, start: int) -> int:
        """The position behind the last one, if the text before them ends before ``start``."""
        return (self.positions(start) or [start - 1])[-1] + 1

    def appended(self, tokens: Iterable[int]) -> PendingTokens:
        """These, followed by new ones."""
        return PendingTokens([*self.tokens, *tokens], self.places)

    def prepended(self, again: PendingTokens) -> PendingTokens:
        """These, behind others that were all computed before."""
        return PendingTokens([*again.tokens, *self.tokens], [*again.places, *self.places])

    def removed(self, start: int, stop: int, gap: int = 0) -> PendingTokens:
        """These without ``[start, stop)``; what stood behind moves up by ``gap`` positions."""
        places = [*self.places[:start], *(place - gap for place in self.places[stop:])]
        return PendingTokens([*self.tokens[:start], *self.tokens[stop:]], places)


Gap: TypeAlias = Literal["close", "keep"]
"""What becomes of the positions behind removed tokens: they move up, or stay where they are."""


class CachedText:
    """What a cache holds of one sequence, as a text."""

    def __init__(self, cache: Cache, seq_id: int) -> None:
        self.cache = cache
        self.seq_id = seq_id
        self.self_extended: tuple[int, ...] = ()
        self.self_extended_end = 0

    def __len__(self) -> int:
        return self.cache.seq_count(self.seq_id)

    @property
    def positions(self) -> Int32Array:
        """Where the tokens stand, ascending."""
        return self.cache.seq_positions(self.seq_id)

    @property
    def tokens(self) -> list[int]:
        """The token ids in the order of the text."""
        held: list[int] = self.cache.seq_tokens(self.seq_id).tolist()
        n = len(self.self_extended)
        # Someone may have edited the cells below us; then they are right, and not what we know.
        is_known = n > 0 and sorted(held[:n]) == sorted(self.self_extended)
        return [*self.self_extended, *held[n:]] if is_known else held

    @property
    def end(self) -> int:
        """The position of the next token."""
        return self.cache.seq_pos_max(self.seq_id) + 1

    def share_with(self, other: CachedText) -> None:
        """Let another one, which is empty, hold the same cells."""
        self.cache.seq_cp(self.seq_id, other.seq_id, -1, -1)
        other.self_extended, other.self_extended_end = self.self_extended, self.self_extended_end

    def go_back(self, n_left: int) -> PendingTokens:
        """Drop all tokens but the first ``n_left``; returns those of them that had to go too.

        Tokens that share a position go together; and a cache may only be able to go further back.

        Raises:
            NotSupported: one of these was decoded from an embedding, which nobody keeps.
        """
        if -1 not in self.tokens:
            return self._go_back(n_left)
        with self.cache.transaction():
            return self._go_back(n_left)

    def _go_back(self, n_left: int) -> PendingTokens:
        tokens, at = self.tokens, self.positions
        self.cache.rewind(self.seq_id, int(at[n_left]))
        n_kept = len(self)
        again = tokens[n_kept:n_left]
        if -1 in again:
            raise NotSupported(
                f"token {n_kept + again.index(-1)} would have to be computed again, but it was "
                "decoded from an embedding: decode the sequence anew"
            )
        self.self_extended = self.self_extended[:n_kept]
        self.self_extended_end = min(self.self_extended_end, int(at[n_kept]))
        return PendingTokens(again, at[n_kept:n_left].tolist())

    def remove(self, start: int, stop: int, gap: Gap) -> PendingTokens:
        """Remove tokens ``[start, stop)``, at least one; returns what has to be computed again.

        Raises:
            OptionError: the range would part tokens that share a position.
            CacheFull, NotSupported: what follows can neither be moved nor computed again.
        """
        tokens, at = self.tokens, self.positions
        for cut in (start, stop):
            if 0 < cut < len(at) and at[cut] == at[cut - 1]:
                raise OptionError(
                    f"tokens {cut - 1} and {cut} share position {at[cut]}: remove both or neither"
                )
        p0, p1 = int(at[start]), int(at[stop]) if stop < len(at) else self.end
        closed = p1 - p0 if gap == "close" and stop < len(at) else 0
        if self._remove_in_place(p0, p1, closed):
            if closed:
                self.self_extended_end = max(
                    min(self.self_extended_end, p0), self.self_extended_end - closed
                )
            self.self_extended = self.self_extended[:start] + self.self_extended[stop:]
            return PendingTokens()
        if -1 in tokens[stop:]:
            raise NotSupported("what follows was decoded from embeddings: decode it anew")
        again = self.go_back(start)
        return PendingTokens(tokens[stop:], (at[stop:] - closed).tolist()).prepended(again)

    def _remove_in_place(self, p0: int, p1: int, closed: int) -> bool:
        """Remove positions and close the gap; False if the cache cannot."""
        if closed:
            return self.cache.seq_cut(self.seq_id, p0, p1)
        return self.cache.seq_rm(self.seq_id, p0, p1)

    def shift_span(self, shift: ContextShift, pending: PendingTokens) -> tuple[int, int]:
        """Which tokens a context shift discards; those computed before count as computed."""
        again = pending.positions(self.end)[: len(pending.places)]
        at = np.concatenate((self.positions, again)).astype(np.int32)
        return shift.span(at, self.cache.spec.size)

    def span_to_discard(
        self, pending: PendingTokens, n_max: int, shift: ContextShift
    ) -> tuple[int, int] | None:
        """What to discard for what waits to fit, at positions below n_max; None: it fits.

        One shift may not be enough.

        Raises:
            CacheFull: it would free no cell.
        """
        n_pending, free = len(pending), self.cache.n_free()
        if n_pending == 0 or len(self) + len(pending.places) < 2:
            return None
        if n_pending <= free and pending.end(self.end) <= n_max:
            return None
        start, stop = self.shift_span(shift, pending)
        if n_pending > free and not self.cache.makes_room(self.seq_id, start, stop):
            hint = "a context shift would free none: other sequences or a transaction keep them"
            raise CacheFull(n_pending, free, hint)
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
        if not self.cache.keeps_every_token:
            raise NotSupported(
                "self_extend: states and windows that slid have no positions to divide; it needs "
                "a model that attends in every layer, with swa_full=True if some have windows"
            )
        n_windows = max(0, (self.end - self.self_extended_end) // width)
        if group == 1 or n_windows == 0:
            return
        highest = self.end + (group - 1) * (self.self_extended_end + n_windows * width // group)
        if highest >= MAX_POSITION:
            raise OptionError(f"group={group}: positions would pass the largest one on the way")
        order = self.tokens
        with self.cache.transaction():
            end = self._divide(group, width, n_windows)
        self.self_extended_end = end
        self.self_extended = tuple(order[: int(np.searchsorted(self.positions, end))])

    def _divide(self, group: int, width: int, n_windows: int) -> int:
        """Divide so many windows; returns where the last of them ends afterwards."""
        start, cache, seq_id = self.self_extended_end, self.cache, self.seq_id
        for _ in range(n_windows):
            # Lifted so that the window starts at group times its place: division maps it there.
            lift = (group - 1) * start
            behind = start + lift + width
            cache.seq_add(seq_id, start, -1, lift)
            cache.seq_div(seq_id, start + lift, behind, group)
            start += width // group
            cache.seq_add(seq_id, behind, -1, start - behind)
        return start
