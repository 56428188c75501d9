"""The index of a store on disk: rows in SQLite, rebuilt from the files of values when damaged.

The folder of a store::

    kvcellar-store-1        empty; the format's version is in the name, so nothing can damage it
    index-1.sqlite          the index; after a rebuild index-2.sqlite, and so on
    values/5e/KEY.GENERATION

1. The index with the largest number counts. It appears complete, by a link that only one process
   can make, so a process that has an older one open notices, and SQLite's log of one is never
   taken for that of another.
2. Work on an index counts if that was still the newest afterwards; else it is done again on the
   new one. A process that rebuilds looks at the files once more after the link: what others had
   entered in the older index by then is in the new one too.
3. Databases are in WAL mode: a use of a value is a commit without a sync, and readers do not wait.
   After a power cut the last commits may be missing, which loses entries and damages none.
4. On a full disk SQLite can neither open an index nor commit to it. A copy of it in memory stands
   in then: all can be read, and rows can be dropped, so that files can be removed. Each step first
   tries to return to the index on the disk, which is told then what was dropped. If the process
   ends before, the index has rows without a file, which count as absent.
5. Work that was interrupted is taken back before the next begins.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvcellar.disk_errors import NO_ROOM, disk_trouble
from kvcellar.errors import ClosedError, StoreError
from kvcellar.stores.base import FIELDS, REMEMBERED, Entry, Field, decode_note, encode_note, keys_in
from kvcellar.stores.disk.access import Access, admit
from kvcellar.stores.disk.files import (
    VALUES,
    Damaged,
    Name,
    files_in,
    header_of,
    remove,
    sync_folder,
    write_all,
)

_log = logging.getLogger(__name__)

VERSION = 1
_MARK = re.compile("kvcellar-store-([0-9]{1,9})")
_INDEX = re.compile(r"index-([0-9]{1,9})\.sqlite")
_UNFINISHED = re.compile(r"unfinished-[0-9a-f]{16}\.sqlite(-wal|-shm|-journal)?")


T = TypeVar("T")

_PASSING = ("locked", "busy", "disk i/o", "full", "unable to open", "interrupted")
"""Words in SQLite's errors about the world around a file; all others are about what is in it."""

_FAILURES = (sqlite3.Error, OSError, UnicodeDecodeError)
"""The last is what a message of SQLite raises that quotes a damaged file."""

_ATTEMPTS = 50

_PROBE_BYTES = 1 << 16
"""SQLite needs half of that beside an index before it can be read."""


SCHEMA = (
    """CREATE TABLE entries (
        key TEXT PRIMARY KEY,
        generation TEXT NOT NULL,
        n_bytes INTEGER NOT NULL,
        created REAL NOT NULL,
        used REAL NOT NULL,
        note TEXT NOT NULL,
        turn INTEGER NOT NULL,
        parent TEXT,
        text TEXT
    )""",
    "CREATE TABLE evicted (key TEXT PRIMARY KEY)",
    "CREATE INDEX by_turn ON entries (turn, n_bytes)",
    "CREATE INDEX by_parent ON entries (parent, turn)",
    "CREATE INDEX by_text ON entries (text, turn)",
)
"""``turn`` counts uses, because clocks may stand still or go back. The last two columns are
keys in the note, by which values are found."""

IN_MEMORY = Path(":memory:")
_WAIT_S = 60.0
_WAIT_ALONE_S = 1.0
_COLUMNS = "key, generation, n_bytes, created, used, note"
_NEXT = "(SELECT coalesce(max(turn), 0) + 1 FROM entries)"


class NoRoom(StoreError):
    """Nothing can be written for lack of room."""


