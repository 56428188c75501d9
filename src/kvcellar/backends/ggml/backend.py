"""The CPU backend: its threads and how a graph is computed on them.

One thread pool lives as long as the backend, so that a token costs no thread creation. The
contexts of one model share it, with its scratch memory: graphs are computed one after the other.

Threads do not survive a fork, and a lock that one of them held stays locked. So a forked process
starts its own threads when it first computes, has its own lock, and never touches its parent's.

A computation that may take long runs on a helper thread while the calling one waits in Python, so
that Ctrl-C and other exceptions end it: after the node that is being computed. One of a token runs
on the calling thread, since handing it over takes as long as a small model's layer.
"""

from __future__ import annotations

import os
from functools import partial

from kvcellar.backends.checks import check_threads
from kvcellar.backends.ggml.aside import Aside, Stop
from kvcellar.backends.ggml.binding import ABORTED, SUCCESS
from kvcellar.backends.ggml.exits import process_exit
from kvcellar.backends.ggml.library import Library, load
from kvcellar.backends.ggml.session import Session
from kvcellar.backends.threads import default_threads as default_threads
from kvcellar.errors import ClosedError, ComputeError


class GgmlBackend:
    """ggml on the CPU.

    Args:
        n_threads: how many threads compute; None: :func:`default_threads`.

    Raises:
        OptionError: ``n_threads`` is no whole number, or outside [1, 512].
        LibraryError: libggml cannot be used.
        AllocationError: the threads cannot be had.
    """

    def __init__(self, n_threads: int | None = None) -> None:
        self.n_threads = check_threads(n_threads) or default_threads()
        self.library: Library = load()
        self.api = self.library.api
        self._closed = False
        self._sessions = {os.getpid(): Session(self.api, self.n_threads)}  # by process

    def compute(self, graph: int, *, stop: Stop | None = None, keep: object = None) -> None:
        """Compute an allocated graph; calls from several threads take turns.

        Args:
            graph: the graph.
            stop: ends it early, which exceptions do then; None: it takes no time worth that.
            keep: what must live until it has ended.

        Raises:
            ComputeError: ggml reports a failure or an abort.
            AllocationError: the work buffer cannot be had.
            ClosedError: the backend is closed.
        """
        session = self._session()
        if stop is not None or session.turn.locked():
            stop = stop or Stop()
            work = partial(session.compute, graph, stop, keep)
            status = Aside(work, stop.set).run()
        else:
            status = session.compute(graph)
        if status == ABORTED:
            process_exit().check()
            raise ComputeError("the computation was aborted")
        if status != SUCCESS:
            raise ComputeError(f"ggml failed with status {status}: {self.library.take_error()}")

    def settle(self) -> None:
        """Return when nothing computes: what exceptions left running, above all."""
        session = self._sessions.get(os.getpid())
        if session is not None:
            session.settle()

    def close(self) -> None:
        """Stop the threads when they have done what they do now; closing twice is fine."""
        self._closed = True
        session = self._sessions.pop(os.getpid(), None)
        if session is not None:
            session.close()

    def _session(self) -> Session:
        """The threads of this process."""
        if self._closed:
            raise ClosedError("the backend is closed")
        process = os.getpid()
        session = self._sessions.get(process)
        if session is None:
            session = self._sessions.setdefault(process, Session(self.api, self.n_threads))
        return session
