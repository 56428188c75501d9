"""Real signals and real asynchronous exceptions, at random moments.

====== =============================================================================
name   what comes
====== =============================================================================
sigint SIGINT from another thread; Python's own handler raises KeyboardInterrupt
alarm  SIGALRM from the system's timer, to the microsecond; its handler raises
twice  the same, and once more while the first is being handled
async  ``PyThreadState_SetAsyncExc`` from another thread
====== =============================================================================

What comes when the operation has returned is *late*: the operation has happened then.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from kvcellar.testing.interrupts.points import Act, Interrupt, Request, Sent, ask_thread

KINDS = ("sigint", "alarm", "twice", "async") if hasattr(signal, "setitimer") else ("async",)
"""Windows has no timer that sends a signal, and cannot send Ctrl-C to one process."""

SWITCH = 2e-5
"""Seconds after which a thread lets others go on, so that theirs come when they should."""

BETWEEN = 3e-5
"""Seconds between two alarms, at most."""


class AtMoment:
    """Sends an exception some time after an operation has begun.

    Args:
        kind: one of `KINDS`.
        delay: seconds.
        between: seconds until the second one, for ``twice``.
    """

    def __init__(self, kind: str, delay: float, between: float = BETWEEN) -> None:
        self.kind: type[BaseException] = KeyboardInterrupt if kind == "sigint" else Interrupt
        self._kind = kind
        self._delay = max(delay, 1e-6)
        self._between = max(between, 1e-6)
        self._left = 2 if kind == "twice" else 1
        self._live = False
        self._asked = 0

    @classmethod
    def random(cls, kind: str, seed: int, seconds: float) -> AtMoment:
        """One at a random moment of an operation that takes so long."""
        rng = random.Random(f"{kind}:{seed}")
        return cls(kind, rng.uniform(0, 1.05 * seconds), rng.uniform(0, BETWEEN))

    def send(self, act: Act) -> Sent:
        """Run the operation and send it. In the main thread only, unless ``async``."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH)
        stop = self._start()
        error: BaseException | None = None
        returned = False
        try:  # a second one may come while the first is caught
            try:
                self._live = True
                act()
                returned = True
                self._live = False
                _look()
            except BaseException as caught:
                error = caught
                self._live = False
                _look()
        except BaseException as caught:
            error = caught
        self._live = False
        stop()
        sys.setswitchinterval(interval)
        late = returned or not self._asked
        return Sent(None if returned else error, self._asked, late=late)

    def _start(self) -> Callable[[], object]:
        """Set everything going; return what takes it back."""
        if self._kind in ("alarm", "twice"):
            before = signal.signal(signal.SIGALRM, self._on_alarm)
            signal.setitimer(signal.ITIMER_REAL, self._delay)

            def stop() -> None:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)

            return stop
        if self._kind == "sigint":
            before = signal.signal(signal.SIGINT, self._on_sigint)
            helper = threading.Thread(target=self._kill, daemon=True)
        else:
            before = signal.getsignal(signal.SIGINT)
            ask = ask_thread(threading.get_ident(), Interrupt)
            helper = threading.Thread(target=self._ask_later, args=[ask], daemon=True)
        helper.start()

        def join() -> None:
            helper.join()
            signal.signal(signal.SIGINT, before)

        return join

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._left -= 1
        if self._left > 0:  # one at a time: a timer that repeats so fast lets nothing else run
            signal.setitimer(signal.ITIMER_REAL, self._between)
        if self._live:
            self._asked += 1
            raise Interrupt

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        if self._live:
            self._asked += 1
            signal.default_int_handler(number, frame)

    def _kill(self) -> None:
        time.sleep(self._delay)
        if self._live:
            os.kill(os.getpid(), signal.SIGINT)

    def _ask_later(self, ask: Callable[[], object]) -> None:
        request = Request(ask)
        time.sleep(self._delay)
        if self._live:  # nothing that lets the other thread go on lies between these lines
            self._asked += 1
            _ = -request


def _look() -> None:
    """Look at the eval breaker, so that what is pending comes."""
