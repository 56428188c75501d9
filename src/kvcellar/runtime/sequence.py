"""A token stream that lives in a context's cache: append, fork, edit, generate, save, close.

A sequence is its cells, which the cache has under ``seq_id``, and what is known beside them, a
:class:`~kvcellar.runtime.cached_text.TextState`. Tokens that are not computed yet are pending:
those that were sampled last, and those that an edit took back further than it had to. They are
computed together with what comes next.

Threads that share a context take turns: one call at a time, on whichever of its sequences. A call
happens as a whole or not at all, also when an exception comes from outside (Ctrl-C); each token of
a generation is a call. What a sequence holds that nobody refers to any more is freed when its id or
its cells are wanted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from weakref import ReferenceType, ref

import numpy as np

from kvcellar.batch import Batch
from kvcellar.cache.changes import Undo
from kvcellar.errors import (
    BatchError,
    CacheFull,
    ClosedError,
    NotSupported,
    OptionError,
    TokenizerError,
    check_bool,
    check_choice,
    check_integers,
    check_kind,
    check_path,
    check_range,
    check_text,
    not_copied,
    shown,
)
from kvcellar.runtime.cached_text import CachedText, Gap, PendingTokens, TextState, followed
from kvcellar.runtime.generation import (
    MOST_LOGPROBS,
    Generation,
    GenerationArguments,
    StreamSlot,
)
from kvcellar.runtime.llama_files import is_llama_file
from kvcellar.runtime.options import ContextShift, LoadOptions, SaveOptions
from kvcellar.runtime.results import FinishReason, Result, Token, scored
from kvcellar.runtime.saving import prepare, read_wanted, take_part, take_snapshot
from kvcellar.snapshot.container import write_snapshot
from kvcellar.snapshot.snapshot import SavedText, check_note
from kvcellar.text.constraint import Constraint
from kvcellar.text.grammar import Grammar
from kvcellar.text.healing import can_heal
from kvcellar.text.sampler import Sampler, SamplerOptions
from kvcellar.types import MAX_POSITION, Float32Array, Int32Array, KVType

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.model import Model

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
S = TypeVar("S", bound="Sequence")


def synchronized(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Hold off other threads from the context while a method of a sequence runs."""

    @wraps(method)
    def alone(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.turn:
            self.context.cache.changes.settle()
            return method(self, *args, **kwargs)

    return alone


def changing(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Do the same, and make the method happen as a whole or not at all."""

    @wraps(method)
    def whole(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        def noted() -> R:
            self.context.cache.changes.remember(self.held.remember())
            return method(self, *args, **kwargs)

        with self.turn:
            return self.context.change(noted)

    return whole


class HeldSequence:
    """What a context holds of a sequence beside its cells, for as long as it has its id.

    Attributes:
        seq_id: its id.
        state: its text.
        is_closed: whether its id has been given back.
        handle: the sequence by which users reach it; None, or dead: nobody does.
    """

    __slots__ = ("handle", "is_closed", "seq_id", "state")

    def __init__(self, seq_id: int) -> None:
        self.seq_id = seq_id
        self.state = TextState()
        self.is_closed = False
        self.handle: ReferenceType[Sequence] | None = None

    @property
    def is_reachable(self) -> bool:
        """Whether anybody refers to the sequence."""
        return self.handle is not None and self.handle() is not None

    def remember(self) -> Undo:
        """Return what puts it back as it is now, except for its cells."""
        state, is_closed = self.state, self.is_closed

        def undo() -> None:
            self.state, self.is_closed = state, is_closed

        return undo


class _TakenBack(Exception):
    """Ends a change that is not to happen.

    Attributes:
        tokens: what was learnt by it.
    """

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__()
        self.tokens = tokens


class Sequence:
    """One stream of tokens in a context; made by :meth:`Context.sequence` or :meth:`fork`.

    Attributes:
        context: where its cells are.
        seq_id: its id for llama.cpp's verbs on ``context.cache``.
        turn: holds off other threads.
        held: what the context holds of it.
        finish_reason: why the last generation ended, None before and while it runs.
    """

    __reduce_ex__ = not_copied("a Sequence", "use fork(), or save() and Context.load()")
    finish_reason: FinishReason | None = None

    def __init__(self, context: Context, held: HeldSequence) -> None:
        self.context = context
        self.seq_id = held.seq_id
        self.turn = context.exclusive()
        self.held = held
        self._streaming = StreamSlot()
        held.handle = ref(self)

    @property
    def _state(self) -> TextState:
        return self.held.state

    @_state.setter
    def _state(self, state: TextState) -> None:
        self.held.state = state

    # -- what it holds

    @property
    @synchronized
    def tokens(self) -> list[int]:
        """All token ids, in order."""
        tokens: list[int] = self.ids().tolist()
        return tokens

    @property
    @synchronized
    def positions(self) -> Int32Array:
        """Where ``tokens`` stand; pending ones: where they will."""
        self._check_open()
        return followed(self.context.cache.seq_positions(self.seq_id), self._state.pending)

    @property
    def text(self) -> str:
        """All tokens as text, without control tokens; U+FFFD for bytes that make no character."""
        return self.context.model.tokenizer.decode(self.tokens)

    @synchronized
    def __len__(self) -> int:
        """How many tokens it has."""
        self._check_open()
        return self.context.cache.seq_count(self.seq_id) + len(self._state.pending.tokens)

    @property
    @synchronized
    def logits(self) -> Float32Array:
        """Logits of the next token, ``[n_vocab]``; computed if need be.

        Raises:
            OptionError: the sequence is empty.
        """
        self._check_open()
        if not self._state.pending.tokens and (logits := self._known_logits()) is not None:
            return logits
        return self._compute_last()

    @property
    def inexact_from(self) -> int | None:
        """The first token whose K and V are not what a fresh decode of ``tokens`` would give.

        It follows a removal, a context shift, or a load behind other text. None: there is none.
        Edits made directly on ``context.cache`` are not known here.
        """
        return self._state.inexact_from

    @property
    def stored_as(self) -> str:
        """A digest that names the types K and V were loaded from, if others than the cache's.

        Empty: they are as they were computed. llama.cpp's files do not tell.
        """
        return self._state.stored_as

    @stored_as.setter
    def stored_as(self, name: str) -> None:
        check_text("stored_as", name)
        self._state = self._state._replace(stored_as=name)

    # -- computing

    def append(self, prompt: str | Iterable[int], *, heal: bool = False) -> Sequence:
        """Append text or token ids and compute them; return the sequence itself.

        Special tokens in text are not parsed; an empty sequence gets the BOS that the file asks
        for. Use ``model.tokenizer.encode(text, parse_special=True)`` for the rest.

        Args:
            prompt: what to append.
            heal: leave the last token open, if longer ones begin with its text: the first token
                that is generated next, without a constraint, is one of these and takes its place;
                what it adds to the text is its piece. Meant for prompts that may end within a
                word. Whatever computes the last token, such as another ``append``, closes it.

        Raises:
            BatchError: nothing to add, or a token id outside the vocabulary.
            CacheFull: not enough free cells; nothing has changed.
        """
        heal = check_bool("heal", heal)
        with self.turn:
            self._check_open()
            ids = self.to_ids(prompt)
            pending = self._state.pending.appended(ids)
            if heal and len(pending) > 1 and can_heal(self.context.model.tokenizer, ids):
                self._compute_but_last(pending)
            else:
                self._compute(pending)
        return self

    @synchronized
    def push(self, token: int) -> None:
        """Append one token as pending, not computed yet.

        Raises:
            OptionError: it is no token of the vocabulary.
        """
        self._check_open()
        token = check_range("token", token, 0, self.context.model.spec.n_vocab - 1)
        self._state = self._state._replace(pending=self._state.pending.appended([token]))

    @synchronized
    def compute_pending(self) -> None:
        """Compute pending tokens, if there are any."""
        self._check_open()
        if self._state.pending.tokens:
            self._compute(self._state.pending)

    @changing
    def fork(self) -> Sequence:
        """Make a new sequence that shares every cell with this one; no byte is copied.

        Raises:
            SequenceIdError: all ``n_seq_max`` ids are taken.
        """
        self._check_open()
        child = self.context.sequence()
        self.context.cache.seq_cp(self.seq_id, child.seq_id, -1, -1)
        child._state = self._state  # noqa: SLF001  (of the same class)
        return child

    def generate(
        self,
        max_tokens: int | None = None,
        *,
        stop: str | Iterable[str] | None = (),
        shift: ContextShift | None = None,
        options: SamplerOptions | None = None,
        sampler: Sampler | None = None,
        stop_tokens: Iterable[int] = (),
        ignore_eos: bool = False,
        grammar: Grammar | None = None,
        constraint: Constraint | None = None,
        **sampling: object,
    ) -> str:
        """Generate and return the text; see :meth:`stream` for arguments and errors."""
        asked = GenerationArguments(
            max_tokens,
            stop,
            shift,
            options,
            sampler,
            stop_tokens,
            ignore_eos,
            grammar=grammar,
            constraint=constraint,
        )
        return "".join(self._stream_text(asked, sampling))

    def stream(
        self,
        max_tokens: int | None = None,
        *,
        stop: str | Iterable[str] | None = (),
        shift: ContextShift | None = None,
        options: SamplerOptions | None = None,
        sampler: Sampler | None = None,
        stop_tokens: Iterable[int] = (),
        ignore_eos: bool = False,
        grammar: Grammar | None = None,
        constraint: Constraint | None = None,
        **sampling: object,
    ) -> Iterator[str]:
        """Generate and yield text as it comes, whole characters only.

        Generation ends at one of the model's stop tokens (which is not added), at a stop string
        (cut from the text, its tokens stay), or after ``max_tokens``; ``finish_reason`` says
        which. Every token yielded is part of the sequence, also when the caller stops early.

        Bytes at the end that are no whole character yet are part of the piece that completes them,
        in this call or a later one; ``text`` shows U+FFFD for them until then. So the pieces of
        several calls, joined, are what those of one would be. If something else is appended in
        between, such bytes stay U+FFFD in ``text`` and are no piece.

        One stream runs on a sequence at a time, until it is exhausted, closed, dropped, or ended by
        an error. Meanwhile the sequence may be edited, and forked: the next token is sampled from
        the text as it is by then.

        Args:
            max_tokens: the most tokens to generate; None or -1: until a stop or a full cache.
            stop: one or several strings to stop at. One that spells a control token stops at that
                token, which is not added.
            shift: what to discard when no cell is free or the positions reach the context's size;
                None: such a generation ends in CacheFull. Prompts are never shifted.
            options: how to sample; greedy when None.
            sampler: what samples, in place of options; its state goes on from call to call.
            stop_tokens: ids to stop at beside the model's own; the one found is not added.
            ignore_eos: never draw the model's stop tokens, and so not stop at one.
            grammar: what the text may be; the generation ends where nothing else may follow.
            constraint: says which tokens may come next, in place of a grammar. As the state of a
                sampler it moves with each token drawn, and is ahead of the text if an exception
                from outside comes between drawing a token and adding it.
            **sampling: single fields of :class:`SamplerOptions`, for example ``temperature=0.8``.

        Raises:
            OptionError: an argument outside its range, or an empty sequence.
            TokenizerError: the model has no tokenizer; nothing was sampled.
            SequenceBusy: another stream runs on this sequence.
            CacheFull: no cell for the next token; what was generated stays in the sequence.
        """
        asked = GenerationArguments(
            max_tokens,
            stop,
            shift,
            options,
            sampler,
            stop_tokens,
            ignore_eos,
            grammar=grammar,
            constraint=constraint,
        )
        return self._stream_text(asked, sampling)

    def generate_tokens(
        self,
        max_tokens: int | None = None,
        *,
        stop: str | Iterable[str] | None = (),
        shift: ContextShift | None = None,
        options: SamplerOptions | None = None,
        sampler: Sampler | None = None,
        stop_tokens: Iterable[int] = (),
        ignore_eos: bool = False,
        grammar: Grammar | None = None,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
        **sampling: object,
    ) -> Iterator[Token]:
        """Generate and yield tokens as they come; models without a tokenizer do, too.

        Texts of tokens are not cut: a generation ends with the token that completes a stop string,
        whose text may go beyond it.

        Args:
            max_tokens: this and the other arguments, and errors, are those of :meth:`stream`.
            stop: see there; needs a tokenizer.
            shift: see there.
            options: see there.
            sampler: see there.
            stop_tokens: see there.
            ignore_eos: see there.
            grammar: see there.
            constraint: see there.
            logprobs: have log-probabilities, and those of that many of the most likely tokens; None
                for neither.
            **sampling: see there.
        """
        asked = GenerationArguments(
            max_tokens,
            stop,
            shift,
            options,
            sampler,
            stop_tokens,
            ignore_eos,
            logprobs,
            grammar,
            constraint,
        )
        with self.turn:
            generation = self.begin(asked, sampling)
            return self._streaming.take(generation.run())

    def complete(
        self,
        prompt: str | Iterable[int] | None = None,
        max_tokens: int | None = None,
        *,
        stop: str | Iterable[str] | None = (),
        shift: ContextShift | None = None,
        options: SamplerOptions | None = None,
        sampler: Sampler | None = None,
        stop_tokens: Iterable[int] = (),
        ignore_eos: bool = False,
        grammar: Grammar | None = None,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
        **sampling: object,
    ) -> Result:
        """Append a prompt, generate, and return the text with all that is known about it.

        Where the cache becomes full, the result is what was generated by then, and its
        ``finish_reason`` is "cache_full".

        Args:
            prompt: appended first; None: nothing is.
            max_tokens: this and the other arguments, and errors, are those of :meth:`stream`.
            stop: see there; needs a tokenizer.
            shift: see there.
            options: see there.
            sampler: see there.
            stop_tokens: see there.
            ignore_eos: see there.
            grammar: see there.
            constraint: see there.
            logprobs: see :meth:`generate_tokens`.
            **sampling: see :meth:`stream`.

        Raises:
            CacheFull: no room for the prompt; nothing has changed.
        """
        asked = GenerationArguments(
            max_tokens,
            stop,
            shift,
            options,
            sampler,
            stop_tokens,
            ignore_eos,
            logprobs,
            grammar,
            constraint,
        )
        with self.turn:
            generation = self.begin(asked, sampling)
            start = perf_counter()
            if prompt is None:
                n_computed = 0 if self.open_token() else self.context.compute([self])[0]
            else:
                pending = self._state.pending.appended(self.to_ids(prompt))
                n_computed = len(pending)
                self._compute(pending)
            generation.computed(n_computed, len(self), perf_counter() - start)
            pieces = self._streaming.take(generation.pieces())
        text = ""
        try:
            for piece in pieces:
                text += piece
        except CacheFull:
            generation.end_full()
        return generation.result(text + generation.take_text())

    def logprobs(
        self, text: str | Iterable[int] = (), *, echo: bool = False, top: int = 0
    ) -> list[Token]:
        """Score a text that would follow: each token's log-probability. Nothing is appended.

        All its tokens are computed as a prompt is, and taken back. That needs as many free cells
        for the time. Logits are held for ``n_ubatch`` tokens at once.

        Args:
            text: text or token ids, as for :meth:`append`.
            echo: also score the sequence's own tokens, first; they are computed once more, at
                positions without gaps, which takes as long as a prompt of that length and as many
                free cells.
            top: how many of the most likely tokens to tell of each.

        Returns:
            The tokens in order. The first one of a sequence is predicted by nothing: its
            ``logprob`` is None.

        Raises:
            BatchError: a token outside the vocabulary.
            CacheFull: not enough free cells.
            NotSupported: ``echo``, and the sequence has tokens decoded from embeddings.
        """
        top = check_range("top", top, 0, MOST_LOGPROBS)
        echo = check_bool("echo", echo)
        with self.turn:
            self._check_open()
            ids, before = self.to_ids(text), self.ids()
            if echo and (before < 0).any():
                raise NotSupported("echo: tokens that were decoded from embeddings have no id")
            if echo or not len(before):
                return self._scores([*before.tolist(), *ids], [], None, top)
            return self._scores(ids, before.tolist(), self.logits if ids else None, top)

    # -- edits

    @changing
    def trim(self: S, n_tokens: int) -> S:
        """Drop the last ``n_tokens`` tokens; return the sequence itself.

        Raises:
            OptionError: it is negative or more than there are.
        """
        text = self._fetch()
        size = len(text)
        if n_tokens := check_range("n_tokens", n_tokens, 0, size):
            self._state = text.keep(size - n_tokens)
        return self

    @changing
    def remove(self: S, start: int, stop: int, *, gap: Gap = "close") -> S:
        """Remove tokens ``[start, stop)``, counted as in ``tokens``; return the sequence itself.

        Args:
            start: the first token to remove.
            stop: the first one behind it to keep.
            gap: "close" moves what follows up, its K rotated; "keep" leaves positions as they are.
                What cannot move, as behind a recurrent state, becomes pending and is recomputed.

        Raises:
            OptionError: a range outside the sequence, or one that would part grouped tokens.
            CacheFull: cells that other sequences share have to be copied to move, and there is no
                room for that. Nothing has changed.
            NotSupported: a gap is to be kept in a recurrent sequence, or tokens would have to be
                computed again that were decoded from embeddings.
        """
        text = self._fetch()
        stop = check_range("stop", stop, 0, len(text))
        start = check_range("start", start, 0, stop)
        check_choice("gap", gap, ("close", "keep"))
        if gap == "keep" and start < stop < len(text) and text.cache.has_states:
            raise NotSupported(
                'remove(…, gap="keep"): positions of a recurrent sequence follow on from each '
                'other; use gap="close"'
            )
        self._state = text.remove(start, stop, gap)
        return self

    @changing
    def shift_context(self, keep: int = 0, discard: int | None = None) -> int:
        """Discard tokens behind the first ``keep`` and move the rest up; return how many.

        Both numbers are clamped as llama.cpp's server does (:class:`ContextShift`), so that at
        least one computed token is discarded and one stays.

        Raises:
            OptionError: a negative number, or fewer than two tokens in the cache.
            CacheFull, NotSupported: as :meth:`remove`; nothing has changed.
        """
        text = self._fetch()
        start, stop = text.shift_span(ContextShift(keep, discard))
        self._state = text.remove(start, stop, "close")
        return stop - start

    @changing
    def make_room(self, shift: ContextShift, reserved: int = 0) -> None:
        """Shift the context until pending tokens fit, as :meth:`stream` does with ``shift``.

        Args:
            shift: what to discard.
            reserved: how many of the free cells are for others.

        Raises:
            CacheFull: a shift would free no cell, because others share them.
        """
        check_kind("shift", shift, ContextShift)
        cache, seq_id = self.context.cache, self.seq_id
        check_range("reserved", reserved, 0, MAX_POSITION)
        if len(self._state.pending) > cache.n_free() - reserved:
            self.context.reclaim()
        n_max = min(cache.spec.size, self.context.model.spec.n_ctx_train)
        pending, end = self._state.pending, cache.seq_pos_max(seq_id) + 1
        while len(pending) > cache.n_free() - reserved or pending.end(end) > n_max:
            text = self._fetch()
            if (span := text.span_to_discard(n_max, shift, reserved)) is None:
                break
            self._state = text.remove(*span, "close")
            pending, end = self._state.pending, cache.seq_pos_max(seq_id) + 1

    @changing
    def self_extend(self: S, group: int, width: int) -> S:
        """Share positions among tokens, so that more text fits what the model was trained for.

        In every ``width`` positions, groups of ``group`` neighbours become one, as llama.cpp's
        ``grp-attn-n`` and ``grp-attn-w`` do. Windows that are not full yet are left alone: call
        it again as the text grows. Return the sequence itself.

        Raises:
            OptionError: a number below 1, or a width that is no multiple of group.
            NotSupported: the model has states, or windows that slide.
            ShiftUnsupported, CacheFull: positions cannot be moved; nothing has changed.
        """
        self._state = self._fetch().self_extend(group, width)
        return self

    # -- files

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
        note: Mapping[str, str | int] | None = None,
    ) -> int:
        """Write the sequence to a file (``docs/format.md``); return its bytes.

        The file is written as a whole or not at all. :meth:`Context.load` goes on with it, in this
        process or another; see there how far logits are the same.

        Args:
            path: where to.
            start: the first token that is saved, counted as in ``tokens``.
            stop: the first one that is not; None: all.
            type_k: store K as another type than the cache's.
            type_v: store V as another type than the cache's.
            compress: with zstd; needs ``kvcellar[zstd]``.
            checkpoints: whether older states and windows are saved too, to go back to.
            note: what else the file shall say, for whoever reads it.

        Raises:
            OptionError: a range outside the sequence, no such type, or a note that is none.
            NotSupported: the cache has states or windows, and cannot go back to there.
            SnapshotFileError: the file cannot be written.
        """
        options, path = SaveOptions(type_k, type_v, compress, checkpoints), check_path("path", path)
        note = check_note(note)
        size = len(self)
        stop = size if stop is None else check_range("stop", stop, 0, size)
        start = check_range("start", start, 0, stop)
        self.compute_pending()
        facts = self.context.facts  # hashes a new model's weights, so arguments are checked before
        if (start, stop) == (0, size):
            snapshot = take_snapshot(facts, [self.seq_id], [self.saved_text()], options)
        else:
            text = self.saved_text()
            snapshot = take_part(facts, self.seq_id, text, self.positions, start, stop, options)
        return write_snapshot(path, replace(snapshot, note=note), compress=options.compress)

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
        """Append what a file holds to the sequence; return the sequence itself.

        Arguments and errors are those of :meth:`Context.load`, which alone takes llama.cpp's files.
        A sequence that is not empty needs a cache without states and windows, and ``positions``
        where the text would not follow on by itself. K and V stay as saved: they were computed
        without what stands before.
        """
        self._check_open()
        options, path = LoadOptions(start, stop, positions, convert), check_path("path", path)
        if is_llama_file(path):
            raise OptionError(f"{path} is a file of llama.cpp: load it with Context.load")
        snapshot = read_wanted(lambda: self.context.facts, path, options, single=True)
        self.context.put(prepare(self.context.facts, snapshot, options), [self])
        return self

    def close(self) -> None:
        """Free the cells that no other sequence shares; closing twice is fine."""
        with self.turn:
            if self.context.is_closed:
                self.held.is_closed = True
            elif not self.held.is_closed:
                self._close()

    @property
    def is_closed(self) -> bool:
        """Whether the sequence was closed."""
        return self.held.is_closed

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.held.is_closed else f"{len(self)} tokens"
        return f"<Sequence {self.seq_id}: {state}>"

    # -- former names, for one release

    @property
    def tainted(self) -> int | None:
        """Deprecated name of :attr:`inexact_from`."""
        _warn_renamed("tainted", "inexact_from")
        return self.inexact_from

    @property
    def rounded(self) -> str:
        """Deprecated name of :attr:`stored_as`."""
        _warn_renamed("rounded", "stored_as")
        return self.stored_as

    @rounded.setter
    def rounded(self, name: str) -> None:
        _warn_renamed("rounded", "stored_as")
        self.stored_as = name

    def compute_waiting(self) -> None:
        """Call :meth:`compute_pending`, by its deprecated name."""
        _warn_renamed("compute_waiting", "compute_pending")
        self.compute_pending()

    # -- what contexts and prompt caches need

    @synchronized
    def ids(self) -> Int32Array:
        """All token ids as an array, ``[n]``, which is faster than ``tokens``."""
        self._check_open()
        cached, state = self.context.cache.seq_tokens(self.seq_id), self._state
        if state.self_extended:
            cached = np.array(state.in_order(cached.tolist()), np.int32)
        return np.concatenate((cached, np.array(state.pending.tokens, np.int32)))

    def to_ids(self, prompt: str | Iterable[int]) -> list[int]:
        """Return the token ids that :meth:`append` would append."""
        last = self.tokens[-1:] if isinstance(prompt, str) else []
        return prompt_ids(self.context.model, prompt, last)

    @synchronized
    def saved_text(self) -> SavedText:
        """Return what a snapshot has to know beside what the cache holds."""
        state = self._state
        return SavedText(
            self._known_logits(),
            state.self_extended,
            state.self_extended_end,
            state.inexact_from,
            state.stored_as,
        )

    def adopt(self, saved: SavedText, n_before: int) -> None:
        """Take over what was saved, now that the cache has it behind ``n_before`` tokens."""
        check_kind("saved", saved, SavedText)
        check_range("n_before", n_before, 0, MAX_POSITION)
        cache, seq_id, state = self.context.cache, self.seq_id, self._state
        if saved.self_extended:
            before = state.in_order(cache.seq_tokens(seq_id).tolist())[:n_before]
            state = state._replace(
                self_extended=(*before, *saved.self_extended),
                self_extended_end=saved.self_extended_end,
            )
        state = state._replace(stored_as=saved.stored_as or state.stored_as)
        if cache.seq_count(seq_id) > n_before:
            logits, end = None if n_before else saved.logits, cache.seq_pos_max(seq_id) + 1
            state = state._replace(logits=logits, logits_end=end)
            if n_before:
                state = state.inexact(n_before)
            elif saved.inexact_from is not None:
                state = state.inexact(saved.inexact_from)
        self._state = state

    def begin(self, asked: GenerationArguments, sampling: dict[str, Any]) -> Generation:
        """Make a generation, if no other runs."""
        check_kind("asked", asked, GenerationArguments)
        self._check_open()
        self._streaming.require_free(self.seq_id)
        return Generation(self, asked, check_kind("sampling", sampling, dict))

    def take(self, stream: Generator[T, None, None]) -> Iterator[T]:
        """Take the sequence for a stream, which others have to wait for."""
        return self._streaming.take(stream)

    # -- steps

    def _stream_text(self, asked: GenerationArguments, sampling: dict[str, Any]) -> Iterator[str]:
        if not self.context.model.tokenizer.has_text:
            raise TokenizerError(
                "this model has no tokenizer, so there is no text to generate: "
                "generate_tokens() and complete() give token ids"
            )
        with self.turn:
            generation = self.begin(asked, sampling)
            return self._streaming.take(generation.pieces())

    def _scores(
        self, ids: list[int], before: list[int], logits: Float32Array | None, top: int
    ) -> list[Token]:
        """Score tokens behind others, and take them back; without others, behind nothing."""

        def taken_back() -> None:
            self.context.cache.changes.remember(self.held.remember())
            if not before and len(self):
                self.trim(len(self))
            raise _TakenBack(self._scored(ids, before, logits, top))

        try:
            self.context.change(taken_back)  # a change that does not happen
        except _TakenBack as done:
            return done.tokens
        return []

    def _scored(
        self, ids: list[int], before: list[int], logits: Float32Array | None, top: int
    ) -> list[Token]:
        tokenizer, result = self.context.model.tokenizer, list[Token]()
        stream = tokenizer.detokenizer()
        if tokenizer.has_text:
            stream.follow(before)
        for start in range(0, len(ids), self.context.n_ubatch):
            part = ids[start : start + self.context.n_ubatch]
            rows = self.context.decode(Batch.of(part, self.seq_id, logits="all"))
            for i, token in enumerate(part):
                known = stream.push(token) if token < tokenizer.n_vocab else ""
                made = Token(token, known if tokenizer.has_text else None)
                at = logits if i == 0 else rows[i - 1]
                result.append(made if at is None else scored(made, at, top, tokenizer))
            logits = rows[-1]
        return result

    def _fetch(self) -> CachedText:
        self._check_open()
        return CachedText(self.context.cache, self.seq_id, self._state)

    @changing
    def _close(self) -> None:
        self.context.release(self.held)

    @changing
    def _take_out_last(self) -> None:
        """Make the last token pending."""
        text = self._fetch()
        if not text.tokens:
            raise OptionError("the sequence is empty: append a prompt first")
        last = PendingTokens(text.tokens[-1:], text.positions[-1:].tolist())
        state = text.go_back(len(text.tokens) - 1)
        self._state = state._replace(pending=last.prepended(state.pending))

    @changing
    def _compute_last(self) -> Float32Array:
        return self._compute(self.to_compute())

    @changing
    def _compute(self, pending: PendingTokens) -> Float32Array:
        """Decode pending tokens; return the logits behind them."""
        self._state = self._state._replace(pending=pending)
        return self.computed(self.context.decode(self.batch(pending))[-1])

    @changing
    def _compute_but_last(self, pending: PendingTokens) -> None:
        last = len(pending) - 1
        self._compute(pending.removed(last, last + 1))
        opened = pending.tokens[last], self.context.cache.seq_pos_max(self.seq_id) + 1
        self._state = self._state._replace(pending=PendingTokens([opened[0]]), open_token=opened)

    @synchronized
    def open_token(self) -> tuple[int, Float32Array] | None:
        """Return the last token and the logits before it, if it was left open and still is."""
        self._check_open()
        state, logits = self._state, self._known_logits()
        end = self.context.cache.seq_pos_max(self.seq_id) + 1
        if state.open_token is None or logits is None or state.pending.places:
            return None
        if state.open_token != (*state.pending.tokens, end):
            return None
        return state.open_token[0], logits

    @synchronized
    def fill_open_token(self, token: int) -> None:
        """Put a token in the place of the one that is open.

        Raises:
            OptionError: it is no token of the vocabulary, or none is open.
        """
        token = check_range("token", token, 0, self.context.model.spec.n_vocab - 1)
        if self.open_token() is None:
            raise OptionError(f"token={token}: no token is open")
        self._state = self._state._replace(pending=PendingTokens([token]), open_token=None)

    def to_compute(self) -> PendingTokens:
        """Return what has to be computed for ``logits`` to be known, within a change.

        Raises:
            OptionError: the sequence is empty.
        """
        self._check_open()
        if not self._state.pending.tokens and self._known_logits() is None:
            # After an edit the last token's logits are gone: take it out and compute it again.
            self._take_out_last()
        return self._state.pending

    def batch(self, pending: PendingTokens) -> Batch:
        """Return a batch of pending tokens."""
        end = self.context.cache.seq_pos_max(self.seq_id) + 1
        positions = pending.positions(end) if pending.places else None
        return Batch.of(pending.tokens, self.seq_id, positions, logits="last")

    def computed(self, logits: Float32Array) -> Float32Array:
        """Take note, within a change, that pending tokens were decoded; return the logits."""
        end = self.context.cache.seq_pos_max(self.seq_id) + 1
        self._state = self._state._replace(
            pending=PendingTokens(), logits=logits, logits_end=end, open_token=None
        )
        return logits

    def _known_logits(self) -> Float32Array | None:
        """Return the logits behind the cached tokens, unless those have changed since."""
        state = self._state
        if (
            state.logits is None
            or state.logits_end == self.context.cache.seq_pos_max(self.seq_id) + 1
        ):
            return state.logits
        return None

    def _check_open(self) -> None:
        if self.held.is_closed:
            raise ClosedError(f"sequence {self.seq_id} is closed")


def prompt_ids(
    model: Model, prompt: str | Iterable[int], before: Collection[int] = ()
) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        model: whose.
        prompt: text, or ids.
        before: the last token that it follows. None: text gets what begins one.

    Raises:
        BatchError: it is neither text nor a flat list of integers.
    """
    if isinstance(prompt, str):
        tokenizer, last = model.tokenizer, list(before)
        goes_on = tokenizer.ends_in_text(last)
        return tokenizer.encode(prompt, add_special=not last, continuing=goes_on)
    if not isinstance(prompt, Iterable):
        raise BatchError(f"prompt {shown(prompt)}: give text, or a list of token ids")
    return check_integers("prompt", prompt, BatchError)


def _warn_renamed(former: str, name: str) -> None:
    what = f"Sequence.{former} is now Sequence.{name}; the former name goes with the next release"
    warnings.warn(what, DeprecationWarning, stacklevel=3)
