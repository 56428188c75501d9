"""Atomic writes: a file is written as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcellar.errors import SnapshotFileError
from kvcellar.files import check_regular, why


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty file beside the path; at a good end, sync it and move it to the path.

    It gets the permissions of the file that it replaces. For a link, its target is replaced.

    ::

        with replacing(path) as beside:
            beside.write_bytes(data)

    Raises:
        SnapshotFileError: it cannot be written, or what is there is no file; that is unchanged.
    """
    target = Path(os.path.realpath(path))
    beside = target.parent / f".kvcellar-{secrets.token_hex(8)}"
    try:
        old = _mode_of(path)
        beside.touch(0o666 if old is None else 0o600, exist_ok=False)
        mode = stat.S_IMODE(beside.stat().st_mode) if old is None else old
        yield beside
        _sync(beside)
        beside.chmod(mode)  # the writer may have put another file in its place
        beside.replace(target)
    except OSError as error:
        raise SnapshotFileError(f"cannot write {path}: {why(error)}") from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _mode_of(path: Path) -> int | None:
    """Return the permissions of the file there, None if there is none; refuse anything else."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    check_regular(mode)
    return stat.S_IMODE(mode)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