class LiveIndex:
    """The newest index, opened and shared by threads; rebuilt when it turns out to be damaged.

    Work may be done twice, when the index is replaced meanwhile.

    Args:
        root: the folder of the store.
        read_only: keep an index in memory, of what is there now.
        sync: see :class:`Index`.
        access: the modes of what is made in the store.
    """

    def __init__(self, root: Path, read_only: bool, sync: bool, access: Access) -> None:
        self._root = root
        self._read_only = read_only
        self._sync = sync
        self._access = access
        self._stand_in: Index | None = None
        self._no_room = ""
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._index: Index | None = None
        self._number = 0
        self._closed = False
        try:
            self.read(Index.n_bytes)
        except BaseException:
            self.close()
            raise

    def read(self, work: Callable[[Index], T]) -> T:
        """Do work that changes nothing and needs no transaction."""
        try:
            return self._do(work)
        except NoRoom:  # SQLite may need memory that it shares, which is a file
            return self.shrink(work)

    def write(self, work: Callable[[Index], T]) -> T:
        """Do work in a transaction.

        Raises:
            NoRoom: the disk is full; nothing was done.
        """

        def transact(index: Index) -> T:
            if index is self._stand_in:
                raise NoRoom(self._no_room)
            with index.transaction():
                return work(index)

        return self._do(transact)

    def shrink(self, work: Callable[[Index], T]) -> T:
        """Do work in a transaction that only drops rows; a full disk does not hinder it."""
        with suppress(NoRoom):
            return self.write(work)
        with suppress(NoRoom):  # what is moved out of SQLite's log leaves room in it
            self._do(Index.checkpoint)
            return self.write(work)
        with self._lock:
            self._stand_in = self._stand_in or self._copy()
            with self._stand_in.transaction():
                return work(self._stand_in)

    @property
    def no_room(self) -> str:
        """Why the index on the disk cannot be used for lack of room; "" if it can."""
        return self._no_room if self._stand_in is not None else ""

    def close(self) -> None:
        """Close the file; twice is fine. After a fork only the process that opened it does so."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            self._let_go()
            stand_in, self._stand_in = self._stand_in, None
            if stand_in is not None:
                stand_in.close()

    def _do(self, work: Callable[[Index], T]) -> T:
        self._check_process()
        with self._lock:
            if self._closed:
                raise ClosedError(f"the store in {self._root} was closed: open it again")
            for _ in range(_ATTEMPTS):
                try:
                    result = work(index := self._current())
                    if index is self._stand_in or self._is_newest():
                        return result
                except _FAILURES as error:  # noqa: PERF203
                    self._rebuild_after(error)
        raise StoreError(f"the index of {self._root} is damaged again and again: check the disk")

    def _current(self) -> Index:
        """The index to work on, with nothing half done in it."""
        if self._read_only:
            index = self._index or self._of_files()
        elif self._stand_in is not None and not self._returns():
            index = self._stand_in
        else:
            index = self._newest()
        index.take_back()
        return index

    def _newest(self) -> Index:
        if self._index is None or not self._is_newest():
            self._let_go()
            if (number := newest_index(self._root)) == 0:
                make_index(self._root, 1, self._sync, self._access)
                number = newest_index(self._root)
            self._number = number
            index = Index(index_path(self._root, number), self._sync)
            if any(older < number for older, _ in _indexes(self._root)):
                _catch_up(index, self._root)  # whoever made it was killed before that
            self._index = index
        return self._index

    def _of_files(self) -> Index:
        index = Index(IN_MEMORY)
        with index.transaction():
            for row in rows_of_files(self._root):
                index.add(row)
        self._index = index
        return index

    def _copy(self) -> Index:
        """Copy the index into memory; if it cannot be read, build one there from the files."""
        with suppress(*_FAILURES):
            number = self._number or newest_index(self._root)
            copy = Index(IN_MEMORY)
            if self._index is not None:
                self._index.take_back()
                self._index.copy_to(copy)
            else:
                copy_without_room(index_path(self._root, number), copy)
            copy.check()
            return copy
        copy = Index(IN_MEMORY)
        with copy.transaction():
            for row in rows_of_files(self._root):
                copy.add(row)
        return copy

    def _returns(self) -> bool:
        """Return to the index on the disk, if that is possible by now."""
        stand_in = self._stand_in
        if stand_in is None:
            return True
        try:
            stand_in.take_back()
            gone = [name for name in stand_in.dropped if not stand_in.has(name)]
            index = self._newest()
            index.take_back()
            with index.transaction():
                for name in gone:
                    index.drop(name)
                    if stand_in.was_evicted(name.key) and index.row(name.key) is None:
                        index.remember_eviction(name.key)
        except _FAILURES as error:
            if self._is_damage(error):
                with suppress(*_FAILURES):
                    self._rebuild()
            return False
        self._stand_in = None
        stand_in.close()
        _log.info("the store in %s has room again", self._root)
        return True

    def _rebuild(self) -> None:
        self._let_go()
        make_index(self._root, self._number + 1, self._sync, self._access)

    def _rebuild_after(self, error: Exception) -> None:
        """Rebuild a damaged index, or have a copy stand in; raise an error that neither helps."""
        why = error
        try:
            if not self._is_newest():
                return
            if self._is_damage(error):
                self._rebuild()
                return
        except _FAILURES as failure:
            with suppress(OSError):  # the folder itself may be gone
                if newest_index(self._root) > self._number:
                    return  # the new one was replaced in its turn
            why = failure
        if (no_room := why_no_room(self._root, why)) is not None:
            self._no_room = f"the store in {self._root}: {disk_trouble(no_room, self._root)}"
            if self._index is not None:
                raise NoRoom(self._no_room) from why
            self._stand_in = self._copy()
            return
        said = disk_trouble(why, self._root) if isinstance(why, OSError) else why
        if why is error:
            raise StoreError(f"the store in {self._root} cannot be used: {said}") from error
        raise StoreError(
            f"the index of {self._root} cannot be used ({error}) nor rebuilt: {said}"
        ) from why

    def _is_newest(self) -> bool:
        return self._read_only or newest_index(self._root) == self._number

    def _is_damage(self, error: Exception) -> bool:
        if self._read_only or not self._number or isinstance(error, OSError):
            return False
        if isinstance(error, (IndexDamaged, UnicodeDecodeError)):
            return True
        text = str(error).lower()
        if "readonly" in text:  # a damaged header makes a file read-only, too
            return os.access(index_path(self._root, self._number), os.W_OK)
        return not any(word in text for word in _PASSING)

    def _let_go(self) -> None:
        index, self._index = self._index, None
        if index is not None:
            index.close()

    def _check_process(self) -> None:
        """Call before taking the lock: after a fork, a thread that is gone may hold it for good."""
        if os.getpid() != self._process:
            raise StoreError(
                f"the store in {self._root} was opened before a fork: open it again after it"
            )


class IndexDamaged(sqlite3.DatabaseError):
    """SQLite can read the file, but it does not hold what was written."""


@dataclass(frozen=True, slots=True)
class Row:
    """An entry and the file of its value."""

    entry: Entry
    name: Name

    @classmethod
    def parse(cls, found: tuple[object, ...]) -> Row:
        """A row as SQLite gives it, which may be damaged."""
        key, generation, n_bytes, created, used, note = found
        if (
            isinstance(key, str)
            and isinstance(generation, str)
            and isinstance(n_bytes, int)
            and n_bytes >= 0
            and isinstance(created, float)
            and isinstance(used, float)
            and isinstance(note, str)
            and (name := Name(key, generation)).is_sound
        ):
            return cls(Entry(key, n_bytes, created, used, decode_note(note)), name)
        raise IndexDamaged(f"no such row was written: {found!r:.200}")


class Index:
    """Rows by key, in the order of use. Each verb is one statement or a few.

    Put verbs that belong together into one :meth:`transaction`. SQLite's errors pass through.

    Args:
        path: a file that :func:`create` made, or :data:`IN_MEMORY`.
        sync: whether checkpoints of the log wait for the disk.

    Attributes:
        dropped: of an index in memory, the files whose rows were dropped.
    """

    def __init__(self, path: Path, sync: bool = True) -> None:
        self.path = path
        self.dropped: list[Name] = []
        uri = "file::memory:" if path == IN_MEMORY else f"{path.absolute().as_uri()}?mode=rw"
        self._db = _connect(uri)
        try:
            _set_sync(self._db, sync)
            if path == IN_MEMORY:
                _lay_out(self._db)
            self.check("quick_check")
        except BaseException:
            self.close()
            raise

    def check(self, pragma: str = "integrity_check") -> None:
        """Raise IndexDamaged unless SQLite finds its file sound and the tables are ours."""
        tables = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid"
        laid_out = tuple(sql for (sql,) in self._db.execute(tables))
        (answer,) = self._db.execute(f"PRAGMA {pragma}(1)").fetchone()
        if laid_out != SCHEMA or answer != "ok":
            raise IndexDamaged(f"{self.path}: {answer}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Do all that is inside or nothing; nobody else writes meanwhile."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self.take_back()
            raise

    def take_back(self) -> None:
        """Take back a transaction that was interrupted, if there is one."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def checkpoint(self) -> None:
        """Move the log into the file, as far as nobody hinders it: the log is used again then."""
        self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def copy_to(self, other: Index) -> None:
        """Replace all that another index, in memory, holds."""
        other.fill_from(self._db)

    def fill_from(self, db: sqlite3.Connection) -> None:
        """Replace all that this index, in memory, holds by a copy of a database."""
        db.backup(self._db)

    def row(self, key: str) -> Row | None:
        """The row of a key."""
        found = self._db.execute(f"SELECT {_COLUMNS} FROM entries WHERE key = ?", (key,)).fetchone()
        return None if found is None else Row.parse(found)

    def rows(self) -> list[Row]:
        """All rows, least recently used first."""
        found = self._db.execute(f"SELECT {_COLUMNS} FROM entries ORDER BY turn").fetchall()
        return [Row.parse(row) for row in found]

    def find(self, field: Field, key: str, most: int) -> list[Entry]:
        """Up to ``most`` entries whose note has a key there, most recently used first."""
        wanted = f"SELECT {_COLUMNS} FROM entries WHERE {field} = ? ORDER BY turn DESC LIMIT ?"
        found = (Row.parse(row).entry for row in self._db.execute(wanted, (key, most)))
        return [entry for entry in found if entry.note.get(field) == key]

    def n_bytes(self) -> int:
        """Bytes of all values."""
        (total,) = self._db.execute("SELECT coalesce(sum(n_bytes), 0) FROM entries").fetchone()
        return int(total)

    def add(self, row: Row) -> None:
        """Add a row as the most recently used; its key has none."""
        entry, values = row.entry, f"VALUES (?, ?, ?, ?, ?, ?, {_NEXT}, ?, ?)"
        self._db.execute("DELETE FROM evicted WHERE key = ?", (entry.key,))
        self._db.execute(
            f"INSERT INTO entries ({_COLUMNS}, turn, {', '.join(FIELDS)}) {values}",
            (
                entry.key,
                row.name.generation,
                entry.n_bytes,
                entry.created,
                entry.used,
                encode_note(entry.note),
                *keys_in(entry.note),
            ),
        )

    def use(self, key: str, now: float) -> bool:
        """Make a value the most recently used; False if there is none."""
        change = f"UPDATE entries SET used = ?, turn = {_NEXT} WHERE key = ?"
        return self._db.execute(change, (now, key)).rowcount > 0

    def drop(self, name: Name) -> bool:
        """Drop the row of a file; False if there is none."""
        change = "DELETE FROM entries WHERE key = ? AND generation = ?"
        found = self._db.execute(change, (name.key, name.generation)).rowcount > 0
        if found and self.path == IN_MEMORY:
            self.dropped.append(name)
        return found

    def has(self, name: Name) -> bool:
        """Whether a file has a row."""
        wanted = "SELECT 1 FROM entries WHERE key = ? AND generation = ?"
        return self._db.execute(wanted, (name.key, name.generation)).fetchone() is not None

    def evict(self, max_bytes: int) -> list[Row]:
        """Drop the least recently used rows until the rest is within the budget; return them."""
        excess, victims = self.n_bytes() - max_bytes, list[Row]()
        if excess <= 0:
            return []
        for found in self._db.execute(f"SELECT {_COLUMNS} FROM entries ORDER BY turn"):
            victims.append(Row.parse(found))
            excess -= victims[-1].entry.n_bytes
            if excess <= 0:
                break
        for victim in victims:
            self.drop(victim.name)
            self.remember_eviction(victim.name.key)
        oldest = f"(SELECT max(rowid) FROM evicted) - {REMEMBERED}"
        self._db.execute(f"DELETE FROM evicted WHERE rowid <= {oldest}")
        return victims

    def remember_eviction(self, key: str) -> None:
        """Remember that a key was evicted; it has no row."""
        self._db.execute("REPLACE INTO evicted (key) VALUES (?)", (key,))

    def was_evicted(self, key: str) -> bool:
        """Whether a key was evicted, as far as is remembered."""
        found = self._db.execute("SELECT 1 FROM evicted WHERE key = ?", (key,)).fetchone()
        return found is not None

    def close(self) -> None:
        """Close the file; twice is fine."""
        self._db.close()


