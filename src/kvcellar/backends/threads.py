"""How many threads compute unless somebody says otherwise.

As many as there are processors that this process may use: those that it is bound to, and no more
than what its control groups give it time for.

A quota of one and a half processors makes two threads, rounded up as other runtimes do: with one
thread half a processor would lie idle, and two that share what there is lose little. Threads beyond
that only wait for each other, which can cost many times what a token costs: each node of a graph
ends when the last thread has done its share, and ggml's threads spin while they wait.
"""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

from kvcellar.backends.cgroups import Group, groups
from kvcellar.backends.checks import MAX_THREADS


def default_threads(root: Path = Path("/")) -> int:
    """The processors that this process may use, from 1 to 512.

    Args:
        root: where ``proc`` is.
    """
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    if quota is not None:
        count = min(count, ceil(quota))
    return min(MAX_THREADS, max(1, count))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The processors' worth of time that control groups give this process; None: no limit.

    The least that any group on the way to the process's own gives: ``docker run --cpus=1.5`` is
    1.5, and 0.5 if the group around the container has no more.

    Args:
        root: where ``proc`` is.
    """
    quotas = (_quota(group) for group in groups("cpu", root))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Group) -> float | None:
    """Time a period: ``quota period`` or ``max period`` in one file, or two files with -1."""
    if group.version == 2:
        words = (group.read("cpu.max") or "").split()
    else:
        words = [group.read(f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    try:
        quota, period = map(int, words)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None
