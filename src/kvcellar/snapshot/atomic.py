"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcellar.errors import SnapshotFileError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside the path, which takes its place, and is on the disk, at a good end.

    ::

        with replacing(path) as beside:
            beside.write_bytes(data)

    Raises:
        SnapshotFileError: it cannot be written; what was there is as it was.
    """
    beside = path.parent / f".kvcellar-{secrets.token_hex(8)}"
    try:
        with beside.open("xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        yield beside
        beside.chmod(mode)  # whoever writes may put another file in its place
        _sync(beside)
        beside.replace(path)
    except OSError as error:
        raise SnapshotFileError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
