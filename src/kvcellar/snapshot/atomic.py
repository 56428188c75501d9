"""Atomic writes: a file is written as a whole or not at all.

A file is written in a folder of its own beside its place, ``.kvcellar-`` and 16 hexadecimal digits,
because libraries that write it may put files of theirs beside it. A process that is killed leaves
that folder; whoever writes to the same place a day later removes it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcellar.disk_errors import disk_trouble
from kvcellar.errors import SnapshotFileError
from kvcellar.files import check_regular

_FOLDER = re.compile(r"\.kvcellar-[0-9a-f]{16}")
_LEFT_S = 24 * 3600
"""Seconds after which what is being written was left by a process that ended."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty file near the path; at a good end, sync it and move it to the path.

    It gets the permissions of the file that it replaces; a new file has those that the umask
    leaves. For a link, its target is replaced.

    ::

        with replacing(path) as beside:
            beside.write_bytes(data)

    Raises:
        SnapshotFileError: it cannot be written, or what is there is no file; that is unchanged.
    """
    target = Path(os.path.realpath(path))
    folder = target.parent / f".kvcellar-{secrets.token_hex(8)}"
    beside = folder / "file"
    try:
        old = _mode_of(path)
        _remove_left(target.parent)
        folder.mkdir(0o700)
        beside.touch(0o666 if old is None else 0o600, exist_ok=False)
        mode = stat.S_IMODE(beside.stat().st_mode) if old is None else old
        yield beside
        _sync(beside)
        beside.chmod(mode)  # the writer may have put another file in its place
        beside.replace(target)
    except OSError as error:
        raise SnapshotFileError(f"cannot write {path}: {_why(error, path, folder)}") from error
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except BaseException:  # one from outside, in the middle
            _remove(folder)
            raise


def _remove(folder: Path) -> None:
    """Remove a folder, whatever exceptions come from outside meanwhile; the last one goes on."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        _remove(folder)
        raise


def _mode_of(path: Path) -> int | None:
    """Return the permissions of the file there, None if there is none; refuse anything else."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    check_regular(mode)
    return stat.S_IMODE(mode)


def _remove_left(parent: Path) -> None:
    """Remove what processes that were killed left; what cannot be removed stays."""
    with suppress(OSError), os.scandir(parent) as found:
        for entry in found:
            if _FOLDER.fullmatch(entry.name):
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _LEFT_S:
                        shutil.rmtree(entry.path, ignore_errors=True)


def _why(error: OSError, path: Path, folder: Path) -> str:
    """Say what failed, in terms of the path and not of the folder that nobody knows."""
    if error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(folder):
        error = OSError(error.errno, error.strerror, str(folder.parent))
    return disk_trouble(error, path)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
