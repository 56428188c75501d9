"""Long calls into C on a thread of their own, so that exceptions reach the caller meanwhile.

Python sees to signals, and to exceptions that other threads send, between two instructions of its
own: a call into C that takes seconds holds them up. So a helper makes the call, and the caller
waits in Python.

1. An exception asks the call to end and is raised once it has: nothing computes behind the
   caller's back.
2. Further exceptions do not cut that short.
3. The helper is never interrupted itself: signals go to the main thread, and nobody knows it.
"""

from __future__ import annotations

import _thread
import ctypes as c
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

POLL = 0.05
"""Seconds after which a waiting thread looks for exceptions that others sent; signals wake it."""


class Stop:
    """A flag that C code looks at."""

    def __init__(self) -> None:
        self._bytes = (c.c_char * 2)()

    def set(self) -> None:
        """Ask what looks at it to end."""
        self._bytes[0] = b"\1"

    @property
    def address(self) -> int:
        """Where its byte is; the one behind it is zero."""
        return c.addressof(self._bytes)


class Aside(Generic[T]):
    """One call, made by a helper.

    Args:
        work: the call.
        interrupt: asks it to end early; may be called several times, and after its end.
    """

    def __init__(self, work: Callable[[], T], interrupt: Callable[[], object]) -> None:
        self._work: Callable[[], T] | None = work
        self._interrupt = interrupt
        self._fate: dict[str, str] = {}  # what was decided first: to run it, or not to
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._ended = False
        self._wake = _thread.allocate_lock()
        self._wake.acquire()

    def run(self) -> T:
        """Make the call and return its result, or raise what it raised."""
        try:
            self._start()
            self._wait()
        except BaseException:
            self._stop()
            raise
        error, self._error = self._error, None
        if error is None:
            return self._results.pop()
        try:
            raise error
        finally:
            del error  # its traceback has this frame

    def _start(self) -> None:
        try:
            _thread.start_new_thread(self._run, ())
        except (RuntimeError, MemoryError):  # no thread can be had, as at exit: then without one
            self._ended = True  # as soon as this thread does something else
            self._run()

    def _wait(self) -> None:
        while not self._ended:
            self._wake.acquire(True, POLL)

    def _stop(self) -> None:
        """Return when nothing runs any more, and nothing will."""
        while True:
            try:
                if self._fate.setdefault("fate", "dropped") == "run":
                    self._interrupt()
                    self._wait()
                self._error = None  # its traceback has what the call worked on
                return
            except BaseException:  # noqa: PERF203 - one is raised already, by whoever called
                continue

    def _run(self) -> None:
        try:
            work, self._work = self._work, None
            if work is not None and self._fate.setdefault("fate", "run") == "run":
                self._results.append(work())
        except BaseException as error:
            self._error = error
        work = None  # what it refers to must not live on with this thread
        self._ended = True
        self._wake.release()
