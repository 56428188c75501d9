"""Tokens of a sequence that wait to be computed, and where they will stand.

Those that were computed before, until an edit took their cells or their state back, know their
positions. They come first; what follows, sampled or typed, follows on.
"""

from __future__ import annotations

from collections.abc import Iterable


class Waiting:
    """Tokens to compute, in order; the first ``len(places)`` of them stood somewhere before."""

    def __init__(self, tokens: Iterable[int] = (), places: Iterable[int] = ()) -> None:
        self.tokens = list(tokens)
        self.places = list(places)

    def __len__(self) -> int:
        return len(self.tokens)

    def positions(self, end: int) -> list[int]:
        """Where each will stand, behind a text that ends before ``end``.

        They rise: of tokens that shared a position, each gets its own.
        """
        result: list[int] = []
        for i in range(len(self.tokens)):
            end = max(end, self.places[i]) if i < len(self.places) else end
            result.append(end)
            end += 1
        return result

    def end(self, start: int) -> int:
        """The position behind the last one, if the text before them ends before ``start``."""
        return (self.positions(start) or [start - 1])[-1] + 1

    def then(self, tokens: Iterable[int]) -> Waiting:
        """These, followed by new ones."""
        return Waiting([*self.tokens, *tokens], self.places)

    def after(self, again: Waiting) -> Waiting:
        """These, behind others that were all computed before."""
        return Waiting([*again.tokens, *self.tokens], [*again.places, *self.places])

    def without(self, start: int, stop: int, gap: int = 0) -> Waiting:
        """These without ``[start, stop)``; what stood behind moves up by ``gap`` positions."""
        places = [*self.places[:start], *(place - gap for place in self.places[stop:])]
        return Waiting([*self.tokens[:start], *self.tokens[stop:]], places)
