"""One self-describing file per value, so that the index can be rebuilt from the files.

::

    magic, version, length of the JSON, length of the value,
    xxh3-128 of the value, xxh3-128 of all before it and of the JSON
    JSON: key, time of creation, note
    zeros up to a multiple of 64
    the value

A file is written once, under a name that is never used again (``KEY.GENERATION``), its header
last. So an open file reads as one whole value, whatever happens to its name, and a file whose
writer died has no header.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import xxhash

from kvcellar.files import NotAFile, open_regular, why
from kvcellar.stores.base import MAX_NOTE, Entry, encode_note, is_key
from kvcellar.stores.disk.access import Access

VALUES = "values"
_MAGIC = b"KVCVALUE"
_VERSION = 1
_FIXED = struct.Struct("<8sIIQ16s")
_DIGEST = 16
_ALIGNMENT = 64
_MAX_JSON = MAX_NOTE + 1024
_GENERATION = re.compile("[0-9a-f]{16}")
_BINARY = getattr(os, "O_BINARY", 0)


class Damaged(Exception):
    """A file does not hold what it should; the store handles it."""


@dataclass(frozen=True, slots=True)
class Name:
    """The key of a file, and a random number of the put that wrote it."""

    key: str
    generation: str

    @classmethod
    def new(cls, key: str) -> Name:
        """A name that no other put has."""
        return cls(key, os.urandom(8).hex())

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """The name of a file, None if it is no file of values."""
        key, _, generation = text.rpartition(".")
        name = cls(key, generation)
        return name if name.is_sound else None

    @property
    def is_sound(self) -> bool:
        """Whether it names a file of values."""
        return is_key(self.key) and _GENERATION.fullmatch(self.generation) is not None

    def under(self, root: Path) -> Path:
        """The path of the file; keys are spread evenly over 256 folders."""
        folder = xxhash.xxh3_64_hexdigest(self.key.encode())[:2]
        return root / VALUES / folder / f"{self.key}.{self.generation}"


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: what describes its value."""

    entry: Entry
    digest: bytes
    start: int


def write_value(
    path: Path, entry: Entry, pieces: Sequence[memoryview], fsync: bool, access: Access
) -> None:
    """Write a new file; with ``fsync``, wait until it and its name are on disk.

    If anything goes wrong, there is no file.
    """
    access.make_folder(path.parent.parent)
    access.make_folder(path.parent)
    try:
        with FileIO(path, "x", opener=access.opener) as file:
            access.settle(file)
            _write(file.fileno(), entry, pieces)
            if fsync:
                os.fsync(file.fileno())
        if fsync:
            sync_folder(path.parent)
            sync_folder(path.parent.parent)
    except BaseException:
        remove(path)
        raise


def _write(descriptor: int, entry: Entry, pieces: Sequence[memoryview]) -> None:
    about = {"key": entry.key, "created": entry.created, "note": dict(entry.note)}
    text = json.dumps(about).encode()
    start, digest = _start(len(text)), xxhash.xxh3_128()
    os.lseek(descriptor, start, os.SEEK_SET)
    for piece in pieces:
        digest.update(piece)
        write_all(descriptor, piece)
    os.ftruncate(descriptor, start + entry.n_bytes)
    fixed = _FIXED.pack(_MAGIC, _VERSION, len(text), entry.n_bytes, digest.digest())
    os.lseek(descriptor, 0, os.SEEK_SET)
    write_all(descriptor, memoryview(fixed + xxhash.xxh3_128_digest(fixed + text) + text))


def write_all(descriptor: int, piece: memoryview) -> None:
    """Write all of it; the system may take it in parts."""
    while piece:
        piece = piece[os.write(descriptor, piece) :]


def _start(n_json: int) -> int:
    return -(-(_FIXED.size + _DIGEST + n_json) // _ALIGNMENT) * _ALIGNMENT


def read_header(descriptor: int) -> Header:
    """Read the header of a file.

    Raises:
        Damaged: there is none, or the file is not as long as it says.
    """
    fixed, digest = os.read(descriptor, _FIXED.size), os.read(descriptor, _DIGEST)
    if len(fixed + digest) < _FIXED.size + _DIGEST:
        raise Damaged("no header")
    magic, version, n_json, n_bytes, of_value = _FIXED.unpack(fixed)
    if magic != _MAGIC or version != _VERSION or n_json > _MAX_JSON:
        raise Damaged("no header")
    text = os.read(descriptor, n_json)
    if xxhash.xxh3_128_digest(fixed + text) != digest:
        raise Damaged("header does not match its checksum")
    start = _start(n_json)
    if os.fstat(descriptor).st_size != start + n_bytes:
        raise Damaged("not as long as its header says")
    return Header(_entry(text, n_bytes), of_value, start)


def _entry(text: bytes, n_bytes: int) -> Entry:
    try:
        about = json.loads(text)
        note, created = about["note"], float(about["created"])
        encode_note(note)
    except (KeyError, TypeError, ValueError):
        raise Damaged("header that nobody wrote") from None
    if not is_key(about["key"]):
        raise Damaged("header that nobody wrote")
    return Entry(about["key"], n_bytes, created, created, note)


def header_of(path: Path) -> Header:
    """:func:`read_header` of the file of that name."""
    with _open(path) as file:
        return read_header(file.fileno())


def map_value(path: Path, key: str) -> memoryview:
    """Map the value and check it; nothing is copied.

    Raises:
        Damaged: it is not what was put under that key.
    """
    with _open(path) as file:
        header = read_header(file.fileno())
        if header.entry.key != key:
            raise Damaged(f"holds the value of {header.entry.key}")
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    value = mapped[header.start : header.start + header.entry.n_bytes]
    if xxhash.xxh3_128_digest(value) != header.digest:
        raise Damaged("value does not match its checksum")
    return value


def _open(path: Path) -> BinaryIO:
    """Open a file of values; anything else in its place counts as damage."""
    try:
        return open_regular(path, follow_links=False)
    except NotAFile as error:
        raise Damaged(f"no file of values: {why(error)}") from None


def files_in(root: Path) -> Iterator[tuple[Name, os.DirEntry[str]]]:
    """All files of values, also those of writers that died."""
    try:
        folders = [entry.path for entry in os.scandir(root / VALUES) if entry.is_dir()]
    except FileNotFoundError:
        return
    for folder in folders:
        with os.scandir(folder) as found:
            for entry in found:
                if (name := Name.parse(entry.name)) and name.under(root) == Path(entry.path):
                    yield name, entry


def size_of(path: Path) -> int:
    """Bytes of a file, 0 if it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def remove(path: Path) -> int:
    """Remove a file if possible; return the bytes freed."""
    size = size_of(path)
    try:
        path.unlink()
    except OSError:
        return 0
    return size


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk, where the system can."""
    if os.name != "posix":
        return
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
