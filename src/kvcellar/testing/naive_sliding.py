"""What a cache of a window must be able to show, as plainly as it can be written.

Sequences are whole texts: lists of tokens that are never forgotten. What a cache holds is asked of
it, as a set of positions; whether that is enough is a loop over the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class NaiveEntry:
    """A token of a text; ``content`` stands for its K and V."""

    pos: int
    token: int
    content: int


class NaiveTexts:
    """The texts of some sequences, seen through a window."""

    def __init__(self, window: int, n_seq: int) -> None:
        self.window = window
        self.texts: list[list[NaiveEntry]] = [[] for _ in range(n_seq)]

    def copy(self) -> NaiveTexts:
        """An independent copy."""
        other = NaiveTexts(self.window, 0)
        other.texts = [list(text) for text in self.texts]
        return other

    # -- questions

    def end(self, seq: int) -> int:
        """Where the next token of a sequence stands."""
        return max((entry.pos for entry in self.texts[seq]), default=-1) + 1

    def seen(self, owners: Iterable[int], pos: int) -> list[int]:
        """The contents that a token of these sequences attends to."""
        entries = {entry for seq in owners for entry in self.texts[seq]}
        return sorted(e.content for e in entries if pos - self.window < e.pos <= pos)

    def is_enough(self, text: list[NaiveEntry], held: Collection[NaiveEntry]) -> bool:
        """Whether a text can be decoded on if only these of its tokens are held: its end is."""
        if not text:
            return True
        next_pos = max(entry.pos for entry in text) + 1
        needed = [entry for entry in text if entry.pos > next_pos - self.window]
        n_gone = sum(entry not in held for entry in text)
        return n_gone < len(text) and all(e in held for e in [*text[n_gone:], *needed])

    def can_lose(self, seq: int, held: Collection[int], p0: int, p1: int) -> bool:
        """Whether it can without the range, the gap being closed; held: its positions."""
        text = self.texts[seq]
        left = [entry for entry in text if not p0 <= entry.pos < p1]
        shift = p1 - p0 if p1 < self.end(seq) else 0
        moved = [replace(e, pos=e.pos - shift * (e.pos >= p1)) for e in left]
        kept = [m for m, e in zip(moved, left, strict=True) if e.pos in held]
        return self.is_enough(moved, kept)

    # -- verbs

    def remove(self, seq: int, p0: int, p1: int) -> None:
        """Drop a range."""
        self.texts[seq] = [e for e in self.texts[seq] if not p0 <= e.pos < p1]

    def joined(self, src: int, dst: int, p0: int, p1: int) -> list[NaiveEntry]:
        """Dst's text once it has src's tokens in the range in place of its own."""
        outside = [e for e in self.texts[dst] if not p0 <= e.pos < p1]
        inside = [e for e in self.texts[src] if p0 <= e.pos < p1]
        return sorted(outside + inside, key=lambda entry: entry.pos)

    def moved(self, seq: int, move: Callable[[int], int]) -> list[NaiveEntry]:
        """A text at other positions; those below 0 are gone."""
        entries = [replace(entry, pos=move(entry.pos)) for entry in self.texts[seq]]
        return [entry for entry in entries if entry.pos >= 0]
