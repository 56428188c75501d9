"""Generated text on its way to stdout.

What a model writes must not drive a terminal: control characters are dropped there. A file or a
pipe gets the text as it is.
"""

from __future__ import annotations

import sys
from time import perf_counter

from kvcellar.cli.console import harmless


class Output:
    """Writes pieces of text as they come, and knows when the first one came.

    Attributes:
        seconds_to_first: from the making of this object to the first text; None before.
    """

    def __init__(self) -> None:
        self._start = perf_counter()
        self._last = ""
        self._for_terminal = sys.stdout.isatty()
        self.seconds_to_first: float | None = None

    def write(self, text: str) -> None:
        """Write a piece and let it be seen."""
        if self.seconds_to_first is None:
            self.seconds_to_first = perf_counter() - self._start
        self._last = text or self._last
        sys.stdout.write(harmless(text) if self._for_terminal else text)
        sys.stdout.flush()

    def end(self) -> None:
        """End the line, if one was begun."""
        if self._last and not self._last.endswith("\n"):
            self.write("\n")
        self._last = ""
