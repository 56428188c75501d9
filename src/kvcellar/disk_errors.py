"""What the system's errors about files mean, in words that say what helps.

A full disk, a used up quota, a read-only file system and a missing permission look alike where they
are met, deep in a library that writes a file; what helps differs.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Numbers of the errors that mean that nothing more can be written."""

_DISK_WORDS = {
    errno.ENOSPC: "the disk mounted at {mount} is full ({error}): make room there",
    errno.EDQUOT: "the disk quota on {mount} is used up ({error}): make room, or have it raised",
    errno.EFBIG: "a file would be larger than is allowed ({error}): raise the limit (ulimit -f)",
    errno.EROFS: "the file system mounted at {mount} is read-only ({error}): mount it writable",
    errno.EACCES: "{path} may not be used ({error}): change its owner or mode",
    errno.EPERM: "{path} may not be used ({error}): change its owner or mode",
    errno.EIO: "the disk mounted at {mount} fails ({error}): check it",
    errno.EMFILE: "too many files are open ({error}): close some, or raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine ({error}): close some",
}
_NO_INODES = "the disk mounted at {mount} has no room for another file ({error}): remove some there"


def disk_trouble(error: OSError, path: str | os.PathLike[str]) -> str:
    """Say in words what the system's error means for a path, and what helps.

    A full disk, a used up quota, a read-only file system and a missing permission differ; disks
    are named by the folder where they are mounted.
    """
    number, place = error.errno, Path(os.path.realpath(path))
    words = _DISK_WORDS.get(number or 0)
    if number == errno.ENOSPC and not _has_inodes(place):
        words = _NO_INODES
    said = str(error.strerror or error)
    if words is None:
        return said
    return words.format(mount=_mount_of(place), path=error.filename or path, error=said)


def _existing(place: Path) -> Path:
    """The path, or the first folder above it that can be seen."""
    for one in (place, *place.parents):
        with suppress(OSError):
            if one.exists():
                return one
    return place


def _mount_of(place: Path) -> Path:
    near = _existing(place)
    return next((one for one in (near, *near.parents) if one.is_mount()), near)


def _has_inodes(place: Path) -> bool:
    """Whether there may be more files; file systems without a limit count none."""
    try:
        status = os.statvfs(_existing(place))
    except (OSError, AttributeError):  # the latter: there is no such call on Windows
        return True
    return status.f_files == 0 or status.f_favail > 0
