"""The loop that turns logits into text: sample, detokenise, look for a stop, go on.

Stop strings over text that arrives in parts.

Invariants, however the text is cut into parts:

1. What was returned, joined, is the text before the first place where a stop string begins; the
   whole text where none occurs.
2. Text is held back only while it may still be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from kvcellar.errors import OptionError, check_range
from kvcellar.runtime.options import ContextShift
from kvcellar.text.sampler import Sampler, SamplerOptions

if TYPE_CHECKING:
    from kvcellar.runtime.sequence import Sequence


class StopMatcher:
    """Watches for the first of several stop strings.

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
            raise OptionError(f"stop must be a string or a list of strings, found {stops!r}")
        self._stops = [_Stop(text) for text in dict.fromkeys(map(_checked_stop, stops))]
        self._held = ""
        self._end = 0  # position of the text seen so far, and of the end of what is held
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next part; returns what may be shown, and whether generation has to stop."""
        if self.stopped:
            return "", True
        if not self._stops:
            return text, False
        start = self._end
        self._held += text
        for i, letter in enumerate(text, start + 1):
            for stop in self._stops:
                stop.advance(letter, i)
            if self._decide(i):
                break
        self._end = start + len(text)
        return self._release(), self.stopped

    def finish(self) -> str:
        """The text ends here: what was held back, up to a stop string if one is complete."""
        if self.stopped:
            return ""
        found = [stop.found for stop in self._stops if stop.found is not None]
        held, self._held = self._held, ""
        begin = self._end - len(held)
        self.stopped = bool(found)
        return held[: min(found) - begin] if found else held

    def _decide(self, position: int) -> bool:
        """Whether some match is complete and none that begins before it is still possible."""
        found = [stop.found for stop in self._stops if stop.found is not None]
        if found and all(stop.begin(position) >= min(found) for stop in self._stops):
            self.stopped = True
        return self.stopped

    def _release(self) -> str:
        begin = self._end - len(self._held)
        border = min(stop.begin(self._end) for stop in self._stops)
        shown, self._held = self._held[: border - begin], self._held[border - begin :]
        if self.stopped:
            found = min(stop.found for stop in self._stops if stop.found is not None)
            shown, self._held = (shown + self._held)[: found - begin], ""
        return shown


class _Stop:
    """One stop string: how much of it the text so far ends in (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._fallback = _fallbacks(text)
        self._matched = 0
        self.found: int | None = None

    def advance(self, letter: str, position: int) -> None:
        """Take the letter that ends at this position; only the first match counts."""
        if self.found is not None:
            return
        while self._matched and self._text[self._matched] != letter:
            self._matched = self._fallback[self._matched - 1]
        if self._text[self._matched] == letter:
            self._matched += 1
        if self._matched == len(self._text):
            self.found = position - self._matched

    def begin(self, position: int) -> int:
        """Where the match begins that is found or may still come; the position if there is none."""
        return position - self._matched if self.found is None else self.found


def _checked_stop(text: object) -> str:
    if not isinstance(text, str) or not text:
        raise OptionError(f"a stop string must be a non-empty str, found {text!r}")
    return text


def _fallbacks(text: str) -> list[int]:
    """For each beginning of the text, the longest shorter one that it ends in."""
    table = [0] * len(text)
    matched = 0
    for i in range(1, len(text)):
        while matched and text[matched] != text[i]:
            matched = table[matched - 1]
        matched += text[matched] == text[i]
        table[i] = matched
    return table


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

FinishReason = Literal["length", "stop_token", "stop_string"]
"""Why a generation ended."""


class Generation:
    """One run of text generated onto a sequence; iterate it once.

    Options are checked when it is made, before anything is computed.
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
        self._sample = self._timed("sampling", Sampler(merge_options(options, sampling)).sample)
        self._tokenizer = sequence.context.model.tokenizer
        self._history = sequence.tokens
        sequence.finish_reason = None

    def __iter__(self) -> Iterator[str]:
        """The text, in pieces of whole characters."""
        detokenizer = self._tokenizer.detokenizer(continuing=True)
        detokenize = self._timed("detokenising", detokenizer.push)
        for token in self._tokens():
            text, stopped = self._matcher.push(detokenize(token))
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

    def _tokens(self) -> Iterator[int]:
        sequence, stops = self._sequence, self._tokenizer.stop_ids
        n_generated = 0
        while self._limit is None or n_generated < self._limit:
            if self._shift is not None:
                sequence.make_room(self._shift)
            token = self._sample(sequence.logits, self._history)
            if token in stops:
                sequence.finish_reason = "stop_token"
                return
            sequence.push(token)
            self._history.append(token)
            n_generated += 1
            yield token
        sequence.finish_reason = "length"

    def _timed(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        return function if self._profile is None else self._profile.timed(part, function)


def merge_options(options: SamplerOptions | None, sampling: dict[str, Any]) -> SamplerOptions:
    """The options with single fields replaced; greedy is the default.

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
    raise OptionError(f"{name} must be None or made by {kind.__name__}(...), found {value!r:.60}")
