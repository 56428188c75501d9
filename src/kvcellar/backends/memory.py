"""How much memory may still be taken."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvcellar.backends.zeros import owed_bytes
from kvcellar.errors import AllocationError

T = TypeVar("T", bound=np.generic)

_CGROUP = Path("/sys/fs/cgroup")


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
    """So many zeros to work on.

    Raises:
        AllocationError: they cannot be had.
    """
    n_bytes = n * np.dtype(dtype).itemsize
    check_available(buffer, n_bytes)
    try:
        return np.zeros(n, dtype)
    except (MemoryError, ValueError):
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


def _cgroup_available() -> int | None:
    """What the limit of a container leaves; file pages it would drop for us do not count."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text()) - _cgroup_droppable()
        return max(int(limit) - used, 0)
    except (OSError, ValueError):
        return None


def _cgroup_droppable() -> int:
    for line in (_CGROUP / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