def create(path: Path, rows: Iterable[Row], sync: bool, access: Access) -> None:
    """Write a new index to a file that is not there yet, and close it."""
    access.make_file(path)  # SQLite gives its logs the same mode
    db = _connect(f"{path.absolute().as_uri()}?mode=rwc")
    try:
        db.execute("PRAGMA journal_mode=WAL").fetchone()
        _set_sync(db, sync)
        _lay_out(db)
    finally:
        db.close()
    index = Index(path, sync)
    try:
        with index.transaction():
            for row in rows:
                index.add(row)
    finally:
        index.close()


def copy_without_room(path: Path, other: Index) -> None:
    """Replace all that an index in memory holds by what one on a full disk says.

    SQLite wants to share memory with other processes, which is a file; alone it does without.
    """
    with closing(_connect(f"{path.absolute().as_uri()}?mode=rw", _WAIT_ALONE_S)) as db:
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        other.fill_from(db)


def _connect(uri: str, wait_s: float = _WAIT_S) -> sqlite3.Connection:
    db = sqlite3.connect(
        uri, timeout=wait_s, isolation_level=None, check_same_thread=False, uri=True
    )
    db.text_factory = _text
    return db


def _set_sync(db: sqlite3.Connection, sync: bool) -> None:
    db.execute(f"PRAGMA synchronous={'NORMAL' if sync else 'OFF'}")


