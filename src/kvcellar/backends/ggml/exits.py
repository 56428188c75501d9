"""The end of the process, which nothing that computes in C may live to see.

At exit libraries take down what they have, and threads of ours that still use it end the process
with a signal; Python does not wait for threads that are daemons. So when Python ends, what computes
is asked to stop and waited for. From then on a thread that wants to begin is ended, but for the one
that ends Python: it does one thing after the other, and may save what there is.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Protocol
from weakref import WeakSet

from kvcellar.backends.ggml.aside import Stop
from kvcellar.errors import ClosedError

_POLL = 0.02


class Lock(AbstractContextManager[bool], Protocol):
    """Held while something runs."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it; whether that was possible in time."""

    def release(self) -> None:
        """Give it back."""


class Running(Protocol):
    """What runs code in C that must have ended before the process does."""

    @property
    def process(self) -> int:
        """Where it runs."""

    @property
    def turn(self) -> Lock:
        """Held while it runs."""

    @property
    def stop(self) -> Stop:
        """Ends early what runs now, if it looks at it."""


class Exit:
    """Waits for all that runs.

    Attributes:
        thread: the thread that ends Python, None before.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self._running: WeakSet[Running] = WeakSet()

    def add(self, running: Running) -> None:
        """Wait for this one too."""
        self._running.add(running)

    def check(self) -> None:
        """End the calling thread if Python ends, and not by this thread.

        Raises:
            SystemExit: so it is, which ends a thread without a word.
        """
        if self.thread not in (None, threading.get_ident()):
            raise SystemExit("Python ends")

    def wait(self) -> None:
        """Stop what runs and return when it has stopped."""
        self.thread = threading.get_ident()
        while True:
            try:
                for running in list(self._running):
                    _wait_for(running)
                return
            except BaseException:  # noqa: PERF203 - Ctrl-C must not end the process in a worse way
                continue


def _wait_for(running: Running) -> None:
    while running.process == os.getpid():  # in a forked one, its threads are not here
        running.stop.set()
        try:
            if running.turn.acquire(timeout=_POLL):
                running.turn.release()
                return
        except ClosedError:  # lost in a fork: nothing runs
            return


@lru_cache(maxsize=1)
def process_exit() -> Exit:
    """The process's own."""
    made = Exit()
    atexit.register(made.wait)
    return made
