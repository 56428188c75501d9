"""The index that counts, opened, shared by threads; made anew when it turns out to be damaged."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from kvcellar.errors import ClosedError, StoreError
from kvcellar.snapshot.stores.disk.folder import index_path, make_index, newest_index, rows_of_files
from kvcellar.snapshot.stores.disk.index import IN_MEMORY, Index, IndexDamaged

T = TypeVar("T")

_PASSING = ("locked", "busy", "disk i/o", "full", "unable to open", "interrupted")
"""What SQLite says of the world around a file; anything else it finds wrong is in the file."""

_FAILURES = (sqlite3.Error, OSError, UnicodeDecodeError)
"""The last is what a message of SQLite raises that quotes a damaged file."""

_ATTEMPTS = 50


class LiveIndex:
    """Does work on the newest index. Work may be done twice, when the index is replaced meanwhile.

    Args:
        root: the folder of the store.
        read_only: keep an index in memory, of what is there now.
        sync: see :class:`Index`.
    """

    def __init__(self, root: Path, read_only: bool, sync: bool) -> None:
        self._root = root
        self._read_only = read_only
        self._sync = sync
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._index: Index | None = None
        self._number = 0
        self._closed = False
        try:
            self.read(Index.n_bytes)
        except BaseException:
            self.close()
            raise

    def read(self, work: Callable[[Index], T]) -> T:
        """Do work that changes nothing and needs no transaction."""
        return self._do(work)

    def write(self, work: Callable[[Index], T]) -> T:
        """Do work in a transaction."""

        def transact(index: Index) -> T:
            with index.transaction():
                return work(index)

        return self._do(transact)

    def close(self) -> None:
        """Close the file; twice is fine. After a fork it is left to the process that opened it."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            self._let_go()

    def _do(self, work: Callable[[Index], T]) -> T:
        self._check_process()
        with self._lock:
            if self._closed:
                raise ClosedError(f"the store in {self._root} was closed: open it again")
            for _ in range(_ATTEMPTS):
                if (result := self._attempt(work)) is not None:
                    return result[0]
        raise StoreError(f"the index of {self._root} is damaged again and again: check the disk")

    def _attempt(self, work: Callable[[Index], T]) -> tuple[T] | None:
        """What came of the work; None if the index was replaced, now or meanwhile."""
        try:
            result = work(self._current())
            return (result,) if self._is_newest() else None
        except _FAILURES as error:
            self._renew(error)
            return None

    def _current(self) -> Index:
        if self._read_only:
            return self._index or self._of_files()
        if self._index is None or not self._is_newest():
            self._let_go()
            if (number := newest_index(self._root)) == 0:
                make_index(self._root, 1, self._sync)
                number = newest_index(self._root)
            self._number = number
            self._index = Index(index_path(self._root, number), self._sync)
        return self._index

    def _of_files(self) -> Index:
        index = self._index = Index(IN_MEMORY)
        with index.transaction():
            for row in rows_of_files(self._root):
                index.add(row)
        return index

    def _renew(self, error: Exception) -> None:
        """Make a damaged index anew; raise what is not its fault, or cannot be helped."""
        try:
            if not self._is_newest():
                return
            if not self._is_damage(error):
                raise StoreError(f"the store in {self._root} cannot be used: {error}") from error
            self._let_go()
            make_index(self._root, self._number + 1, self._sync)
        except _FAILURES as failure:
            with suppress(OSError):  # the folder itself may be gone
                if newest_index(self._root) > self._number:
                    return  # the new one was replaced in its turn
            raise StoreError(
                f"the index of {self._root} cannot be used ({error}) nor made anew: {failure}"
            ) from failure

    def _is_newest(self) -> bool:
        return self._read_only or newest_index(self._root) == self._number

    def _is_damage(self, error: Exception) -> bool:
        if self._read_only or not self._number or isinstance(error, OSError):
            return False
        if isinstance(error, (IndexDamaged, UnicodeDecodeError)):
            return True
        text = str(error).lower()
        if "readonly" in text:  # a damaged header makes a file read-only, too
            return os.access(index_path(self._root, self._number), os.W_OK)
        return not any(word in text for word in _PASSING)

    def _let_go(self) -> None:
        if self._index is not None:
            self._index.close()
        self._index = None

    def _check_process(self) -> None:
        """Before the lock is taken: a thread that a fork left behind may have it for good."""
        if os.getpid() != self._process:
            raise StoreError(
                f"the store in {self._root} was opened before a fork: open it again after it"
            )
