"""Where a generation stops: strings in its text, and tokens.

Invariants of :class:`StopMatcher`, however the text is cut into parts:

1. What was returned, joined, is the text before the first place where a stop string begins; the
   whole text where none occurs.
2. Text is held back only while it may still be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcellar.errors import OptionError, TokenizerError, check_integers, check_range, shown
from kvcellar.text.tokenizer import Tokenizer


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


def checked_stops(stop: object) -> tuple[str, ...]:
    """Return the stop strings that an argument names; None is none of them.

    Raises:
        OptionError: an empty one, or something that is neither a string nor a list of them.
    """
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (_checked_stop(stop),)
    if not isinstance(stop, Iterable):
        raise OptionError(f"stop must be a string or a list of strings, found {shown(stop)}")
    return tuple(_checked_stop(one) for one in stop)


def checked_stop_tokens(tokens: object, n_vocab: int) -> frozenset[int]:
    """Return the ids that an argument names; None is none of them.

    Raises:
        OptionError: one that is no token of the vocabulary.
    """
    ids = () if tokens is None else check_integers("stop_tokens", tokens)
    return frozenset(check_range("a stop token", token, 0, n_vocab - 1) for token in ids)


def control_stop_ids(tokenizer: Tokenizer, stops: Iterable[str]) -> frozenset[int]:
    """Return the control tokens that stop strings spell; text leaves them out, so none is found."""
    found = set()
    for stop in stops:
        try:
            ids = tokenizer.encode(stop, add_special=False, parse_special=True, continuing=True)
        except TokenizerError:  # the vocabulary cannot spell it
            continue
        if len(ids) == 1 and tokenizer.is_special(ids[0]) and tokenizer.is_matched_whole(ids[0]):
            found.add(ids[0])
    return frozenset(found)
