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
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvcellar.errors import ClosedError, StoreError
from kvcellar.stores.base import FIELDS, REMEMBERED, Entry, Field, decode_note, encode_note, keys_in
from kvcellar.stores.disk.files import (
    VALUES,
    Damaged,
    Name,
    files_in,
    header_of,
    remove,
    sync_folder,
)

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
_COLUMNS = "key, generation, n_bytes, created, used, note"
_NEXT = "(SELECT coalesce(max(turn), 0) + 1 FROM entries)"


class LiveIndex:
    """The newest index, opened and shared by threads; rebuilt when it turns out to be damaged.

    Work may be done twice, when the index is replaced meanwhile.

    Args:
        root: the folder of the store.
        read_only: keep an index in memory, of what is there now.
        sync: see :class:`Index`.
    """

    def __init__(self, root: Path, read_only: bool, sync: bool) -> None:
        self._root = root
        self._read_only = read_only
        self._sync = sync
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
        return self._do(work)

    def write(self, work: Callable[[Index], T]) -> T:
        """Do work in a transaction."""

        def transact(index: Index) -> T:
            with index.transaction():
                return work(index)

        return self._do(transact)

    def close(self) -> None:
        """Close the file; twice is fine. After a fork only the process that opened it does so."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            self._let_go()

    def _do(self, work: Callable[[Index], T]) -> T:
        self._check_process()
        with self._lock:
            if self._closed:
                raise ClosedError(f"the store in {self._root} was closed: open it again")
            for _ in range(_ATTEMPTS):
                try:
                    result = work(self._current())
                    if self._is_newest():
                        return result
                except _FAILURES as error:  # noqa: PERF203
                    self._rebuild_after(error)
        raise StoreError(f"the index of {self._root} is damaged again and again: check the disk")

    def _current(self) -> Index:
        if self._read_only:
            return self._index or self._of_files()
        if self._index is None or not self._is_newest():
            self._let_go()
            if (number := newest_index(self._root)) == 0:
                make_index(self._root, 1, self._sync)
                number = newest_index(self._root)
            self._number = number
            self._index = Index(index_path(self._root, number), self._sync)
        return self._index

    def _of_files(self) -> Index:
        index = self._index = Index(IN_MEMORY)
        with index.transaction():
            for row in rows_of_files(self._root):
                index.add(row)
        return index

    def _rebuild_after(self, error: Exception) -> None:
        """Rebuild a damaged index; raise an error that a rebuild cannot help."""
        try:
            if not self._is_newest():
                return
            if not self._is_damage(error):
                raise StoreError(f"the store in {self._root} cannot be used: {error}") from error
            self._let_go()
            make_index(self._root, self._number + 1, self._sync)
        except _FAILURES as failure:
            with suppress(OSError):  # the folder itself may be gone
                if newest_index(self._root) > self._number:
                    return  # the new one was replaced in its turn
            raise StoreError(
                f"the index of {self._root} cannot be used ({error}) nor rebuilt: {failure}"
            ) from failure

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
        if self._index is not None:
            self._index.close()
        self._index = None

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
    """

    def __init__(self, path: Path, sync: bool = True) -> None:
        self.path = path
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
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

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
        return self._db.execute(change, (name.key, name.generation)).rowcount > 0

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
            self._db.execute("REPLACE INTO evicted (key) VALUES (?)", (victim.name.key,))
        oldest = f"(SELECT max(rowid) FROM evicted) - {REMEMBERED}"
        self._db.execute(f"DELETE FROM evicted WHERE rowid <= {oldest}")
        return victims

    def was_evicted(self, key: str) -> bool:
        """Whether a key was evicted, as far as is remembered."""
        found = self._db.execute("SELECT 1 FROM evicted WHERE key = ?", (key,)).fetchone()
        return found is not None

    def close(self) -> None:
        """Close the file; twice is fine."""
        self._db.close()


def create(path: Path, rows: Iterable[Row], sync: bool) -> None:
    """Write a new index to a file that is not there yet, and close it."""
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


def _connect(uri: str) -> sqlite3.Connection:
    db = sqlite3.connect(
        uri, timeout=_WAIT_S, isolation_level=None, check_same_thread=False, uri=True
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


def prepare(root: Path) -> None:
    """Make an empty folder a store; a store stays as it is.

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
    """Build an index from the files of values, unless another process has; drop older ones."""
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
    """Add what others entered in the older index while this one was built (invariant 2)."""
    index = Index(index_path(root, number), sync)
    try:
        with index.transaction():
            for row in rows_of_files(root):
                if index.row(row.name.key) is None:
                    index.add(row)
    finally:
        index.close()


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
