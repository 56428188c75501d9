"""The CPU backend: its threads and how a graph is computed on them.

One thread pool lives as long as the backend, so that a token costs no thread creation. The
contexts of one model share it, with its scratch memory: graphs are computed one after the other.
"""

from __future__ import annotations

import ctypes as c
import os
import threading

from kvcellar.backends.ggml.binding import ABORTED, SUCCESS
from kvcellar.backends.ggml.library import Library, load
from kvcellar.errors import ClosedError, ComputeError, LibraryError, OptionError

MAX_THREADS = 512  # GGML_MAX_N_THREADS


def default_threads() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


class GgmlBackend:
    """ggml on the CPU.

    Args:
        n_threads: how many threads compute; all available processors when None.

    Raises:
        OptionError: ``n_threads`` outside [1, 512].
        LibraryError: libggml cannot be used.
    """

    _handle: int | None = None

    def __init__(self, n_threads: int | None = None) -> None:
        self.n_threads = default_threads() if n_threads is None else n_threads
        if not 1 <= self.n_threads <= MAX_THREADS:
            raise OptionError(f"n_threads={n_threads}: must be in [1, {MAX_THREADS}]")
        self.library: Library = load()
        self.api = self.library.api
        self._handle = self.api.ggml_backend_cpu_init()
        if not self._handle:
            raise LibraryError("ggml's CPU backend does not start on this processor")
        self._pool = self._start_pool()
        self._turn = threading.Lock()

    def _start_pool(self) -> int | None:
        params = self.api.ggml_threadpool_params_default(self.n_threads)
        pool: int | None = self.api.ggml_threadpool_new(c.byref(params))
        self.api.ggml_backend_cpu_set_n_threads(self._handle, self.n_threads)
        self.api.ggml_backend_cpu_set_threadpool(self._handle, pool)
        return pool

    def compute(self, graph: int) -> None:
        """Compute an allocated graph; calls from several threads take turns.

        Raises:
            ComputeError: ggml reports a failure or an abort.
        """
        with self._turn:
            if self._handle is None:
                raise ClosedError("the backend is closed")
            status = self.api.ggml_backend_graph_compute(self._handle, graph)
        if status == ABORTED:
            raise ComputeError("the computation was aborted")
        if status != SUCCESS:
            raise ComputeError(f"ggml failed with status {status}: {self.library.take_error()}")

    def close(self) -> None:
        """Stop the threads; closing twice is fine."""
        if self._handle is None:
            return
        self.api.ggml_backend_free(self._handle)
        if self._pool:
            self.api.ggml_threadpool_free(self._pool)
        self._handle = self._pool = None

    def __del__(self) -> None:
        self.close()
