"""The control groups of this process, in which Linux limits what containers may use.

Groups are nested, and each may set limits: all on the way from the root to the process's own count.
There are two generations of them. The second has one tree, the first one a controller; where
both are mounted, each controller is in one of them.

A container often sees its own group as the root of what is mounted, though ``/proc/self/cgroup``
gives the path on the host: then the root is all there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class Group(NamedTuple):
    """A group on the way to the process's own.

    Attributes:
        folder: its files.
        version: 1 or 2.
    """

    folder: Path
    version: int

    def read(self, name: str) -> str | None:
        """What a file of it says; None where there is none."""
        try:
            return (self.folder / name).read_text().strip()
        except (OSError, ValueError):
            return None


@lru_cache(maxsize=4)
def groups(controller: str, root: Path = Path("/")) -> tuple[Group, ...]:
    """The groups that limit this process through a controller, from the innermost out.

    They are looked for once: a process is put into its groups before it starts.

    Args:
        controller: "cpu" or "memory".
        root: where ``proc`` is.
    """
    found: list[Group] = []
    for mount in _mounts(root):
        if mount.version == 1 and controller not in mount.options:
            continue
        own = _own_path(root, controller if mount.version == 1 else "")
        if own is not None:
            found.extend(mount.way(own))
    return tuple(found)


class _Mount(NamedTuple):
    """A tree of groups: ``top`` is the group that ``place`` shows."""

    place: Path
    top: PurePosixPath
    version: int
    options: frozenset[str]

    def way(self, own: PurePosixPath) -> Iterator[Group]:
        """The groups from that path up to the one that is mounted."""
        within = own.relative_to(self.top) if own.is_relative_to(self.top) else PurePosixPath()
        for part in (within, *within.parents):
            folder = self.place / part
            if ".." not in part.parts and folder.is_dir():
                yield Group(folder, self.version)


def _mounts(root: Path) -> Iterator[_Mount]:
    """Lines are ``id parent device top place options [optional]... - type source options``."""
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if len(before) < 5 or len(after) < 3 or after[0] not in ("cgroup", "cgroup2"):
            continue
        top, place = (each.replace("\\040", " ") for each in before[3:5])
        version = 2 if after[0] == "cgroup2" else 1
        options = frozenset(after[2].split(","))
        yield _Mount(root / place.lstrip("/"), PurePosixPath(top), version, options)


def _own_path(root: Path, controller: str) -> PurePosixPath | None:
    """Lines are ``id:controllers:path``; the second generation has no controllers there."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and controller in controllers.split(","):
            return PurePosixPath(path)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
