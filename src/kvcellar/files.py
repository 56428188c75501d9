"""Files that others may have made: opened only if they are regular files, and never waited for.

Models, snapshots, state files of llama.cpp and exports are all opened by :func:`open_regular`. A
pipe, a socket, a folder or a device under such a name is refused at once: reading one may wait for
ever, never end, or do something to the device.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_KINDS: Mapping[int, str] = MappingProxyType(
    {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFLNK: "a link",
    }
)


class NotAFile(OSError):
    """What is there is no regular file, or an empty one; ``strerror`` says which.

    An ``OSError``, so that callers turn both kinds into an error of their own in one place.
    """


class FileStamp(NamedTuple):
    """Which file it is, and when it was last changed.

    ``ctime_ns`` is when the content or anything else about the file last changed, which no program
    can set; on Windows it is when the file was made.
    """

    device: int
    inode: int
    n_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: BinaryIO) -> FileStamp:
        """The stamp of an open file."""
        return cls._from(os.fstat(file.fileno()))

    @classmethod
    def at(cls, path: str | Path) -> FileStamp | None:
        """The stamp of what is at a path now; None if that cannot be told."""
        try:
            return cls._from(Path(path).stat())
        except (OSError, ValueError):
            return None

    @classmethod
    def _from(cls, status: os.stat_result) -> FileStamp:
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


def open_regular(path: str | Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file that is not empty for reading.

    It is looked at before it is opened, since opening a device or a pipe can have effects, and once
    more when it is open, since another may have taken its place between the two.

    Args:
        path: the file.
        follow_links: whether a link counts as the file that it names.

    Raises:
        NotAFile: it is a folder, a pipe, a socket, a device, or empty; or a link, if those are not
            followed.
        OSError: it is missing or cannot be opened.
    """
    more = _NO_WAIT | (0 if follow_links else _NO_LINK)
    try:
        check_regular(Path(path).stat(follow_symlinks=follow_links).st_mode)
        # The file owns its descriptor from the start, so an interruption here leaves none open.
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | more))  # noqa: SIM115
    except ValueError as error:  # a null byte, or what the file system cannot encode
        raise OSError(errno.EINVAL, f"no file can have that name ({error})") from error
    except IsADirectoryError as error:
        raise _not_a_file(stat.S_IFDIR) from error
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise _not_a_file(stat.S_IFLNK) from error
        raise
    try:
        status = os.fstat(file.fileno())
        check_regular(status.st_mode)
        if status.st_size == 0:  # also the files of /proc, some of which wait for something to read
            raise NotAFile(errno.ENODATA, "it is empty")
    except BaseException:
        file.close()
        raise
    return file


def check_regular(mode: int) -> None:
    """Raise NotAFile unless ``st_mode`` is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise _not_a_file(stat.S_IFMT(mode))


def _not_a_file(kind: int) -> NotAFile:
    return NotAFile(errno.EINVAL, f"it is {_KINDS.get(kind, 'no file')}; name a file")


def why(error: OSError) -> str:
    """What is wrong, in words; for the message of an error that names the path itself."""
    return error.strerror or str(error)
