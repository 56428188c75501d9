"""The CPU backend: its threads and how a graph is computed on them.

One thread pool lives as long as the backend, so that a token costs no thread creation. The
contexts of one model share it, with its scratch memory: graphs are computed one after the other.

Threads do not survive a fork, and a lock that one of them held stays locked. So a forked process
starts its own threads when it first computes, has its own lock, and never touches its parent's.
"""

from __future__ import annotations

import ctypes as c
import os
import threading

from kvcellar.backends.checks import MAX_THREADS, check_threads
from kvcellar.backends.ggml.binding import ABORTED, SUCCESS
from kvcellar.backends.ggml.library import Library, load
from kvcellar.errors import ClosedError, ComputeError, LibraryError


def default_threads() -> int:
    """The processors that this process may use, as far as ggml can."""
    if hasattr(os, "sched_getaffinity"):
        return min(MAX_THREADS, max(1, len(os.sched_getaffinity(0))))
    return min(MAX_THREADS, os.cpu_count() or 1)


class GgmlBackend:
    """ggml on the CPU.

    Args:
        n_threads: how many threads compute; all available processors when None.

    Raises:
        OptionError: ``n_threads`` is no whole number, or outside [1, 512].
        LibraryError: libggml cannot be used.
    """

    _handle: int | None = None

    def __init__(self, n_threads: int | None = None) -> None:
        self.n_threads = check_threads(n_threads) or default_threads()
        self.library: Library = load()
        self.api = self.library.api
        self._locks: dict[int, threading.Lock] = {}  # by process
        self._start()

    def _start(self) -> None:
        """Start threads in this process."""
        handle = self.api.ggml_backend_cpu_init()
        if not handle:
            raise LibraryError("ggml's CPU backend does not start on this processor")
        params = self.api.ggml_threadpool_params_default(self.n_threads)
        pool: int | None = self.api.ggml_threadpool_new(c.byref(params))
        self.api.ggml_backend_cpu_set_n_threads(handle, self.n_threads)
        self.api.ggml_backend_cpu_set_threadpool(handle, pool)
        self._handle, self._pool, self._process = handle, pool, os.getpid()

    def compute(self, graph: int) -> None:
        """Compute an allocated graph; calls from several threads take turns.

        Raises:
            ComputeError: ggml reports a failure or an abort.
        """
        process = os.getpid()
        with self._locks.setdefault(process, threading.Lock()):
            if self._handle is None:
                raise ClosedError("the backend is closed")
            if self._process != process:
                self._start()
            status = self.api.ggml_backend_graph_compute(self._handle, graph)
        if status == ABORTED:
            raise ComputeError("the computation was aborted")
        if status != SUCCESS:
            raise ComputeError(f"ggml failed with status {status}: {self.library.take_error()}")

    def close(self) -> None:
        """Stop the threads; closing twice is fine."""
        handle, self._handle = self._handle, None
        if handle is None or self._process != os.getpid():
            return
        self.api.ggml_backend_free(handle)
        if self._pool:
            self.api.ggml_threadpool_free(self._pool)

    def __del__(self) -> None:
        self.close()
