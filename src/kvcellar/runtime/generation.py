"""The loop that turns logits into text: sample, detokenise, look for a stop, go on.

A step is one call for other threads. It samples from the text as it is then, so a text may be
edited while a stream runs on it.

Invariants of :class:`StopMatcher`, however the text is cut into parts:

1. What was returned, joined, is the text before the first place where a stop string begins; the
   whole text where none occurs.
2. Text is held back only while it may still be the beginning of a stop string.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import fields, replace
from inspect import GEN_CLOSED, getgeneratorstate
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar
from weakref import ReferenceType, ref

from kvcellar.errors import OptionError, SequenceBusy, TokenizerError, check_range, shown
from kvcellar.runtime.options import ContextShift
from kvcellar.text.sampler import Sampler, SamplerOptions

if TYPE_CHECKING:
    from kvcellar.runtime.sequence import Sequence


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

FinishReason = Literal["length", "stop_token", "stop_string"]
"""Why a generation ended."""


class Generation:
    """One run of text generated onto a sequence; iterate it once.

    Options, and whether the model has text at all, are checked when it is made, before anything is
    computed.
    """

    def __init__(
        self,
        sequence: Sequence,
        max_tokens: int | None,
        stop: str | Iterable[str],
        shift: ContextShift | None,
        options: SamplerOptions | None,
        sampling: dict[str, Any],
    ) -> None:
        self._sequence = sequence
        self._limit = (
            None if max_tokens is None else check_range("max_tokens", max_tokens, 0, 2**31 - 1)
        )
        self._matcher = StopMatcher([stop] if isinstance(stop, str) else stop)
        self._shift = _checked("shift", shift, ContextShift)
        self._profile = sequence.context.profile
        chosen = merge_options(options, sampling)
        self._looks_back = chosen.uses_history
        self._tokenizer = sequence.context.model.tokenizer
        sampler = Sampler(chosen, tokenizer=self._tokenizer)
        self._sample = self._timed("sampling", sampler.sample)
        if not self._tokenizer.has_text:
            raise TokenizerError(
                "this model has no tokenizer, so there is no text to generate; choose token ids: "
                "token = kvcellar.text.sampler.Sampler(options).sample(sequence.logits), then "
                "sequence.append([token])"
            )
        sequence.finish_reason = None

    def __iter__(self) -> Generator[str, None, None]:
        """Yield the text, in pieces of whole characters."""
        detokenizer = self._tokenizer.detokenizer(continuing=True)
        for piece in self._pieces(self._timed("detokenising", detokenizer.push)):
            text, stopped = self._matcher.push(piece)
            if text:
                yield text
            if stopped:
                self._sequence.finish_reason = "stop_string"
                return
        text, stopped = self._matcher.push(detokenizer.finish())
        if stopped:
            self._sequence.finish_reason = "stop_string"
        rest = text if stopped else text + self._matcher.finish()
        if rest:
            yield rest

    def _pieces(self, detokenize: Callable[[int], str]) -> Iterator[str]:
        """Yield what each new token adds to the text, which may be nothing yet."""
        n_generated = 0
        while self._limit is None or n_generated < self._limit:
            with self._sequence.turn:
                piece = self._step(detokenize)
            if piece is None:
                self._sequence.finish_reason = "stop_token"
                return
            n_generated += 1
            yield piece
        self._sequence.finish_reason = "length"

    def _step(self, detokenize: Callable[[int], str]) -> str | None:
        """Sample a token and add it to the sequence, unless it is one to stop at (None)."""
        sequence = self._sequence
        if self._shift is not None:
            sequence.make_room(self._shift)
        token = self._sample(sequence.logits, sequence.tokens if self._looks_back else ())
        if token in self._tokenizer.stop_ids:
            return None
        piece = detokenize(token)  # a token that the vocabulary lacks is not added
        sequence.push(token)
        return piece

    def _timed(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        return function if self._profile is None else self._profile.timed(part, function)


class StreamSlot:
    """Which stream runs on a sequence, without keeping it alive.

    A stream runs from when it is made until it is exhausted, closed, ended by an error or dropped.
    """

    def __init__(self) -> None:
        self._stream: ReferenceType[Generator[str, None, None]] | None = None

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

    def take(self, stream: Generator[str, None, None]) -> Iterator[str]:
        """Let a stream be the one that runs; return it."""
        self._stream = ref(stream)
        return stream


class StopMatcher:
    """Watch text that arrives in parts for the first of several stop strings.

    Args:
        stops: the strings; none of them empty.

    Raises:
        OptionError: an empty stop string, one that is no string, or no list of them.

    Attributes:
        stopped: a stop string was found; further text is ignored.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        if isinstance(stops, str):
            raise OptionError(f"stop must be a list of strings, found the string {stops!r}")
        if not isinstance(stops, Iterable):
            raise OptionError(f"stop must be a string or a list of strings, found {shown(stops)}")
        self._stops = [_checked_stop(stop) for stop in stops]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next part; return what may be shown, and whether generation has to stop."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text, self.stopped
        text = self._held + text
        found = self._found(text)
        opened = min(_beginning_at(text, stop) for stop in self._stops)
        self.stopped = found < len(text) and found <= opened  # else an earlier one may still come
        end = min(found, opened)
        self._held = "" if self.stopped else text[end:]
        return text[:end], self.stopped

    def finish(self) -> str:
        """End the text: return what was held back, up to a stop string if one is complete."""
        held, self._held = self._held, ""
        found = self._found(held)
        self.stopped |= found < len(held)
        return held[:found]

    def _found(self, text: str) -> int:
        """Return where the first stop string begins that is complete, the length if none is."""
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        return min(places, default=len(text))


def _checked_stop(stop: object) -> str:
    if not isinstance(stop, str) or not stop:
        raise OptionError(f"a stop string must be a non-empty str, found {shown(stop)}")
    return stop


def _beginning_at(text: str, stop: str) -> int:
    """Return where the text ends in a beginning of the stop string, its length if it does not."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return start
        start += 1
    return len(text)


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
