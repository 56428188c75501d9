"""The loop that turns logits into tokens: sample, detokenise, look for a stop, go on.

A step is one call for other threads. It samples from the text as it is then, so a text may be
edited while a stream runs on it. What a token adds to the text is told from the tokens before it
(:meth:`Detokenizer.follow`), so nothing has to be kept between calls, or put back by an edit, a
fork or a rollback:

1. A token's piece is what the text gains by it, less the bytes at the end of a text that are no
   whole character yet: those are part of the piece of the token that completes them or after which
   nothing can. So the pieces of a generation, split into calls in whatever way, joined, are what
   the text gained, less such bytes at its end.
2. Nothing is a piece but what tokens that were generated add: bytes that wait when something else
   is appended turn into U+FFFD in the text, and no piece tells.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, fields, replace
from inspect import GEN_CLOSED, getgeneratorstate
from math import log
from time import perf_counter
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import ReferenceType, ref

import numpy as np

from kvcellar.errors import OptionError, SequenceBusy, check_bool, check_range, shown
from kvcellar.runtime.options import ContextShift
from kvcellar.runtime.results import (
    CacheReport,
    FinishReason,
    GenerationTimings,
    Result,
    Token,
    scored,
)
from kvcellar.runtime.stopping import (
    StopMatcher,
    checked_stop_tokens,
    checked_stops,
    control_stop_ids,
)
from kvcellar.text.constraint import Constraint
from kvcellar.text.grammar import Grammar
from kvcellar.text.healing import beginning_with
from kvcellar.text.sampler import Sampler, SamplerOptions
from kvcellar.text.tokenizer import Tokenizer
from kvcellar.types import Float32Array, Int32Array

if TYPE_CHECKING:
    from kvcellar.runtime.sequence import Sequence


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

MOST_TOKENS = 2**31 - 1
MOST_LOGPROBS = 2**20


@dataclass(slots=True)
class GenerationArguments:
    """What was asked for, checked for one sequence when a :class:`Generation` is made.

    :meth:`Sequence.stream` says what each means.
    """

    max_tokens: int | None = None
    stop: object = ()
    shift: ContextShift | None = None
    options: SamplerOptions | None = None
    sampler: Sampler | None = None
    stop_tokens: object = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None
    constraint: Constraint | None = None


class Generation:
    """One run of tokens generated onto a sequence; iterate it once, or step through it.

    All is checked when it is made, before anything is computed.

    Attributes:
        sequence: what it is generated onto.
        tokens: what was generated.
        finish_reason: why it ended; None: it has not.
        seed: of its random numbers.
    """

    def __init__(
        self, sequence: Sequence, asked: GenerationArguments, sampling: dict[str, Any]
    ) -> None:
        self.sequence = sequence
        model = sequence.context.model
        self._tokenizer = model.tokenizer
        self._limit = checked_limit(asked.max_tokens)
        stops = checked_stops(asked.stop)
        self._matcher = StopMatcher(stops)
        self._shift = _checked("shift", asked.shift, ContextShift)
        n_vocab = model.spec.n_vocab
        self._stop_ids = checked_stop_tokens(asked.stop_tokens, n_vocab)
        self._stop_string_ids: frozenset[int] = frozenset()
        self._banned: list[int] = []
        if check_bool("ignore_eos", asked.ignore_eos):
            self._banned = sorted(self._tokenizer.stop_ids)
        else:
            self._stop_ids |= self._tokenizer.stop_ids
        self._n_top = asked.logprobs
        if self._n_top is not None:
            self._n_top = check_range("logprobs", self._n_top, 0, MOST_LOGPROBS)
        self._sampler = _sampler(asked, sampling, self._tokenizer)
        self.seed = self._sampler.seed
        if self._tokenizer.has_text:
            self._stop_string_ids = control_stop_ids(self._tokenizer, stops)
            self._detokenizer = self._tokenizer.detokenizer()
        elif stops:
            raise OptionError(
                "stop: this model has no tokenizer, so there is no text to stop at; use stop_tokens"
            )
        self._profile = sequence.context.profile
        self._sample = self._timed("sampling", self._sampler.sample)
        self._detokenize = self._timed("detokenising", self._piece)
        self.tokens: list[Token] = []
        self.finish_reason: FinishReason | None = None
        self._shown: list[str] = []
        self._n_prompt, self._n_computed = len(sequence), 0
        self._prompt_seconds = 0.0
        self._begin = self._end_time = perf_counter()
        self._n_discarded = 0
        sequence.finish_reason = None
        if self._limit == 0:
            self._end("length")

    def run(self) -> Generator[Token, None, None]:
        """Yield the tokens."""
        while (token := self.step()) is not None:
            yield token

    def pieces(self) -> Generator[str, None, None]:
        """Yield the text up to a stop string, in pieces of whole characters."""
        for _ in self.run():
            if text := self.take_text():
                yield text
        if text := self.take_text():
            yield text

    def step(self) -> Token | None:
        """Generate a token; None: it has ended.

        Raises:
            CacheFull: no cell for the token before; nothing is lost, and it can be tried again.
        """
        token = None
        if self.finish_reason is None:
            with self.sequence.turn:
                token = self._step()
        if token is None:
            self.publish()
        return token

    def publish(self) -> None:
        """Set the finish reason of the sequence."""
        self.sequence.finish_reason = self.finish_reason

    def make_room(self, reserved: int = 0) -> None:
        """Shift the context if that was asked for and has to be.

        Args:
            reserved: how many of the free cells are for others.

        Raises:
            CacheFull: that would free no cell.
        """
        if self._shift is not None:
            before = len(self.sequence)
            self.sequence.make_room(self._shift, reserved)
            self._n_discarded += before - len(self.sequence)

    def computed(self, n_tokens: int, n_prompt: int, seconds: float) -> None:
        """Note that the prompt has been computed.

        Args:
            n_tokens: how many of its tokens were.
            n_prompt: how many it has.
            seconds: how long that took.
        """
        self._n_computed, self._n_prompt, self._prompt_seconds = n_tokens, n_prompt, seconds
        self._begin = perf_counter()
        self._end_time = max(self._begin, self._end_time)

    def end_full(self) -> None:
        """End because no cell is free; what was generated stays."""
        self._end("cache_full")
        self.publish()

    def take_text(self) -> str:
        """Return the text that can be shown and was not taken yet."""
        text = "".join(self._shown)
        self._shown.clear()
        return text

    def result(self, text: str) -> Result:
        """Return what it gave, once it has ended, with the text that was taken."""
        tokens = tuple(self.tokens)
        seconds = self._end_time - self._begin
        return Result(
            text if self._tokenizer.has_text else None,
            tuple(token.id for token in tokens),
            self.finish_reason or "length",
            self.seed,
            GenerationTimings(self._n_computed, self._prompt_seconds, len(tokens), seconds),
            CacheReport(self._n_prompt, self._n_computed),
            None if self._n_top is None else tokens,
        )

    # -- steps

    def _step(self) -> Token | None:
        """Sample a token and add it to the sequence, unless it is one to stop at."""
        sequence = self.sequence
        self.make_room()
        opened = self._open_token()
        if opened is None:
            logits, history = sequence.logits, sequence.ids()
            allowed = self._allowed(logits)
        else:
            logits, history = opened[1], sequence.ids()[:-1]
            allowed = self._continuing(*opened)
        known: Any = history  # to a sampler an array is a sequence, too
        n_prompt = max(0, len(history) - len(self.tokens))
        place = len(history) + self._n_discarded  # no random number is used twice
        drawn_from = None
        if self._n_top is not None:
            drawn_from = self._sampler.distribution(
                allowed, known, n_prompt=n_prompt, position=place
            )
        chosen = self._sample(allowed, known, n_prompt=n_prompt, position=place)
        if chosen in self._stop_ids:
            self._end("stop_token")
            return None
        if chosen in self._stop_string_ids:
            self._end("stop_string")
            return None
        token = Token(chosen, self._detokenize(chosen, history))
        if opened is not None:
            there = self._piece(opened[0], history) or ""
            token = token._replace(text=(token.text or "").removeprefix(there))
        if self._n_top is not None and drawn_from is not None:
            token = scored(token, logits, self._n_top, self._tokenizer)
            share = float(drawn_from[1][drawn_from[0] == chosen].sum())
            token = token._replace(sampled_logprob=log(share) if share else float("-inf"))
        if opened is None:
            sequence.push(chosen)
        else:
            sequence.fill_open_token(chosen)
        self.tokens.append(token)
        shown, stopped = self._matcher.push(token.text or "")
        self._shown.append(shown)
        constraint = self._sampler.constraint
        if stopped:
            self._end("stop_string")
        elif constraint is not None and getattr(constraint, "is_finished", False):
            self._end("constraint")
        elif len(self.tokens) == self._limit:
            self._end("length")
        return token

    def _allowed(self, logits: Float32Array) -> Float32Array:
        """Return the logits without the tokens that end a text, if those are to be ignored."""
        if not self._banned:
            return logits
        allowed: Float32Array = logits.copy()
        allowed[self._banned] = -np.inf
        return allowed

    def _open_token(self) -> tuple[int, Float32Array] | None:
        if self.tokens or self._sampler.constraint is not None:
            return None
        return self.sequence.open_token()

    def _continuing(self, token: int, logits: Float32Array) -> Float32Array:
        """Return the logits of tokens that begin with the text of one, which they replace."""
        allowed: Float32Array = logits.copy()
        text = self._tokenizer.token_bytes(token)
        allowed[~beginning_with(self._tokenizer, text)] = -np.inf
        return allowed

    def _piece(self, token: int, history: Int32Array) -> str | None:
        """Return what a token adds; one that the vocabulary lacks raises and is not added."""
        if not self._tokenizer.has_text:
            return None
        self._detokenizer.follow(history)
        return self._detokenizer.push(token)

    def _end(self, reason: FinishReason) -> None:
        """End; what was held back may be shown, up to a stop string that is complete."""
        self._end_time = perf_counter()
        self._shown.append(self._matcher.finish())
        self.finish_reason = "stop_string" if self._matcher.stopped else reason

    def _timed(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        return function if self._profile is None else self._profile.timed(part, function)


class StreamSlot:
    """Which stream runs on a sequence, without keeping it alive.

    A stream runs from when it is made until it is exhausted, closed, ended by an error or dropped.
    """

    def __init__(self) -> None:
        self._stream: ReferenceType[Generator[Any, None, None]] | None = None

    @property
    def is_taken(self) -> bool:
        """Whether a stream runs."""
        stream = None if self._stream is None else self._stream()
        return stream is not None and getgeneratorstate(stream) != GEN_CLOSED

    def require_free(self, seq_id: int) -> None:
        """Raise SequenceBusy if a stream runs that something can still reach."""
        if self.is_taken:
            gc.collect()  # it may have been dropped within a circle of references
        if self.is_taken:
            raise SequenceBusy(
                f"a stream runs on sequence {seq_id}: exhaust it or close() it first, "
                "or stream from a fork()"
            )

    def take(self, stream: Generator[T, None, None]) -> Iterator[T]:
        """Let a stream be the one that runs; return it."""
        self._stream = ref(stream)
        return stream


def checked_limit(max_tokens: int | None) -> int | None:
    """Return how many tokens to generate at most; None, as -1: no limit.

    Raises:
        OptionError: it is outside its range.
    """
    if max_tokens is None:
        return None
    try:
        limit = check_range("max_tokens", max_tokens, -1, MOST_TOKENS)
    except OptionError:
        raise OptionError(
            f"max_tokens={shown(max_tokens)}: must be None or -1 (no limit), or an integer in "
            f"[0, {MOST_TOKENS}]"
        ) from None
    return None if limit == -1 else limit


def _sampler(asked: GenerationArguments, sampling: dict[str, Any], tokenizer: Tokenizer) -> Sampler:
    """Return the sampler that was handed over, or one with the options."""
    sampler = _checked("sampler", asked.sampler, Sampler)
    grammar = _checked("grammar", asked.grammar, Grammar)
    if sampler is not None:
        if asked.options is not None or sampling:
            raise OptionError("sampler: it has options of its own, so give it or options, not both")
        if grammar is not None or asked.constraint is not None:
            raise OptionError("sampler: it has a constraint of its own; make it with that one")
        return sampler
    chosen, constraint = merge_options(asked.options, sampling), asked.constraint
    if grammar is not None:
        if constraint is not None:
            raise OptionError("grammar and constraint: give one of them")
        constraint = grammar.matcher(tokenizer)
    return Sampler(
        chosen, constraint=constraint, tokenizer=tokenizer if tokenizer.has_text else None
    )


def merge_options(options: SamplerOptions | None, sampling: dict[str, Any]) -> SamplerOptions:
    """Return the options with single fields replaced; greedy is the default.

    Raises:
        OptionError: no such option, or a value outside its range.
    """
    base = _checked("options", options, SamplerOptions) or SamplerOptions(temperature=0.0)
    known = [field.name for field in fields(SamplerOptions)]
    for name in sampling:
        if name not in known:
            raise OptionError(f"unknown sampling option {name!r}: known are {', '.join(known)}")
    return replace(base, **sampling)


def _checked(name: str, value: T | None, kind: type[T]) -> T | None:
    if value is None or isinstance(value, kind):
        return value
    raise OptionError(f"{name} must be None or made by {kind.__name__}(...), found {shown(value)}")
