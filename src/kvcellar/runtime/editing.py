"""A text of which a part is in the cache and the rest waits to be computed, and its edits.

``tokens`` is what the cache holds followed by what waits. Where a cache can forget tokens it does;
where it has to go further back, as a state must that absorbed them, what follows waits to be
computed again: the text is the same, and only costs more.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TypeVar

import numpy as np

from kvcellar.cache.base import Cache
from kvcellar.cache.hybrid import has_states
from kvcellar.errors import ClosedError, NotSupported, OptionError
from kvcellar.runtime.held import Gap, HeldText
from kvcellar.runtime.options import check_range
from kvcellar.runtime.shifting import ContextShift
from kvcellar.runtime.turns import in_turn
from kvcellar.runtime.waiting import Waiting
from kvcellar.types import Float32Array, Int32Array

T = TypeVar("T", bound="EditableText")


class EditableText:
    """The tokens of a sequence, and what can be done to them without computing anything.

    Attributes:
        turn: holds off other threads (``turns.py``).
        rounded: names the types that K and V were restored or loaded from, if they are others than
            the cache's; empty: as they were computed. llama.cpp's files do not tell.
    """

    def __init__(
        self, cache: Cache, seq_id: int, n_ctx_train: int, turn: AbstractContextManager[object]
    ) -> None:
        self.seq_id = seq_id
        self.turn = turn
        self._held = HeldText(cache, seq_id)
        self._waiting = Waiting()
        self._logits: Float32Array | None = None
        self._logits_end = 0  # where the text ended that they follow
        self._tainted: int | None = None  # see SavedText
        self.rounded = ""
        self._n_ctx_train = n_ctx_train
        self._closed = False

    @property
    @in_turn
    def tokens(self) -> list[int]:
        """All token ids, in order."""
        self._check_open()
        return [*self._held.tokens, *self._waiting.tokens]

    @property
    @in_turn
    def positions(self) -> Int32Array:
        """Where each of ``tokens`` stands; those not computed yet: where they will."""
        self._check_open()
        rest = self._waiting.positions(self._held.end)
        return np.concatenate((self._held.positions, rest)).astype(np.int32)

    @in_turn
    def __len__(self) -> int:
        """How many tokens it has."""
        self._check_open()
        return len(self._held) + len(self._waiting)

    @property
    def tainted(self) -> int | None:
        """The first token whose K and V are not what a fresh decode of ``tokens`` would give.

        So it is behind a removal, after a context shift, or where text was loaded behind other
        text. None: there is none. What others do to ``context.cache`` directly is not known here.
        """
        return self._tainted

    @in_turn
    def trim(self: T, n_tokens: int) -> T:
        """Drop the last ``n_tokens`` tokens; returns the sequence itself.

        Raises:
            OptionError: it is negative or more than there are.
        """
        size = len(self)
        n_tokens = check_range("n_tokens", n_tokens, 0, size)
        if n_tokens == 0:
            return self
        n_left, n_held = size - n_tokens, len(self._held)
        if n_left < n_held:
            self._waiting = self._held.go_back(n_left)
            self._logits = None
        else:
            self._waiting = self._waiting.without(n_left - n_held, size - n_held)
        self._reconsider()
        return self

    @in_turn
    def remove(self: T, start: int, stop: int, *, gap: Gap = "close") -> T:
        """Remove tokens ``[start, stop)``, counted as in ``tokens``; returns the sequence itself.

        Args:
            start: the first token to go.
            stop: the first one behind it to stay.
            gap: "close" moves what follows up, its K rotated; "keep" leaves positions as they are.
                What cannot move, as behind a recurrent state, is taken back and computed again.

        Raises:
            OptionError: a range outside the sequence, or one that would part grouped tokens.
            CacheFull: cells that other sequences share have to be copied to move, and there is no
                room for that. Nothing has changed.
            NotSupported: a gap is to be kept in a recurrent sequence, or tokens would have to be
                computed again that were decoded from embeddings.
        """
        stop = check_range("stop", stop, 0, len(self))
        start = check_range("start", start, 0, stop)
        if gap not in ("close", "keep"):
            raise OptionError(f"gap={gap!r}: one of 'close', 'keep'")
        if gap == "keep" and start < stop < len(self) and has_states(self._held.cache):
            raise NotSupported(
                'remove(…, gap="keep"): positions of a recurrent sequence follow on from each '
                'other; use gap="close"'
            )
        n_held, at = len(self._held), self.positions
        closed = int(at[stop] - at[start]) if gap == "close" and stop < len(at) else 0
        first, last = max(0, start - n_held), max(0, stop - n_held)
        waiting = self._waiting.without(first, last, closed)
        if start < min(stop, n_held):
            again = self._held.remove(start, min(stop, n_held), gap)
            waiting = waiting.after(again)
            self._logits = None
            if not again and stop < n_held:
                self._taint(start)
        self._waiting = waiting
        self._reconsider()
        if start < min(stop, len(self)) and self.positions[start] == at[stop]:
            self._taint(start)  # there is a gap before it
        return self

    @in_turn
    def shift_context(self, keep: int = 0, discard: int | None = None) -> int:
        """Discard tokens behind the first ``keep`` and move the rest up; returns how many went.

        Both numbers are clamped as llama.cpp's server does (:class:`ContextShift`), so that at
        least one computed token goes and one stays.

        Raises:
            OptionError: a negative number, or fewer than two tokens in the cache.
            CacheFull, NotSupported: as :meth:`remove`; nothing has changed.
        """
        self._check_open()
        start, stop = self._held.shift_span(ContextShift(keep, discard), self._waiting)
        self.remove(start, stop)
        return stop - start

    @in_turn
    def self_extend(self: T, group: int, width: int) -> T:
        """Let tokens share positions, so that more text fits what the model was trained for.

        Of every ``width`` positions, ``group`` neighbours each become one, as llama.cpp's
        ``grp-attn-n`` and ``grp-attn-w`` do. Windows that are not full yet are left alone: call
        it again as the text grows. Returns the sequence itself.

        Raises:
            OptionError: a number below 1, or a width that is no multiple of group.
            NotSupported: the model has states, or windows that slide.
            ShiftUnsupported, CacheFull: positions cannot be moved; nothing has changed.
        """
        self._check_open()
        before = self._held.positions
        self._held.self_extend(group, width)
        if (moved := np.flatnonzero(before != self._held.positions)).size:
            self._taint(int(moved[0]))
        self._waiting = Waiting(self._waiting.tokens)  # they follow on from where it ends now
        return self

    @in_turn
    def push(self, token: int) -> None:
        """Add one token without computing it yet."""
        self._check_open()
        self._waiting = self._waiting.then([token])

    @in_turn
    def make_room(self, shift: ContextShift) -> None:
        """Shift until what waits to be computed fits; what :meth:`stream` does if asked to.

        Raises:
            CacheFull: a shift would free no cell, because others share them.
        """
        n_max = min(self._held.cache.spec.size, self._n_ctx_train)
        while span := self._held.span_to_discard(self._waiting, n_max, shift):
            self.remove(*span)

    def _taint(self, token: int) -> None:
        """Know that K and V from a token on are not what a fresh decode would give."""
        self._tainted = token if self._tainted is None else min(self._tainted, token)

    def _reconsider(self) -> None:
        """Know that what waits will be fresh, if it stands where it would in a text of its own."""
        if len(self._held) == 0:
            self.rounded = ""
        if self._tainted is not None and len(self._held) <= self._tainted:
            moved = np.flatnonzero(self.positions != np.arange(len(self)))
            self._tainted = int(moved[0]) if moved.size else None

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"sequence {self.seq_id} is closed")
