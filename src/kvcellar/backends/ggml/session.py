"""The threads that compute in one process, and how computing ends early: at exit, or when asked.

Graphs are computed one after the other: whoever computes has the turn. A lock is held for exactly
one line, since an exception between taking a lock and leaving a block of several lines may keep it
locked for good.

At exit nothing may compute any more, whichever thread asked for it: libraries take down what they
have while threads of ours still run. So when Python ends, what computes is asked to stop and waited
for, and from then on threads other than the one that ends Python are ended when they want to begin.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes as c
import os
import threading
from functools import lru_cache
from time import monotonic, sleep
from typing import Protocol
from weakref import WeakSet

import numpy as np

from kvcellar.backends.ggml.aside import Stop
from kvcellar.backends.ggml.binding import Ggml, GraphPlan, byte_test
from kvcellar.backends.memory import aligned, check_available
from kvcellar.errors import AllocationError, ClosedError
from kvcellar.types import ByteArray

_POLL = 0.02
_LONGEST_END = 0.5
"""Seconds that threads which have nothing left to do may take to end."""


class Turn(Protocol):
    """What runs code in C that must have ended before the process does."""

    process: int
    turn: threading.Lock
    stop: Stop


class Exit:
    """The end of the process: every turn is waited for, and later ones are refused.

    Attributes:
        thread: the thread that ends Python, None before.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self._turns: WeakSet[Turn] = WeakSet()

    def add(self, turn: Turn) -> None:
        """Wait for this one too."""
        self._turns.add(turn)

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
                self._wait()
                return
            except BaseException:  # noqa: PERF203 - Ctrl-C must not end the process in a worse way
                continue

    def _wait(self) -> None:
        for each in list(self._turns):
            while each.process == os.getpid():  # in a forked one, its threads are not here
                each.stop.set()
                if each.turn.acquire(timeout=_POLL):
                    each.turn.release()
                    break


@lru_cache(maxsize=1)
def process_exit() -> Exit:
    """The process's own."""
    made = Exit()
    atexit.register(made.wait)
    return made


class Session:
    """A pool of threads, started in this process.

    Attributes:
        n_threads: how many there are.
        process: the process that they live in.
        turn: held by whoever computes.
        stop: ends what computes now, if it is set.

    Raises:
        AllocationError: the threads cannot be had.
    """

    def __init__(self, api: Ggml, n_threads: int) -> None:
        self.n_threads = n_threads
        self.process = os.getpid()
        self.turn = threading.Lock()
        self.stop = Stop()
        self._api = api
        self._test = byte_test()
        self._work: ByteArray = np.empty(0, np.uint8)
        check_threads(n_threads - 1)
        params = api.ggml_threadpool_params_default(n_threads)
        self._pool = api.make("ggml_threadpool_new", c.byref(params))
        self._pool.process = self.process
        process_exit().add(self)

    def compute(self, graph: int, stop: Stop | None = None, keep: object = None) -> int:  # noqa: ARG002
        """Compute a graph when it is this one's turn; return ggml's status.

        Args:
            graph: an allocated graph.
            stop: ends the computation early; None: nobody wants to.
            keep: what must live meanwhile.

        Raises:
            AllocationError: the work buffer cannot be had.
            ClosedError: the threads have ended.
        """
        # One line: see above.
        with self.turn: return self._compute(graph, stop or Stop())  # fmt: skip  # noqa: E701

    def settle(self) -> None:
        """Return when nothing computes."""
        with self.turn: pass  # fmt: skip  # noqa: E701

    def close(self) -> None:
        """End the threads when they have done what they do now; closing twice is fine."""
        with self.turn: self._pool.close()  # fmt: skip  # noqa: E701

    def _compute(self, graph: int, stop: Stop) -> int:
        self.stop = stop  # before the check: whoever ends Python sets it after being seen there
        process_exit().check()
        if self._pool.is_closed:
            raise ClosedError("the backend is closed")
        plan: GraphPlan = self._api.ggml_graph_plan(graph, self.n_threads, self._pool)
        if plan.work_size > len(self._work):
            self._work = _work_buffer(plan.work_size)
        plan.work_data = self._work.ctypes.data
        plan.abort_callback, plan.abort_callback_data = self._test, stop.address
        status: int = self._api.ggml_graph_compute(graph, c.byref(plan))
        return status


def _work_buffer(n_bytes: int) -> ByteArray:
    what = "the work buffer"
    check_available(what, n_bytes)
    return aligned(what, n_bytes)


def check_threads(n: int) -> None:
    """Start and end n threads: ggml ends the process if it cannot.

    Raises:
        AllocationError: so many cannot be had.
    """
    before, gate = _n_threads(), _thread.allocate_lock()
    gate.acquire()
    try:
        for _ in range(n):
            _thread.start_new_thread(_pass, (gate,))
    except (RuntimeError, MemoryError):
        what = f"{n} threads more"
        raise AllocationError(what, n * 2**23, "use a smaller n_threads") from None
    finally:
        gate.release()
    end = monotonic() + _LONGEST_END
    while n and before is not None and (_n_threads() or 0) > before and monotonic() < end:
        sleep(0.0002)


def _pass(gate: _thread.LockType) -> None:
    with gate:
        pass


def _n_threads() -> int | None:
    """How many threads the process has; None where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a path costs more than the call
    except OSError:
        return None
