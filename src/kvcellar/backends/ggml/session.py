"""The threads that compute in one process, and the turns of those who let them.

Graphs are computed one after the other: whoever computes has the turn. The lock is held for exactly
one line, since an exception that comes when a block of several lines is left may keep it locked for
good.
"""

from __future__ import annotations

import _thread
import ctypes as c
import os
import threading
from time import monotonic, sleep

import numpy as np

from kvcellar.backends.ggml.aside import Stop
from kvcellar.backends.ggml.binding import Ggml, GraphPlan, byte_test
from kvcellar.backends.ggml.exits import process_exit
from kvcellar.backends.memory import aligned, check_available
from kvcellar.errors import AllocationError, ClosedError
from kvcellar.types import ByteArray

_LONGEST_END = 0.5
"""Seconds that threads which have nothing left to do may take to end."""


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
