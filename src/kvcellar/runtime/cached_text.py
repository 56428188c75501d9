"""A sequence's text: the tokens that its cache has, pending ones behind them, and edits of both.

Tokens are counted from the start of the text and turned into positions here; cells are changed by
llama.cpp's verbs. An edit fetches tokens and positions once, and is done as a whole or not at all
(invariant 5).

Not every cache can drop any token: a state can only be exchanged for an older one, what has left a
window is gone, and some K rows cannot be rotated. Then the text goes back to where the cache can,
and the tokens behind that become pending: the text is the same, and only costs more.

Where positions have been divided, tokens share them, and positions no longer tell their order. It
is kept in ``self_extended``, for the tokens before position ``self_extended_end``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from kvcellar.cache.base import Cache
from kvcellar.errors import CacheFull, NotSupported, OptionError, check_range
from kvcellar.runtime.options import ContextShift
from kvcellar.types import MAX_POSITION, Float32Array, Int32Array

Gap: TypeAlias = Literal["close", "keep"]
"""What becomes of the positions behind removed tokens: they move up, or stay where they are."""


class PendingTokens:
    """Tokens to compute, in order, as a value.

    The first ``len(places)`` were computed before, until an edit took their cells or their state
    back, and stood there; what follows, sampled or typed, follows on.
    """

    def __init__(self, tokens: Iterable[int] = (), places: Iterable[int] = ()) -> None:
        self.tokens = list(tokens)
        self.places = list(places)

    def __len__(self) -> int:
        return len(self.tokens)

    def positions(self, end: int) -> list[int]:
        """Return where each will stand, behind a text that ends before ``end``.

        Positions rise: tokens that shared one get one each.
        """
        result: list[int] = []
        for i in range(len(self.tokens)):
            end = max(end, self.places[i]) if i < len(self.places) else end
            result.append(end)
            end += 1
        return result

    def end(self, start: int) -> int:
        """Return the position behind the last one, if the text before ends before ``start``."""
        return (self.positions(start) or [start - 1])[-1] + 1

    def appended(self, tokens: Iterable[int]) -> PendingTokens:
        """Append new tokens."""
        return PendingTokens([*self.tokens, *tokens], self.places)

    def prepended(self, again: PendingTokens) -> PendingTokens:
        """Prepend tokens that were computed before and must be recomputed."""
        return PendingTokens([*again.tokens, *self.tokens], [*again.places, *self.places])

    def removed(self, start: int, stop: int, gap: int = 0) -> PendingTokens:
        """Drop ``[start, stop)``; what stood behind moves up by ``gap`` positions."""
        places = [*self.places[:start], *(place - gap for place in self.places[stop:])]
        return PendingTokens([*self.tokens[:start], *self.tokens[stop:]], places)


class TextState(NamedTuple):
    """The state of a sequence's text beside its cells.

    Attributes:
        pending: the tokens that are not computed yet.
        logits: those of the next token behind the cached ones; None: not known.
        logits_end: where the cached text ended that they follow.
        inexact_from: the first token whose K and V are not what a fresh decode would give.
        stored_as: the digest of a fingerprint in whose types K and V were stored, if those are
            others than the cache's; else "".
        self_extended: the first tokens in the order of the text, where positions were divided.
        self_extended_end: the position that they end before.
        open_token: a token whose text the next one may begin with, in its place, and the position
            where it stands; counts while it alone is pending there.
    """

    pending: PendingTokens = PendingTokens()
    logits: Float32Array | None = None
    logits_end: int = 0
    inexact_from: int | None = None
    stored_as: str = ""
    self_extended: tuple[int, ...] = ()
    self_extended_end: int = 0
    open_token: tuple[int, int] | None = None

    def in_order(self, cached: list[int]) -> list[int]:
        """Put cached tokens, in the order of their positions, into that of the text."""
        n = len(self.self_extended)
        # Someone may have edited the cells below us; then they are right, and not what we know.
        is_known = n > 0 and sorted(cached[:n]) == sorted(self.self_extended)
        return [*self.self_extended, *cached[n:]] if is_known else cached

    def inexact(self, token: int) -> TextState:
        """Mark K and V as inexact from a token on."""
        first = token if self.inexact_from is None else min(self.inexact_from, token)
        return self._replace(inexact_from=first)

    def settled(self, cached: Int32Array) -> TextState:
        """Forget what held for tokens that are no longer cached.

        Pending ones will be exact where they stand as in a text of their own.

        Args:
            cached: the positions of those that are.
        """
        state = self if len(cached) else self._replace(stored_as="")
        if self.inexact_from is None or len(cached) > self.inexact_from:
            return state
        at = followed(cached, self.pending)
        moved = np.flatnonzero(at != np.arange(len(at)))
        return state._replace(inexact_from=int(moved[0]) if moved.size else None)


def followed(cached: Int32Array, pending: PendingTokens) -> Int32Array:
    """Return the positions of cached tokens and those that pending ones will have."""
    if not pending:
        return cached
    rest = pending.positions(int(cached[-1]) + 1 if len(cached) else 0)
    return np.concatenate((cached, np.array(rest, np.int32)))


class CachedText:
    """The cached part of a sequence, fetched once; an edit returns the text's new state.

    After an edit it is out of date.

    Attributes:
        cache: where the cells are.
        seq_id: whose they are.
        state: what else is known of the text.
        tokens: the cached token ids in the order of the text.
        positions: where they stand, ascending.
    """

    def __init__(self, cache: Cache, seq_id: int, state: TextState) -> None:
        self.cache = cache
        self.seq_id = seq_id
        self.state = state
        self.positions = cache.seq_positions(seq_id)
        self.tokens = state.in_order(cache.seq_tokens(seq_id).tolist())

    def __len__(self) -> int:
        return len(self.tokens) + len(self.state.pending)

    @property
    def end(self) -> int:
        """The position behind the last cached token."""
        return int(self.positions[-1]) + 1 if self.tokens else 0

    def keep(self, n_left: int) -> TextState:
        """Drop all tokens but the first ``n_left``.

        Raises:
            NotSupported: as :meth:`go_back` does.
        """
        n_cached, pending = len(self.tokens), self.state.pending
        if n_left < n_cached:
            state = self.go_back(n_left)
            return state.settled(self.positions[: n_left - len(state.pending)])
        pending = pending.removed(n_left - n_cached, len(pending))
        return self.state._replace(pending=pending).settled(self.positions)

    def go_back(self, n_left: int) -> TextState:
        """Drop all but the first ``n_left`` cached tokens; those that had to go too are pending.

        Tokens that share a position go together; and a cache may only be able to go further back.

        Raises:
            NotSupported: one of these was decoded from an embedding, which nobody keeps.
        """
        return self.cache.changes.run(self._go_back, n_left)

    def _go_back(self, n_left: int) -> TextState:
        at, state = self.positions, self.state
        reached = self.cache.rewind(self.seq_id, int(at[n_left]))
        n_kept = int(np.searchsorted(at, reached))
        again = self.tokens[n_kept:n_left]
        if -1 in again:
            raise NotSupported(
                f"token {n_kept + again.index(-1)} would have to be computed again, but it was "
                "decoded from an embedding: decode the sequence again"
            )
        return state._replace(
            pending=PendingTokens(again, at[n_kept:n_left].tolist()),
            logits=None,
            self_extended=state.self_extended[:n_kept],
            self_extended_end=min(state.self_extended_end, int(at[n_kept])),
        )

    def remove(self, start: int, stop: int, gap: Gap) -> TextState:
        """Remove tokens ``[start, stop)``.

        Raises:
            OptionError: the range would part tokens that share a position.
            CacheFull, NotSupported: what follows can neither be moved nor computed again.
        """
        n, at = len(self.tokens), followed(self.positions, self.state.pending)
        closed = int(at[stop] - at[start]) if gap == "close" and stop < len(at) else 0
        pending = self.state.pending.removed(max(0, start - n), max(0, stop - n), closed)
        if start < min(stop, n):
            state, left = self._remove_cached(start, min(stop, n), closed, pending)
        else:
            state, left = self.state._replace(pending=pending), self.positions
        state = state.settled(left)
        if start < stop < len(at) and followed(left, state.pending)[start] == at[stop]:
            state = state.inexact(start)  # there is a gap before it
        return state

    def _remove_cached(
        self, start: int, stop: int, closed: int, pending: PendingTokens
    ) -> tuple[TextState, Int32Array]:
        """Remove cached tokens; return the state, and where those stand that are left."""
        tokens, at, state = self.tokens, self.positions, self.state
        is_last = stop == len(tokens)
        for cut in (start, stop):
            if 0 < cut < len(at) and at[cut] == at[cut - 1]:
                raise OptionError(
                    f"tokens {cut - 1} and {cut} share position {at[cut]}: remove both or neither"
                )
        p0, p1, closed = (
            int(at[start]),
            self.end if is_last else int(at[stop]),
            0 if is_last else closed,
        )
        remove = self.cache.seq_cut if closed else self.cache.seq_rm
        if remove(self.seq_id, p0, p1):
            end = state.self_extended_end
            state = state._replace(
                pending=pending,
                logits=None,
                self_extended=state.self_extended[:start] + state.self_extended[stop:],
                self_extended_end=max(min(end, p0), end - closed) if closed else end,
            )
            left = np.concatenate((at[:start], at[stop:] - np.int32(closed)))
            return state if is_last else state.inexact(start), left
        if -1 in tokens[stop:]:
            raise NotSupported("what follows was decoded from embeddings: decode it again")
        state = self.go_back(start)
        n_left = start - len(state.pending)
        pending = pending.prepended(PendingTokens(tokens[stop:], (at[stop:] - closed).tolist()))
        return state._replace(pending=pending.prepended(state.pending)), at[:n_left]

    def shift_span(self, shift: ContextShift) -> tuple[int, int]:
        """Return which tokens a context shift discards; those computed before count as computed."""
        at = followed(self.positions, self.state.pending)
        return shift.span(at[: self._n_computed], self.cache.spec.size)

    @property
    def _n_computed(self) -> int:
        return len(self.tokens) + len(self.state.pending.places)

    def span_to_discard(
        self, n_max: int, shift: ContextShift, reserved: int = 0
    ) -> tuple[int, int] | None:
        """Return what to discard for pending tokens to fit at positions below n_max; None: they do.

        One shift may not be enough. Of the free cells, ``reserved`` are for others.

        Raises:
            CacheFull: it would free no cell.
        """
        pending, free = self.state.pending, self.cache.n_free() - reserved
        n_pending = len(pending)
        if n_pending == 0 or self._n_computed < 2:
            return None
        if n_pending <= free and pending.end(self.end) <= n_max:
            return None
        start, stop = self.shift_span(shift)
        if n_pending > free and not self.cache.makes_room(self.seq_id, start, stop):
            hint = "a context shift would free none: other sequences or a transaction keep them"
            raise CacheFull(n_pending, free, hint)
        return start, stop

    def self_extend(self, group: int, width: int) -> TextState:
        """Divide the positions of every whole window behind those that were divided before.

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
        # Pending tokens follow on from where the text ends afterwards.
        state = self.state._replace(pending=PendingTokens(self.state.pending.tokens))
        end = state.self_extended_end
        n_windows = max(0, (self.end - end) // width)
        if group == 1 or n_windows == 0:
            return state
        highest = self.end + (group - 1) * (end + n_windows * width // group)
        if highest >= MAX_POSITION:
            raise OptionError(f"group={group}: positions would pass the largest one on the way")
        end = self.cache.changes.run(self._divide, group, width, n_windows)
        at = self.cache.seq_positions(self.seq_id)
        known = tuple(self.tokens[: int(np.searchsorted(at, end))])
        state = state._replace(self_extended=known, self_extended_end=end)
        moved = np.flatnonzero(at != self.positions)
        return state.inexact(int(moved[0])) if moved.size else state

    def _divide(self, group: int, width: int, n_windows: int) -> int:
        """Divide ``n_windows`` windows; return where the last of them ends afterwards."""
        start, cache, seq_id = self.state.self_extended_end, self.cache, self.seq_id
        for _ in range(n_windows):
            # Lifted so that the window starts at group times its place: division maps it there.
            lift = (group - 1) * start
            behind = start + lift + width
            cache.seq_add(seq_id, start, -1, lift)
            cache.seq_div(seq_id, start + lift, behind, group)
            start += width // group
            cache.seq_add(seq_id, behind, -1, start - behind)
        return start
