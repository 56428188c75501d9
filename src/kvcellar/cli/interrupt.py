"""Ctrl-C between tokens: the first press is noted and checked where no step is half done."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While entered, the first Ctrl-C only sets ``pressed``; the second raises as usual."""

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def check(self) -> None:
        """Raise if Ctrl-C was pressed; to be called where nothing is half done.

        Raises:
            KeyboardInterrupt: it was.
        """
        if self.pressed:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupt:
        self.pressed = False
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, _number: int, _frame: FrameType | None) -> None:
        self.check()
        self.pressed = True
