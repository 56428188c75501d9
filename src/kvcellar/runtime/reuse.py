"""What a cache of prompts says of a text: how much was reused, and why not more."""

from __future__ import annotations

from dataclasses import dataclass

from kvcellar.snapshot.absence import Absence


@dataclass(frozen=True, slots=True)
class Reuse:
    """How much of a text did not have to be computed.

    Attributes:
        n_tokens: how many tokens it has.
        n_reused: how many of them were restored.
        why: why not more; None: nothing was asked of the store.
    """

    n_tokens: int
    n_reused: int
    why: Absence | None = None

    def __str__(self) -> str:
        reason = "" if self.why is None else f": {self.why}"
        return f"{self.n_reused} of {self.n_tokens} tokens reused{reason}"