def _lay_out(db: sqlite3.Connection) -> None:
    for table in SCHEMA:
        db.execute(table)


def _text(found: bytes) -> str:
    """Decode damaged text too: it is refused where it is used, not where it is read."""
    return found.decode(errors="replace")


# -- the folder


def prepare(root: Path) -> Access:
    """Make an empty folder a store; a store stays as it is, but for who may use it.

    Returns:
        The modes of what is made in it.

    Raises:
        StoreError: it is something else, of a newer version, or open to everybody.
    """
    if not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        Access().make_folder(root)
    known = is_store(root)
    if not known and any(root.iterdir()) and not is_store(root):
        raise StoreError(f"{root} is not a store and not empty: name an empty or a new folder")
    access = admit(root, read_only=False)
    if not known:
        access.make_file(root / f"kvcellar-store-{VERSION}")
        access.make_folder(root / VALUES)
    return access


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


def make_index(root: Path, number: int, sync: bool, access: Access) -> None:
    """Build an index from the files of values, unless another process has; drop older ones."""
    unfinished = root / f"unfinished-{os.urandom(8).hex()}.sqlite"
    try:
        create(unfinished, rows_of_files(root), sync, access)
        with suppress(FileExistsError):
            os.link(unfinished, index_path(root, number))
            with closing(Index(index_path(root, number), sync)) as index:
                _catch_up(index, root)
        if sync:
            sync_folder(root)
    finally:
        _remove_database(unfinished)
    for older, path in list(_indexes(root)):
        if older < number:
            _remove_database(path)


