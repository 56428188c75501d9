"""A snapshot as a value: what sequences hold, what they are, and of which model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcellar.cache.content import CacheContent
from kvcellar.snapshot.fingerprint import Plain
from kvcellar.types import Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class SavedText:
    """What is known of a sequence beside what the cache holds.

    Attributes:
        logits: those of the next token, ``[n_vocab]``; None: they have to be computed again.
        grouped: the first tokens in the order of the text, where positions were divided.
        grouped_end: the position that they end before.
        tainted: the first token whose K and V are not what a fresh decode of the text would give,
            because something before it was removed or is elsewhere; None: there is none.
        rounded: the digest of a fingerprint in whose types K and V once were, if that was not how
            they are stored here; else "".
    """

    logits: Float32Array | None = None
    grouped: tuple[int, ...] = ()
    grouped_end: int = 0
    tainted: int | None = None
    rounded: str = ""

    def part(self, start: int, stop: int, size: int, end: int) -> SavedText:
        """What is known of tokens ``[start, stop)`` by themselves.

        Args:
            start: the first of them.
            stop: the first one behind them.
            size: how many tokens there are in all.
            end: the position behind their last one.
        """
        tainted = self.tainted if self.tainted is not None and self.tainted < stop else None
        if start:
            tainted = 0  # what stood before is missing
        return SavedText(
            self.logits if stop == size > start else None,
            self.grouped[start:stop],
            min(self.grouped_end, end),
            None if start == stop else tainted,
            self.rounded,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What one or several sequences held.

    Attributes:
        fingerprint: of the context that they were in, and how rows are stored here.
        content: what the cache held.
        texts: what else is known of each of them.
        note: whatever whoever saved it wanted to say, for people.
    """

    fingerprint: Mapping[str, Plain]
    content: CacheContent
    texts: tuple[SavedText, ...]
    note: Mapping[str, str | int] = field(default_factory=dict)
