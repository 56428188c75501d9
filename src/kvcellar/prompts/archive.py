"""Move the blocks of a text from one store to another, in one file.

The file is an uncompressed zip::

    000000.safetensors     the values as they were stored, in the order of the text
    000001.safetensors
    index.json             {"format": "kvcellar-prompts", "version": 1, "entries": [
                              {"key": …, "note": {…}, "n_bytes": …, "hash": …}, …]}

The file is not trusted: no name in it becomes a path, nothing in it is larger than the file, and
all of it is checked before any of it goes into a store. Whether K and V are those of the tokens
cannot be checked, so import only files from people whose results you would use.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from kvcellar.errors import (
    OptionError,
    SnapshotError,
    SnapshotFileError,
    StoreError,
    check_kind,
    check_path,
)
from kvcellar.files import open_regular, why
from kvcellar.prompts.blocks import check_block
from kvcellar.snapshot.atomic import replacing
from kvcellar.stores.base import BytesLike, Entry, Note, Store, check_key, check_store, encode_note

FORMAT, VERSION = "kvcellar-prompts", 1
_INDEX = "index.json"
_MAX_INDEX = 256 << 20
_MAX_ENTRIES = 1_000_000
_FAILURES = (
    zipfile.BadZipFile,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    RuntimeError,  # encrypted; and its subclasses: nested too deeply, a method that is not known
    OverflowError,
    struct.error,
)


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the blocks of a file, once all were put.

    Attributes:
        n_new: blocks that were put and are there.
        n_held: blocks that were there before and still are.
        n_lost: blocks that are not there, because the store has no room for all.
        n_bytes: bytes of the new ones.
    """

    n_new: int
    n_held: int
    n_lost: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class _Item:
    key: str
    note: Note
    n_bytes: int
    digest: str


def export_blocks(store: Store, blocks: Sequence[Entry], path: Path) -> int:
    """Write consecutive blocks, from the first of their text on; return the bytes of the file.

    Raises:
        SnapshotFileError: a block is damaged or gone, or the file cannot be written; an older file
            is as it was.
    """
    check_store(store)
    path = check_path("path", path)
    for block in check_kind("blocks", blocks, list, tuple):
        check_kind("blocks", block, Entry)
    with replacing(path) as beside:
        _write(store, blocks, beside)
    return path.stat().st_size


def check_export(path: Path) -> None:
    """Check that all of a file can be imported, before there is a store to put it into.

    Raises:
        SnapshotFileError: the file is damaged, or no export.
        LibraryError: values are compressed by a library that is not installed.
    """
    with _opened(check_path("path", path)) as archive:
        _checked(archive)


def import_blocks(store: Store, path: Path) -> Imported:
    """Put the blocks of a file into a store, under their keys and with their notes.

    Blocks go in from the last to the first, and those that are there are touched, so a store that
    runs out of room drops the end of the text.

    Raises:
        SnapshotFileError: the file is damaged, or no export; nothing was put.
        StoreError: a block cannot be put; the message names it, and how many were.
    """
    check_store(store)
    path = check_path("path", path)
    with _opened(path) as archive:
        items = _checked(archive)
        put: list[_Item] = []
        for i, item in reversed(list(enumerate(items))):
            if not store.touch(item.key):
                _put(store, item, _value(archive, i, item), f"{len(put)} of {len(items)} went in")
                put.append(item)
        there = {item.key for item in items if store.has(item.key)}
    new = [item for item in put if item.key in there]
    n_bytes = sum(item.n_bytes for item in new)
    return Imported(len(new), len(there) - len(new), len(items) - len(there), n_bytes)


def _put(store: Store, item: _Item, value: BytesLike, so_far: str) -> None:
    try:
        fits = store.put(item.key, [value], item.note)
    except StoreError as error:
        raise StoreError(f"block {item.key}: {error}; {so_far}") from error
    if not fits:
        raise StoreError(f"block {item.key} alone exceeds the store's budget; {so_far}")


# -- writing