def _catch_up(index: Index, root: Path) -> None:
    """Add what others entered in the older index while this one was built (invariant 2)."""
    with index.transaction():
        for row in rows_of_files(root):
            if index.row(row.name.key) is None:
                index.add(row)


def why_no_room(root: Path, error: Exception) -> OSError | None:
    """The system's error if the lack of room in a folder explains another error."""
    if isinstance(error, OSError):
        return error if error.errno in NO_ROOM else None
    text = str(error).lower()
    if not isinstance(error, sqlite3.Error) or not any(word in text for word in _PASSING):
        return None
    unfinished = root / f"unfinished-{os.urandom(8).hex()}.sqlite"
    found = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if "full" in text else None
    try:
        with unfinished.open("xb", buffering=0) as file:
            write_all(file.fileno(), memoryview(bytes(_PROBE_BYTES)))
    except OSError as failure:
        if failure.errno in NO_ROOM:
            return failure
    finally:
        remove(unfinished)
    return found


def rows_of_files(root: Path) -> list[Row]:
    """A row for each key that has a whole file, oldest first.

    Values are not read: they are checked when they are asked for.
    """
    found: dict[str, Row] = {}
    for name, file in files_in(root):
        with suppress(Damaged, OSError):
            entry = header_of(Path(file.path)).entry
            if entry.key == name.key:
                found[name.key] = Row(entry, name)
    return sorted(found.values(), key=lambda row: row.entry.created)


def remove_leftovers(root: Path, min_age_s: float) -> int:
    """Remove indexes that were never finished or were replaced; return the bytes freed."""
    newest, freed = newest_index(root), 0
    for number, path in list(_indexes(root)):
        if number < newest and _is_older(path, min_age_s):
            freed += _remove_database(path)
    for file in list(root.iterdir()):
        if _UNFINISHED.fullmatch(file.name) and _is_older(file, min_age_s):
            freed += remove(file)
    return freed


def strays(root: Path, known: set[Name], min_age_s: float = 0.0) -> Iterator[Path]:
    """Files of values that no known row has, and that are at least that old."""
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
