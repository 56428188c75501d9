"""Tests side by side: with ``pytest -n 2`` each worker computes on one processor.

Threads of ggml spin while they wait for one another: more of them than processors are many times
slower than one. A model takes as many threads as its process has processors unless it is told a
number, so a worker keeps to one processor. A test marked ``alone`` has all of them: it waits until
the tests beside it have ended, and none begins before it ends. Without workers there is nothing to
do. Where the system lacks a means (Windows ``fcntl``, macOS affinity), tests are merely slower.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl

FOLDER = Path(__file__).parent
DOOR, ROOM = FOLDER / "__init__.py", FOLDER / "conftest.py"  # files to lock; any two would do


class Worker:
    """One of the processes that share a session's tests; number None if there are no others."""

    def __init__(self, number: int | None, door: Path = DOOR, room: Path = ROOM) -> None:
        self._door, self._room, self._shares = door, room, number is not None
        self._all, self._own = frozenset[int](), frozenset[int]()
        if number is not None and hasattr(os, "sched_setaffinity"):
            self._all = frozenset(os.sched_getaffinity(0))
            self._own = frozenset({sorted(self._all)[number % len(self._all)]})
            os.sched_setaffinity(0, self._own)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Worker:
        """The one that pytest-xdist says this process is."""
        name = environment.get("PYTEST_XDIST_WORKER")
        shares = name is not None and int(environment["PYTEST_XDIST_WORKER_COUNT"]) > 1
        return cls(int(name.removeprefix("gw")) if name is not None and shares else None)

    @contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        """Run a test: beside those of other workers, or alone and on all processors."""
        if not self._shares:
            yield
            return
        with self._entered(alone=alone):
            if not (alone and self._all):
                yield
                return
            os.sched_setaffinity(0, self._all)
            try:
                yield
            finally:
                os.sched_setaffinity(0, self._own)

    @contextmanager
    def _entered(self, *, alone: bool) -> Iterator[None]:
        """Hold the room; who waits for it stands in the door, so that nobody can pass by."""
        if sys.platform == "win32":
            yield
            return
        with self._room.open("rb") as room:
            with self._door.open("rb") as door:
                fcntl.flock(door, fcntl.LOCK_EX)
                fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
                fcntl.flock(door, fcntl.LOCK_UN)
            try:
                yield
            finally:  # not left to closing: a forked child may still have it open
                fcntl.flock(room, fcntl.LOCK_UN)