def _write(store: Store, blocks: Sequence[Entry], path: Path) -> None:
    about: list[dict[str, Any]] = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for i, block in enumerate(blocks):
            if (value := store.get(block.key)) is None:
                raise SnapshotFileError(f"block {block.key} is damaged, or was removed just now")
            try:
                check_block(block.key, block.note, value)
            except SnapshotFileError as error:
                raise SnapshotFileError(f"block {block.key}: {error}") from error
            data = bytes(value)
            archive.writestr(zipfile.ZipInfo(_name(i)), data)
            about.append(
                {
                    "key": block.key,
                    "note": dict(block.note),
                    "n_bytes": len(data),
                    "hash": _hash(data),
                }
            )
        index = {"format": FORMAT, "version": VERSION, "entries": about}
        archive.writestr(zipfile.ZipInfo(_INDEX), json.dumps(index).encode())


def _name(i: int) -> str:
    return f"{i:06}.safetensors"


def _hash(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


# -- reading


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the file; whatever reading it raises becomes an error of the file."""
    try:
        with _file(path) as file, zipfile.ZipFile(file) as archive:
            yield archive
    except SnapshotError as error:
        if isinstance(error, SnapshotFileError):
            raise SnapshotFileError(f"{path}: {error}") from error
        raise
    except OptionError as error:
        raise SnapshotFileError(f"{path}: {error}") from error
    except _FAILURES as error:
        raise SnapshotFileError(
            f"{path} is no export of a prompt cache, or damaged: {error!s:.200}"
        ) from error


def _file(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise SnapshotFileError(f"cannot be read: {why(error)}") from error


def _checked(archive: zipfile.ZipFile) -> list[_Item]:
    """Read every value and return what the index lists."""
    assert archive.fp is not None
    items = _items(archive, os.fstat(archive.fp.fileno()).st_size)
    for i, item in enumerate(items):
        value = _value(archive, i, item)
        try:
            check_block(item.key, item.note, value)
        except SnapshotError as error:
            raise SnapshotFileError(f"block {item.key}: {error}") from error
    return items


def _items(archive: zipfile.ZipFile, n_file_bytes: int) -> list[_Item]:
    """Return what the index lists, if the file holds exactly that."""
    found = json.loads(_member(archive, _INDEX, _MAX_INDEX))
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise SnapshotFileError("this is no export of a prompt cache")
    if found.get("version") != VERSION:
        raise SnapshotFileError(
            f"version {found.get('version')!r:.20}, here {VERSION} is known: update kvcellar"
        )
    items = [_item(one) for one in found["entries"]]
    names = [info.filename for info in archive.infolist()]
    if not items or len(items) > _MAX_ENTRIES:
        raise SnapshotFileError(f"{len(items)} blocks")
    if sorted(names) != sorted([*(_name(i) for i in range(len(items))), _INDEX]):
        raise SnapshotFileError("files in it are missing, or were added")
    if sum(info.file_size for info in archive.infolist()) > n_file_bytes:
        raise SnapshotFileError("it claims to hold more than it is long")
    _check_chain(items)
    return items


def _item(found: Any) -> _Item:
    note, n_bytes, digest = found["note"], found["n_bytes"], found["hash"]
    fits = isinstance(note, dict) and isinstance(n_bytes, int) and isinstance(digest, str)
    if not fits:
        raise SnapshotFileError("its index is damaged")
    encode_note(note)
    return _Item(check_key(found["key"]), note, n_bytes, digest)


def _check_chain(items: list[_Item]) -> None:
    """Refuse blocks that do not follow each other: nothing could find them."""
    if items[0].note.get("start") != 0:
        raise SnapshotFileError(f"block {items[0].key} does not begin its text")
    for before, item in pairwise(items):
        if item.note.get("parent") != before.key:
            raise SnapshotFileError(f"block {item.key} does not follow the one before it")


def _value(archive: zipfile.ZipFile, i: int, item: _Item) -> bytes:
    data = _member(archive, _name(i), item.n_bytes)
    if len(data) != item.n_bytes or _hash(data) != item.digest:
        raise SnapshotFileError(f"block {item.key} is damaged")
    return data


def _member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """Read a file in the archive, which must be uncompressed and of at most ``most`` bytes."""
    info = archive.getinfo(name)
    plain = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
    if not plain or not 0 <= info.file_size <= most:
        raise SnapshotFileError(f"{name} in it is compressed, or too large")
    with archive.open(info) as file:
        return file.read(info.file_size)
