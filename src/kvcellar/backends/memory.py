"""Zeroed memory that takes no room until it is written, and how much may still be allocated.

The system gives a page when it is first written, and does not count it as used until then. So what
is available is what the system says, less what was promised here and not yet written.

Linux is asked for pages of 2 MiB where it has any: attention reads so much memory that looking up
small pages takes a seventh of a decode at 4096 tokens.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from kvcellar.backends.cgroups import Group, groups
from kvcellar.errors import AllocationError
from kvcellar.types import ByteArray


class ZeroedMemory:
    """``n_bytes`` of zeros, from the beginning of a page on.

    Attributes:
        address: of the first byte; valid as long as this object lives.
        n_bytes: how many there are.

    Raises:
        MemoryError: the system does not promise as many.
    """

    def __init__(self, n_bytes: int) -> None:
        self._map: mmap.mmap | None = _anonymous(n_bytes)
        _prefer_large_pages(self._map)
        self.n_bytes = n_bytes
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        _alive()[id(self)] = self

    def owed_bytes(self) -> int:
        """Bytes that were never written, nor read, in whole pages; 0 where that is unknown."""
        if self._map is None:
            return 0
        pages = np.ones(-(-self.n_bytes // mmap.PAGESIZE), np.uint8)
        _ask_resident(self.address, self.n_bytes, pages)
        return int(np.count_nonzero(pages & 1 == 0)) * mmap.PAGESIZE

    def zero(self) -> None:
        """Set every byte to zero, and give pages back to the system where it takes them."""
        if self._map is None:
            return
        if sys.platform == "linux":  # elsewhere this is advice that may be ignored
            with suppress(OSError):  # locked memory is kept
                self._map.madvise(mmap.MADV_DONTNEED)
                return
        ctypes.memset(self.address, 0, self.n_bytes)

    def close(self) -> None:
        """Free it; closing twice is fine."""
        if self._map is not None:
            self._map.close()
            self._map = None


def owed_bytes() -> int:
    """Bytes of all such memory in this process that the system has yet to give."""
    found = (ref() for ref in _alive().valuerefs())
    return sum(memory.owed_bytes() for memory in found if memory is not None)


@lru_cache(maxsize=1)
def _alive() -> WeakValueDictionary[int, ZeroedMemory]:
    """The process's own, by identity."""
    return WeakValueDictionary()


def _anonymous(n_bytes: int) -> mmap.mmap:
    try:
        if hasattr(mmap, "MAP_PRIVATE"):  # shared by default: a forked process would write into it
            return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return mmap.mmap(-1, n_bytes)
    except (OSError, OverflowError, ValueError):
        raise MemoryError(f"{n_bytes} bytes") from None


def _prefer_large_pages(memory: mmap.mmap) -> None:
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)


def _ask_resident(address: int, n_bytes: int, pages: ByteArray) -> None:
    """Set bit 0 for each page that is there; leave all as they are where that is unknown."""
    try:
        mincore = ctypes.CDLL(None).mincore
    except (OSError, TypeError, AttributeError):  # not on Windows
        return
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    mincore(address, n_bytes, pages.ctypes.data)


T = TypeVar("T", bound=np.generic)

_LINE = 64
_SMALL_THINGS = 4 * 2**20
"""What the system's allocator asks for at once, and more."""

_MEMORY_FILES = MappingProxyType(
    {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
)
"""Of each generation of control groups: the limit, what is used, and the line of what is not."""
_UNLIMITED = 2**62
"""What the first generation gives where there is no limit is close to ``2**63``."""


def available_bytes() -> int | None:
    """Bytes the system could still give this process, or None where it does not say."""
    known = [n for n in (_meminfo_available(), _cgroup_available()) if n is not None]
    return min(known, default=None)


def check_available(buffer: str, n_bytes: int) -> None:
    """Refuse what does not fit: systems that overcommit would kill the process later.

    Raises:
        AllocationError: more than what is available and not promised already.
    """
    if _fits(n_bytes):
        return
    gc.collect()  # contexts that were dropped are in cycles with their sequences
    if not _fits(n_bytes):
        raise AllocationError(buffer, n_bytes)


def scratch(buffer: str, n: int, dtype: type[T]) -> npt.NDArray[T]:
    """Allocate n zeros to work on.

    Raises:
        AllocationError: they cannot be had.
    """
    n_bytes = n * np.dtype(dtype).itemsize
    check_available(buffer, n_bytes)
    try:
        return np.zeros(n, dtype)
    except (MemoryError, ValueError):
        raise AllocationError(buffer, n_bytes) from None


def aligned(buffer: str, n_bytes: int) -> ByteArray:
    """Allocate bytes of any value that begin where a line of the processor's cache does.

    Raises:
        AllocationError: they cannot be had.
    """
    try:
        memory = np.empty(n_bytes + _LINE, np.uint8)
    except (MemoryError, ValueError):
        raise AllocationError(buffer, n_bytes) from None
    start = -memory.ctypes.data % _LINE
    return memory[start : start + n_bytes]


def check_room(buffer: str, n_bytes: int = 0) -> None:
    """Check that the system promises that much, and what small things take beside it.

    Code in C that cannot allocate ends the process, so it is asked before. What is promised is
    given back at once: another thread may take it first, but hardly all of it.

    Raises:
        AllocationError: it does not.
    """
    try:
        _anonymous(n_bytes + _SMALL_THINGS).close()
    except MemoryError:
        raise AllocationError(buffer, n_bytes) from None


def _fits(n_bytes: int) -> bool:
    available = available_bytes()
    return available is None or n_bytes <= available - owed_bytes()


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available(root: Path = Path("/")) -> int | None:
    """What the limits of containers leave, the least of them; None: there are none.

    Args:
        root: where ``proc`` is.
    """
    left = (_left(group) for group in groups("memory", root))
    return min((n for n in left if n is not None), default=None)


def _left(group: Group) -> int | None:
    """What a group's limit leaves; file pages it would drop for us do not count as used."""
    limit, used, droppable = _MEMORY_FILES[group.version]
    try:
        most = int(group.read(limit) or "")  # "max": no limit
        if most >= _UNLIMITED:
            return None
        return max(most - int(group.read(used) or "") + _droppable(group, droppable), 0)
    except ValueError:
        return None


def _droppable(group: Group, field: str) -> int:
    for line in (group.read("memory.stat") or "").splitlines():
        if line.startswith(f"{field} "):
            return int(line.split()[1])
    return 0
