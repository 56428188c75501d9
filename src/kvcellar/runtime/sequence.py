"""A token stream that lives in a context's cache: append, fork, edit, generate, close.

Tokens that were sampled but not yet computed wait in ``pending``; they are computed together with
whatever comes next. So ``tokens`` is what the cache holds followed by what is pending.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvcellar.batch import Batch
from kvcellar.cache.transaction import Undo
from kvcellar.errors import ClosedError, OptionError
from kvcellar.runtime.generation import FinishReason, Generation
from kvcellar.runtime.held import Gap, HeldText
from kvcellar.runtime.options import check_range
from kvcellar.runtime.sampler import SamplerOptions
from kvcellar.runtime.shifting import ContextShift
from kvcellar.types import Float32Array, Int32Array

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context


class Sequence:
    """One stream of tokens in a context; made by :meth:`Context.sequence` or :meth:`fork`.

    Attributes:
        context: where its cells are.
        seq_id: its id for llama.cpp's verbs on ``context.cache``.
        finish_reason: why the last generation ended, None before and while it runs.
    """

    def __init__(self, context: Context, seq_id: int) -> None:
        self.context = context
        self.seq_id = seq_id
        self.finish_reason: FinishReason | None = None
        self._held = HeldText(context.cache, seq_id)
        self._pending: list[int] = []
        self._logits: Float32Array | None = None
        self._closed = False

    @property
    def tokens(self) -> list[int]:
        """All token ids, in order."""
        self._check_open()
        return [*self._held.tokens, *self._pending]

    @property
    def positions(self) -> Int32Array:
        """Where each of ``tokens`` stands; those not computed yet: where they will."""
        self._check_open()
        rest = self._held.end + np.arange(len(self._pending))
        return np.concatenate((self._held.positions, rest)).astype(np.int32)

    @property
    def text(self) -> str:
        """All tokens as text, special tokens included."""
        return self.context.model.tokenizer.decode(self.tokens)

    @property
    def logits(self) -> Float32Array:
        """Logits of the next token, ``[n_vocab]``; computed if need be.

        Raises:
            OptionError: the sequence is empty.
        """
        self._check_open()
        if self._pending:
            self._compute(self._pending)
        if self._logits is None:
            self._compute_last_again()
        if self._logits is None:
            raise OptionError("the sequence is empty: append a prompt first")
        return self._logits

    def __len__(self) -> int:
        """How many tokens it has."""
        self._check_open()
        return len(self._held) + len(self._pending)

    def append(self, prompt: str | Iterable[int]) -> Sequence:
        """Add text or token ids and compute them; returns the sequence itself.

        Special tokens in text are not parsed; an empty sequence gets the BOS that the file asks
        for. Use ``model.tokenizer.encode(text, parse_special=True)`` for the rest.

        Raises:
            BatchError: nothing to add, or a token id outside the vocabulary.
            CacheFull: not enough free cells; nothing has changed.
        """
        self._check_open()
        self._compute([*self._pending, *self._to_ids(prompt)])
        return self

    def fork(self) -> Sequence:
        """A new sequence that shares every cell with this one; no byte is copied.

        Raises:
            SequenceIdError: all ``n_seq_max`` ids are taken.
        """
        self._check_open()
        child = self.context.sequence()
        self._held.share_with(child._held)  # noqa: SLF001
        child._pending = list(self._pending)  # noqa: SLF001  (of the same class)
        child._logits = self._logits  # noqa: SLF001
        return child

    def trim(self, n_tokens: int) -> Sequence:
        """Drop the last ``n_tokens`` tokens; returns the sequence itself.

        Raises:
            OptionError: it is negative or more than there are.
        """
        size = len(self)
        if not 0 <= n_tokens <= size:
            raise OptionError(f"trim({n_tokens}): the sequence has {size} tokens")
        if n_tokens == 0:
            return self
        from_pending = min(n_tokens, len(self._pending))
        if from_pending:
            del self._pending[-from_pending:]
        if n_tokens > from_pending:
            _, self._pending = self._held.drop_tail(n_tokens - from_pending)
            self._logits = None
        return self

    def remove(self, start: int, stop: int, *, gap: Gap = "close") -> Sequence:
        """Remove tokens ``[start, stop)``, counted as in ``tokens``; returns the sequence itself.

        Args:
            start: the first token to go.
            stop: the first one behind it to stay.
            gap: "close" moves what follows up, its K rotated; "keep" leaves positions as they are.

        Raises:
            OptionError: a range outside the sequence, or one that would part grouped tokens.
            ShiftUnsupported, CacheFull, NotSupported: what follows cannot move. Cells that other
                sequences share have to be copied for that. Nothing has changed.
        """
        stop = check_range("stop", stop, 0, len(self))
        start = check_range("start", start, 0, stop)
        if gap not in ("close", "keep"):
            raise OptionError(f"gap={gap!r}: one of 'close', 'keep'")
        n_held = len(self._held)
        if start < min(stop, n_held):
            self._held.remove(start, min(stop, n_held), gap)
            self._logits = None
        del self._pending[max(0, start - n_held) : max(0, stop - n_held)]
        return self

    def shift_context(self, keep: int = 0, discard: int | None = None) -> int:
        """Discard tokens behind the first ``keep`` and move the rest up; returns how many went.

        Both numbers are clamped as llama.cpp's server does (:class:`ContextShift`), so that at
        least one computed token goes and one stays.

        Raises:
            OptionError: a negative number, or fewer than two tokens in the cache.
            ShiftUnsupported, CacheFull, NotSupported: as :meth:`remove`; nothing has changed.
        """
        self._check_open()
        start, stop = self._held.shift_span(ContextShift(keep, discard))
        self.remove(start, stop)
        return stop - start

    def self_extend(self, group: int, width: int) -> Sequence:
        """Let tokens share positions, so that more text fits what the model was trained for.

        Of every ``width`` positions, ``group`` neighbours each become one, as llama.cpp's
        ``grp-attn-n`` and ``grp-attn-w`` do. Windows that are not full yet are left alone: call
        it again as the text grows. Returns the sequence itself.

        Raises:
            OptionError: a number below 1, or a width that is no multiple of group.
            ShiftUnsupported, CacheFull, NotSupported: as :meth:`remove`; nothing has changed.
        """
        self._check_open()
        self._held.self_extend(group, width)
        return self

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

    def close(self) -> None:
        """Free the cells that no other sequence shares; closing twice is fine."""
        if not self._closed:
            self._closed = True
            self.context.release(self)

    @property
    def is_closed(self) -> bool:
        """Whether the sequence was closed."""
        return self._closed

    def remember(self) -> Undo:
        """What puts the sequence back as it is now, its cells excepted."""
        kept = {**vars(self), "_held": copy(self._held), "_pending": list(self._pending)}
        return partial(vars(self).update, kept)

    def push(self, token: int) -> None:
        """Add one token without computing it yet."""
        self._check_open()
        self._pending.append(token)

    def make_room(self, shift: ContextShift) -> None:
        """Shift until what waits to be computed fits; what :meth:`stream` does if asked to.

        Raises:
            CacheFull: a shift would free no cell, because others share them.
        """
        spec = self.context.model.spec
        n_max = min(self.context.spec.size, spec.n_ctx_train)
        while span := self._held.span_to_discard(len(self._pending), n_max, shift):
            self.remove(*span)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self)} tokens"
        return f"<Sequence {self.seq_id}: {state}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"sequence {self.seq_id} is closed")

    def _to_ids(self, prompt: str | Iterable[int]) -> list[int]:
        if isinstance(prompt, str):
            is_first = len(self) == 0
            return self.context.model.tokenizer.encode(prompt, add_special=is_first)
        return list(prompt)

    def _compute(self, ids: list[int], start: int | None = None) -> None:
        positions = None if start is None else range(start, start + len(ids))
        before, n_held = (self._pending, self._logits), len(self._held)
        self._pending, self._logits = [], None
        try:
            batch = Batch.of(ids, self.seq_id, positions, logits="last")
            self._logits = self.context.decode(batch)[-1]
        except BaseException:
            # Ctrl-C may come after the cells were filled: a token must not wait as well.
            if len(self._held) == n_held:
                self._pending, self._logits = before
            raise

    def _compute_last_again(self) -> None:
        """After an edit the last token's logits are gone: take it out and compute it once more."""
        if ids := self._held.tokens:
            start, again = self._held.drop_tail(1)
            self._pending = [*again, ids[-1]]
            self._compute(self._pending, start)
