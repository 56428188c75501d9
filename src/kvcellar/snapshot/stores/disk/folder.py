"""The folder of a store: what marks it as one, and which file is its index.

::

    kvcellar-store-1        empty; the format's version is in the name, so nothing can damage it
    index-1.sqlite          the index; where it is made anew, index-2.sqlite, and so on
    values/5e/KEY.GENERATION

An index appears complete, by a link that only one process can make; the newest counts. So those
that have the older one open notice, and SQLite's log of one is never taken for that of another.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvcellar.errors import StoreError
from kvcellar.snapshot.stores.disk.files import (
    VALUES,
    Damaged,
    Name,
    files_in,
    header_of,
    remove,
    sync_folder,
)
from kvcellar.snapshot.stores.disk.index import Index, Row, create

VERSION = 1
_MARK = re.compile("kvcellar-store-([0-9]{1,9})")
_INDEX = re.compile(r"index-([0-9]{1,9})\.sqlite")
_UNFINISHED = re.compile(r"unfinished-[0-9a-f]{16}\.sqlite(-wal|-shm|-journal)?")


def prepare(root: Path) -> None:
    """Make a folder a store, if it is none yet and empty.

    Raises:
        StoreError: it is something else, or of a newer version.
    """
    if not root.exists():
        root.mkdir(parents=True, exist_ok=True)
    if not is_store(root):
        if any(root.iterdir()) and not is_store(root):
            raise StoreError(f"{root} is not a store and not empty: name an empty or a new folder")
        (root / f"kvcellar-store-{VERSION}").touch()
        (root / VALUES).mkdir(exist_ok=True)


def is_store(root: Path) -> bool:
    """Whether the folder is marked as a store.

    Raises:
        StoreError: it is no folder, or a store of a newer version.
    """
    if not root.is_dir():
        raise StoreError(f"{root} is no folder: a store on disk is a folder")
    versions = [int(mark[1]) for file in root.iterdir() if (mark := _MARK.fullmatch(file.name))]
    if versions and max(versions) > VERSION:
        raise StoreError(
            f"{root} is a store of version {max(versions)}, here {VERSION} is known: "
            "update kvcellar, or name another folder"
        )
    return bool(versions)


def newest_index(root: Path) -> int:
    """The number of the index that counts, 0 if there is none."""
    return max((number for number, _ in _indexes(root)), default=0)


def index_path(root: Path, number: int) -> Path:
    """Where the index of that number lies."""
    return root / f"index-{number}.sqlite"


def make_index(root: Path, number: int, sync: bool) -> None:
    """Make an index of the files of values, unless another process was faster; drop older ones."""
    unfinished = root / f"unfinished-{os.urandom(8).hex()}.sqlite"
    try:
        create(unfinished, rows_of_files(root), sync)
        with suppress(FileExistsError):
            os.link(unfinished, index_path(root, number))
            _catch_up(root, number, sync)
        if sync:
            sync_folder(root)
    finally:
        _remove_database(unfinished)
    for older, path in list(_indexes(root)):
        if older < number:
            _remove_database(path)


def _catch_up(root: Path, number: int, sync: bool) -> None:
    """Enter what others wrote and entered in the older index while this one was being made.

    From now on they see that it is there, and enter what they write in this one.
    """
    index = Index(index_path(root, number), sync)
    try:
        with index.transaction():
            for row in rows_of_files(root):
                if index.row(row.name.key) is None:
                    index.add(row)
    finally:
        index.close()


def rows_of_files(root: Path) -> list[Row]:
    """A row for each key that a whole file is there for, those put longest ago first.

    The values themselves are not read: they are checked when they are asked for.
    """
    found: dict[str, Row] = {}
    for name, file in files_in(root):
        with suppress(Damaged, OSError):
            entry = header_of(Path(file.path)).entry
            if entry.key == name.key:
                found[name.key] = Row(entry, name)
    return sorted(found.values(), key=lambda row: row.entry.created)


def remove_leftovers(root: Path, min_age_s: float) -> int:
    """Remove indexes that were never finished or have been replaced; how many bytes they had."""
    newest, freed = newest_index(root), 0
    for number, path in list(_indexes(root)):
        if number < newest and _is_older(path, min_age_s):
            freed += _remove_database(path)
    for file in list(root.iterdir()):
        if _UNFINISHED.fullmatch(file.name) and _is_older(file, min_age_s):
            freed += remove(file)
    return freed


def strays(root: Path, known: set[Name], min_age_s: float = 0.0) -> Iterator[Path]:
    """Files of values that are not among the known, unless they were written to just now."""
    for name, file in files_in(root):
        if name not in known and _is_older(Path(file.path), min_age_s):
            yield Path(file.path)


def _indexes(root: Path) -> Iterator[tuple[int, Path]]:
    for file in root.iterdir():
        if match := _INDEX.fullmatch(file.name):
            yield int(match[1]), file


def _remove_database(path: Path) -> int:
    others = [path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal")]
    return sum(remove(file) for file in (path, *others))


def _is_older(path: Path, age_s: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime >= age_s
    except FileNotFoundError:
        return False
