"""A token stream that lives in a context's cache: append, fork, edit, generate, close.

Tokens that were sampled but not yet computed wait, and so do those that an edit took back further
than it had to (``editing.py``); they are computed together with whatever comes next.

Threads that share a context take turns: one call at a time, on whichever of its sequences.

A text of which a part is in the cache and the rest waits to be computed, and its edits.

``tokens`` is what the cache holds followed by what waits. Where a cache can forget tokens it does;
where it has to go further back, as a state must that absorbed them, what follows waits to be
computed again: the text is the same, and only costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from copy import copy
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from kvcellar.batch import Batch
from kvcellar.cache.base import Cache, Undo
from kvcellar.errors import BatchError, ClosedError, NotSupported, OptionError, check_range
from kvcellar.runtime.cached_text import CachedText, Gap, PendingTokens
from kvcellar.runtime.generation import FinishReason, Generation
from kvcellar.runtime.options import ContextShift, LoadOptions, SaveOptions
from kvcellar.runtime.saving import load_into, save_part
from kvcellar.snapshot.snapshot import SavedText
from kvcellar.text.sampler import SamplerOptions
from kvcellar.types import Float32Array, Int32Array, KVType

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context

P = ParamSpec("P")
R = TypeVar("R")


class TakesTurns(Protocol):
    """What :func:`synchronized` methods belong to."""

    turn: AbstractContextManager[object]


Locked = TypeVar("Locked", bound=TakesTurns)


def synchronized(
    method: Callable[Concatenate[Locked, P], R],
) -> Callable[Concatenate[Locked, P], R]:
    """A method during which no other thread works on the context."""

    @wraps(method)
    def alone(self: Locked, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.turn:
            return method(self, *args, **kwargs)

    return alone


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
        self._cached = CachedText(cache, seq_id)
        self._pending = PendingTokens()
        self._logits: Float32Array | None = None
        self._logits_end = 0  # where the text ended that they follow
        self._inexact_from: int | None = None  # see SavedText
        self.stored_as = ""
        self._n_ctx_train = n_ctx_train
        self._closed = False

    @property
    @synchronized
    def tokens(self) -> list[int]:
        """All token ids, in order."""
        self._check_open()
        return [*self._cached.tokens, *self._pending.tokens]

    @property
    @synchronized
    def positions(self) -> Int32Array:
        """Where each of ``tokens`` stands; those not computed yet: where they will."""
        self._check_open()
        rest = self._pending.positions(self._cached.end)
        return np.concatenate((self._cached.positions, rest)).astype(np.int32)

    @synchronized
    def __len__(self) -> int:
        """How many tokens it has."""
        self._check_open()
        return len(self._cached) + len(self._pending)

    @property
    def inexact_from(self) -> int | None:
        """The first token whose K and V are not what a fresh decode of ``tokens`` would give.

        So it is behind a removal, after a context shift, or where text was loaded behind other
        text. None: there is none. What others do to ``context.cache`` directly is not known here.
        """
        return self._inexact_from

    @synchronized
    def trim(self: T, n_tokens: int) -> T:
        """Drop the last ``n_tokens`` tokens; returns the sequence itself.

        Raises:
            OptionError: it is negative or more than there are.
        """
        size = len(self)
        n_tokens = check_range("n_tokens", n_tokens, 0, size)
        if n_tokens == 0:
            return self
        n_left, n_held = size - n_tokens, len(self._cached)
        if n_left < n_held:
            self._pending = self._cached.go_back(n_left)
            self._logits = None
        else:
            self._pending = self._pending.removed(n_left - n_held, size - n_held)
        self._reconsider()
        return self

    @synchronized
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
        if gap == "keep" and start < stop < len(self) and self._cached.cache.has_states:
            raise NotSupported(
                'remove(…, gap="keep"): positions of a recurrent sequence follow on from each '
                'other; use gap="close"'
            )
        n_held, at = len(self._cached), self.positions
        closed = int(at[stop] - at[start]) if gap == "close" and stop < len(at) else 0
        first, last = max(0, start - n_held), max(0, stop - n_held)
        pending = self._pending.removed(first, last, closed)
        if start < min(stop, n_held):
            again = self._cached.remove(start, min(stop, n_held), gap)
            pending = pending.prepended(again)
            self._logits = None
            if not again and stop < n_held:
                self._mark_inexact(start)
        self._pending = pending
        self._reconsider()
        if start < min(stop, len(self)) and self.positions[start] == at[stop]:
            self._mark_inexact(start)  # there is a gap before it
        return self

    @synchronized
    def shift_context(self, keep: int = 0, discard: int | None = None) -> int:
        """Discard tokens behind the first ``keep`` and move the rest up; returns how many went.

        Both numbers are clamped as llama.cpp's server does (:class:`ContextShift`), so that at
        least one computed token goes and one stays.

        Raises:
            OptionError: a negative number, or fewer than two tokens in the cache.
            CacheFull, NotSupported: as :meth:`remove`; nothing has changed.
        """
        self._check_open()
        start, stop = self._cached.shift_span(ContextShift(keep, discard), self._pending)
        self.remove(start, stop)
        return stop - start

    @synchronized
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
        before = self._cached.positions
        self._cached.self_extend(group, width)
        if (moved := np.flatnonzero(before != self._cached.positions)).size:
            self._mark_inexact(int(moved[0]))
        self._pending = PendingTokens(self._pending.tokens)  # they follow on from where it ends now
        return self

    @synchronized
    def push(self, token: int) -> None:
        """Add one token without computing it yet."""
        self._check_open()
        self._pending = self._pending.appended([token])

    @synchronized
    def make_room(self, shift: ContextShift) -> None:
        """Shift until what waits to be computed fits; what :meth:`stream` does if asked to.

        Raises:
            CacheFull: a shift would free no cell, because others share them.
        """
        n_max = min(self._cached.cache.spec.size, self._n_ctx_train)
        while span := self._cached.span_to_discard(self._pending, n_max, shift):
            self.remove(*span)

    def _mark_inexact(self, token: int) -> None:
        """Know that K and V from a token on are not what a fresh decode would give."""
        self._inexact_from = token if self._inexact_from is None else min(self._inexact_from, token)

    def _reconsider(self) -> None:
        """Know that what waits will be fresh, if it stands where it would in a text of its own."""
        if len(self._cached) == 0:
            self.stored_as = ""
        if self._inexact_from is not None and len(self._cached) <= self._inexact_from:
            moved = np.flatnonzero(self.positions != np.arange(len(self)))
            self._inexact_from = int(moved[0]) if moved.size else None

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"sequence {self.seq_id} is closed")


class Sequence(EditableText):
    """One stream of tokens in a context; made by :meth:`Context.sequence` or :meth:`fork`.

    Attributes:
        context: where its cells are.
        seq_id: its id for llama.cpp's verbs on ``context.cache``.
        finish_reason: why the last generation ended, None before and while it runs.
    """

    def __init__(self, context: Context, seq_id: int) -> None:
        n_ctx_train = context.model.spec.n_ctx_train
        super().__init__(context.cache, seq_id, n_ctx_train, context.exclusive())
        self.context = context
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All tokens as text, special tokens included."""
        return self.context.model.tokenizer.decode(self.tokens)

    @property
    @synchronized
    def logits(self) -> Float32Array:
        """Logits of the next token, ``[n_vocab]``; computed if need be.

        Raises:
            OptionError: the sequence is empty.
        """
        self._check_open()
        if self._pending:
            self._compute(self._pending)
        self._forget_old_logits()
        if self._logits is None:
            self._compute_last_again()
        if self._logits is None:
            raise OptionError("the sequence is empty: append a prompt first")
        return self._logits

    @synchronized
    def append(self, prompt: str | Iterable[int]) -> Sequence:
        """Add text or token ids and compute them; returns the sequence itself.

        Special tokens in text are not parsed; an empty sequence gets the BOS that the file asks
        for. Use ``model.tokenizer.encode(text, parse_special=True)`` for the rest.

        Raises:
            BatchError: nothing to add, or a token id outside the vocabulary.
            CacheFull: not enough free cells; nothing has changed.
        """
        self._check_open()
        self._compute(self._pending.appended(self.to_ids(prompt)))
        return self

    @synchronized
    def fork(self) -> Sequence:
        """A new sequence that shares every cell with this one; no byte is copied.

        Raises:
            SequenceIdError: all ``n_seq_max`` ids are taken.
        """
        self._check_open()
        child = self.context.sequence()
        try:
            self._cached.share_with(child._cached)  # noqa: SLF001
        except BaseException:
            child.close()
            raise
        child._pending = self._pending  # noqa: SLF001  (of the same class)
        child._logits, child._logits_end = self._logits, self._logits_end  # noqa: SLF001
        child._inexact_from = self._inexact_from  # noqa: SLF001
        child.stored_as = self.stored_as
        return child

    def generate(
        self,
        max_tokens: int | None = None,
        *,
        stop: str | Iterable[str] = (),
        shift: ContextShift | None = None,
        options: SamplerOptions | None = None,
        **sampling: object,
    ) -> str:
        """Generate and return the text; see :meth:`stream` for arguments and errors."""
        pieces = self.stream(max_tokens, stop=stop, shift=shift, options=options, **sampling)
        return "".join(pieces)

    def stream(
        self,
        max_tokens: int | None = None,
        *,
        stop: str | Iterable[str] = (),
        shift: ContextShift | None = None,
        options: SamplerOptions | None = None,
        **sampling: object,
    ) -> Iterator[str]:
        """Generate and yield text as it comes, whole characters only.

        Generation ends at one of the model's stop tokens (which is not added), at a stop string
        (cut from the text, its tokens stay), or after ``max_tokens``; ``finish_reason`` says
        which. Every token yielded is part of the sequence, also when the caller stops early.

        Args:
            max_tokens: at most so many tokens; None: until a stop or a full cache.
            stop: text, or several, at which to stop.
            shift: what to discard when no cell is free or the positions reach the context's size;
                None: such a generation ends in CacheFull. Prompts are never shifted.
            options: how to sample; greedy when None.
            **sampling: single fields of :class:`SamplerOptions`, for example ``temperature=0.8``.

        Raises:
            OptionError: an argument outside its range, or an empty sequence.
            CacheFull: no cell for the next token; what was generated stays in the sequence.
        """
        self._check_open()
        return iter(Generation(self, max_tokens, stop, shift, options, sampling))

    @synchronized
    def save(
        self,
        path: str | Path,
        *,
        start: int = 0,
        stop: int | None = None,
        type_k: str | KVType | None = None,
        type_v: str | KVType | None = None,
        compress: bool = False,
        checkpoints: bool = True,
    ) -> int:
        """Write what was computed to a file (``docs/format.md``); returns its bytes.

        The file is written as a whole or not at all. :meth:`Context.load` goes on with it, in this
        process or another, with exactly the same logits.

        Args:
            path: where to.
            start: the first token that is saved, counted as in ``tokens``.
            stop: the first one that is not; None: all.
            type_k: store K as another type than the cache's.
            type_v: store V as another type than the cache's.
            compress: with zstd; needs ``kvcellar[zstd]``.
            checkpoints: whether older states and windows are saved too, to go back to.

        Raises:
            OptionError: a range outside the sequence, or no such type.
            NotSupported: the cache has states or windows, and cannot go back to there.
            SnapshotFileError: the file cannot be written.
        """
        self._check_open()
        how = SaveOptions(type_k, type_v, compress, checkpoints)
        return save_part(self, path, start, stop, how)

    @synchronized
    def load(
        self: Sequence,
        path: str | Path,
        *,
        start: int = 0,
        stop: int | None = None,
        positions: int | None = None,
        convert: bool = False,
    ) -> Sequence:
        """Add what a file holds behind what the sequence has; returns the sequence itself.

        Arguments and errors are those of :meth:`Context.load`; files of llama.cpp only that takes.
        Into a sequence that is not empty it needs a cache without states and windows, and
        ``positions`` where the text would not follow on by itself. K and V are what they were:
        they know nothing of what stands before.
        """
        self._check_open()
        load_into(self, path, LoadOptions(start, stop, positions, convert))
        return self

    def close(self) -> None:
        """Free the cells that no other sequence shares; closing twice is fine."""
        if not self._closed:
            self._closed = True
            self.context.release(self)

    @property
    def is_closed(self) -> bool:
        """Whether the sequence was closed."""
        return self._closed

    # -- what saving and loading need

    @synchronized
    def compute_pending(self) -> None:
        """Compute what waits, if anything does."""
        self._check_open()
        if self._pending:
            self._compute(self._pending)

    @synchronized
    def saved_text(self) -> SavedText:
        """What a snapshot has to know beside what the cache holds."""
        held = self._cached
        self._forget_old_logits()
        return SavedText(
            self._logits,
            held.self_extended,
            held.self_extended_end,
            self._inexact_from,
            self.stored_as,
        )

    def adopt(self, saved: SavedText, before: list[int]) -> None:
        """Know what was saved, now that the cache holds it behind the tokens ``before``."""
        held = self._cached
        if saved.self_extended:
            held.self_extended, held.self_extended_end = (
                (*before, *saved.self_extended),
                saved.self_extended_end,
            )
        if len(held) == len(before):
            return  # nothing was added
        self._know(None if before else saved.logits)
        if before:
            self._mark_inexact(len(before))
        elif saved.inexact_from is not None:
            self._mark_inexact(saved.inexact_from)

    def remember(self) -> Undo:
        """What puts the sequence back as it is now, its cells excepted."""
        kept = {**vars(self), "_held": copy(self._cached)}
        return partial(vars(self).update, kept)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self)} tokens"
        return f"<Sequence {self.seq_id}: {state}>"

    def to_ids(self, prompt: str | Iterable[int]) -> list[int]:
        """The token ids that :meth:`append` would add."""
        if isinstance(prompt, str):
            is_first = len(self) == 0
            return self.context.model.tokenizer.encode(prompt, add_special=is_first)
        if not isinstance(prompt, Iterable):
            raise BatchError(f"prompt {prompt!r}: give text, or a list of token ids")
        return list(prompt)

    def _compute(self, pending: PendingTokens) -> None:
        positions = pending.positions(self._cached.end) if pending.places else None
        before, n_held = (self._pending, self._logits), len(self._cached)
        self._pending, self._logits = PendingTokens(), None
        try:
            batch = Batch.of(pending.tokens, self.seq_id, positions, logits="last")
            self._know(self.context.decode(batch)[-1])
        except BaseException:
            # Ctrl-C may come after the cells were filled: a token must not wait as well.
            if len(self._cached) == n_held:
                self._pending, self._logits = before
            raise

    def _know(self, logits: Float32Array | None) -> None:
        """Have the logits behind what the cache holds now."""
        self._logits, self._logits_end = logits, self._cached.end

    def _forget_old_logits(self) -> None:
        """Someone may have decoded into our id, or removed what the logits follow."""
        if self._logits_end != self._cached.end:
            self._logits = None

    def _compute_last_again(self) -> None:
        """After an edit the last token's logits are gone: take it out and compute it once more."""
        if ids := self._cached.tokens:
            last = PendingTokens(ids[-1:], self._cached.positions[-1:].tolist())
            self._pending = last.prepended(self._cached.go_back(len(ids) - 1))
            self._compute(self._pending)
