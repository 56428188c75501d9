"""Disks that are small, full or read-only, for tests of what writes to them.

A real one needs a system that mounts (root on Linux); a limit on the size of files, under which
nothing can grow either, works everywhere on POSIX.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Disk:
    """A small disk: a folder on it, and how to fill it up and make room again."""

    root: Path
    why: str
    fill: Callable[[], None]
    free: Callable[[], None]


@contextmanager
def mounted(folder: Path, options: str = "size=1m") -> Iterator[Path]:
    """A file system in memory, mounted there; skips the test where that is impossible."""
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "", "-t", "tmpfs", "-o", options, "kvcellar-test", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """As if the disk were full beyond that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def real_disk(folder: Path) -> Iterator[Disk]:
    """A disk of 1 MB that fills up to its last byte."""
    with mounted(folder) as root:
        filler = root / "filler"

        def fill() -> None:
            with filler.open("ab", buffering=0) as file:
                for n in (4096, 1):
                    with suppress(OSError):
                        while True:
                            assert os.write(file.fileno(), bytes(n))

        yield Disk(root, f"the disk mounted at {root} is full", fill, filler.unlink)


@contextmanager
def limited_disk(folder: Path) -> Iterator[Disk]:
    """A folder in which no file can grow once it is full."""
    folder.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(n_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))

    try:
        yield Disk(
            folder,
            "a file would be larger than is allowed",
            lambda: limit(0),
            lambda: limit(soft),
        )
    finally:
        limit(soft)


DISKS = {"real": real_disk, "limited": limited_disk}


def is_full(folder: Path) -> bool:
    """Whether not even a byte can be written there."""
    probe = folder / "probe"
    with suppress(OSError):
        probe.write_bytes(b"1")
    found = probe.stat().st_size == 0 if probe.exists() else True
    probe.unlink(missing_ok=True)
    return found
