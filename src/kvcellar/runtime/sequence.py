"""A token stream that lives in a context's cache: append, fork, edit, generate, close.

Tokens that were sampled but not yet computed wait, and so do those that an edit took back further
than it had to (``editing.py``); they are computed together with whatever comes next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvcellar.batch import Batch
from kvcellar.cache.transaction import Undo
from kvcellar.errors import BatchError, OptionError
from kvcellar.runtime.editing import EditableText
from kvcellar.runtime.generation import FinishReason, Generation
from kvcellar.runtime.loading import LoadOptions, load_into
from kvcellar.runtime.saving import SaveOptions, save_part
from kvcellar.runtime.shifting import ContextShift
from kvcellar.runtime.turns import in_turn
from kvcellar.runtime.waiting import Waiting
from kvcellar.snapshot.snapshot import SavedText
from kvcellar.text.sampler import SamplerOptions
from kvcellar.types import Float32Array, KVType

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context


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
    @in_turn
    def logits(self) -> Float32Array:
        """Logits of the next token, ``[n_vocab]``; computed if need be.

        Raises:
            OptionError: the sequence is empty.
        """
        self._check_open()
        if self._waiting:
            self._compute(self._waiting)
        self._forget_old_logits()
        if self._logits is None:
            self._compute_last_again()
        if self._logits is None:
            raise OptionError("the sequence is empty: append a prompt first")
        return self._logits

    @in_turn
    def append(self, prompt: str | Iterable[int]) -> Sequence:
        """Add text or token ids and compute them; returns the sequence itself.

        Special tokens in text are not parsed; an empty sequence gets the BOS that the file asks
        for. Use ``model.tokenizer.encode(text, parse_special=True)`` for the rest.

        Raises:
            BatchError: nothing to add, or a token id outside the vocabulary.
            CacheFull: not enough free cells; nothing has changed.
        """
        self._check_open()
        self._compute(self._waiting.then(self.to_ids(prompt)))
        return self

    @in_turn
    def fork(self) -> Sequence:
        """A new sequence that shares every cell with this one; no byte is copied.

        Raises:
            SequenceIdError: all ``n_seq_max`` ids are taken.
        """
        self._check_open()
        child = self.context.sequence()
        try:
            self._held.share_with(child._held)  # noqa: SLF001
        except BaseException:
            child.close()
            raise
        child._waiting = self._waiting  # noqa: SLF001  (of the same class)
        child._logits, child._logits_end = self._logits, self._logits_end  # noqa: SLF001
        child._tainted = self._tainted  # noqa: SLF001
        child.rounded = self.rounded
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

    @in_turn
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

    @in_turn
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

    @in_turn
    def compute_waiting(self) -> None:
        """Compute what waits, if anything does."""
        self._check_open()
        if self._waiting:
            self._compute(self._waiting)

    @in_turn
    def saved_text(self) -> SavedText:
        """What a snapshot has to know beside what the cache holds."""
        held = self._held
        self._forget_old_logits()
        return SavedText(self._logits, held.grouped, held.grouped_end, self._tainted, self.rounded)

    def adopt(self, saved: SavedText, before: list[int]) -> None:
        """Know what was saved, now that the cache holds it behind the tokens ``before``."""
        held = self._held
        if saved.grouped:
            held.grouped, held.grouped_end = (*before, *saved.grouped), saved.grouped_end
        if len(held) == len(before):
            return  # nothing was added
        self._know(None if before else saved.logits)
        if before:
            self._taint(len(before))
        elif saved.tainted is not None:
            self._taint(saved.tainted)

    def remember(self) -> Undo:
        """What puts the sequence back as it is now, its cells excepted."""
        kept = {**vars(self), "_held": copy(self._held)}
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

    def _compute(self, waiting: Waiting) -> None:
        positions = waiting.positions(self._held.end) if waiting.places else None
        before, n_held = (self._waiting, self._logits), len(self._held)
        self._waiting, self._logits = Waiting(), None
        try:
            batch = Batch.of(waiting.tokens, self.seq_id, positions, logits="last")
            self._know(self.context.decode(batch)[-1])
        except BaseException:
            # Ctrl-C may come after the cells were filled: a token must not wait as well.
            if len(self._held) == n_held:
                self._waiting, self._logits = before
            raise

    def _know(self, logits: Float32Array | None) -> None:
        """Have the logits behind what the cache holds now."""
        self._logits, self._logits_end = logits, self._held.end

    def _forget_old_logits(self) -> None:
        """Someone may have decoded into our id, or removed what the logits follow."""
        if self._logits_end != self._held.end:
            self._logits = None

    def _compute_last_again(self) -> None:
        """After an edit the last token's logits are gone: take it out and compute it once more."""
        if ids := self._held.tokens:
            last = Waiting(ids[-1:], self._held.positions[-1:].tolist())
            self._waiting = last.after(self._held.go_back(len(ids) - 1))
            self._compute(self._waiting)
