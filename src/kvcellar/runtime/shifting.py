"""Context shift: which tokens go when there is no room, as numbers; nothing here touches a cell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcellar.errors import OptionError
from kvcellar.runtime.options import check_range
from kvcellar.types import MAX_POSITION, Int32Array

_ROOM = 4  # cells that llama.cpp's server never lets ``keep`` claim


@dataclass(frozen=True, slots=True)
class ContextShift:
    """What to give up when a text has no more room: tokens behind the first ``keep``.

    Attributes:
        keep: how many tokens at the start stay, for example those of a system prompt; clamped so
            that a few cells are left for the rest.
        discard: how many tokens behind them go, at least one and never all; None: half of them.

    Raises:
        OptionError: one of them is outside its range.
    """

    keep: int = 0
    discard: int | None = None

    def __post_init__(self) -> None:
        check_range("keep", self.keep, 0, MAX_POSITION)
        if self.discard is not None:
            check_range("discard", self.discard, 1, MAX_POSITION)

    def clamped(self, n_tokens: int, n_ctx: int) -> tuple[int, int]:
        """Which of the tokens go, as a range; clamped as llama.cpp's server does.

        Raises:
            OptionError: there are fewer than two tokens.
        """
        if n_tokens < 2:
            raise OptionError(f"a context shift needs 2 tokens in the cache, there is {n_tokens}")
        keep = max(0, min(self.keep, n_ctx - _ROOM, n_tokens - 2))
        n_left = n_tokens - keep
        discard = n_left // 2 if self.discard is None else self.discard
        return keep, keep + min(discard, n_left - 1)

    def span(self, positions: Int32Array, n_ctx: int) -> tuple[int, int]:
        """As :meth:`clamped`, for tokens at ascending positions: those that share one go together.

        Raises:
            OptionError: nothing could go, or nothing would be left.
        """
        n = len(positions)
        keep, stop = self.clamped(n, n_ctx)
        cuts = np.append(np.flatnonzero(np.diff(positions, prepend=-1)), n)
        first = int(np.searchsorted(cuts, keep))
        last = int(np.searchsorted(cuts, stop, side="right")) - 1
        last = max(last, first + 1)  # one that is larger than what was to go
        if last >= len(cuts) - 1:
            raise OptionError("nothing can be discarded: what follows keep shares one position")
        return int(cuts[first]), int(cuts[last])
