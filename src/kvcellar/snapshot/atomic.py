"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from kvcellar.errors import SnapshotFileError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside the path, which takes its place, and is on the disk, when the block ends well.

    ::

        with replacing(path) as beside:
            beside.write_bytes(data)

    Raises:
        SnapshotFileError: it cannot be written; what was there is as it was.
    """
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield beside
        _sync(beside)
        beside.replace(path)
    except OSError as error:
        raise SnapshotFileError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
