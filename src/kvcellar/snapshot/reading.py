"""Snapshots out of files and out of the values of stores."""

from __future__ import annotations

from pathlib import Path

from kvcellar.snapshot.container import from_bytes, read_file
from kvcellar.snapshot.native import understand
from kvcellar.snapshot.saved import Snapshot
from kvcellar.stores.base import Buffer


def read_snapshot(path: str | Path) -> Snapshot:
    """The snapshot in a file.

    Raises:
        SnapshotFileError: the file is missing, no snapshot, of a later version, or damaged.
        LibraryError: it is compressed by a library that is not installed.
    """
    return understand(read_file(Path(path)))


def snapshot_from(value: Buffer) -> Snapshot:
    """The snapshot in a value of a store; raises as :func:`read_snapshot` does."""
    return understand(from_bytes(value))
