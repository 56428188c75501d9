"""The index of a store on disk: one SQLite file of rows, written in transactions.

It is in WAL mode: a use of a value is then a commit without a sync, and readers wait for nobody.
After a power cut the last commits may be missing, which costs entries and damages none.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvcellar.snapshot.stores.base import FIELDS, Entry, Field
from kvcellar.snapshot.stores.contents import REMEMBERED, decode_note, encode_note, keys_in
from kvcellar.snapshot.stores.disk.files import Name

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
"""``turn`` counts uses, because clocks may stand still or go back. The last two columns are keys
that the note has, by which it is found."""

IN_MEMORY = Path(":memory:")
_WAIT_S = 60.0
_COLUMNS = "key, generation, n_bytes, created, used, note"
_NEXT = "(SELECT coalesce(max(turn), 0) + 1 FROM entries)"


class IndexDamaged(sqlite3.DatabaseError):
    """SQLite can read the file, but not what we wrote."""


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
    """Rows by key, in the order of their use. Each verb is one statement or a few.

    Several verbs that belong together go into one :meth:`transaction`. Whatever SQLite raises
    passes through.

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
        """Raises IndexDamaged unless SQLite finds its file sound and the tables are ours."""
        tables = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid"
        laid_out = tuple(sql for (sql,) in self._db.execute(tables))
        (answer,) = self._db.execute(f"PRAGMA {pragma}(1)").fetchone()
        if laid_out != SCHEMA or answer != "ok":
            raise IndexDamaged(f"{self.path}: {answer}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of what is done inside or nothing; nobody else writes meanwhile."""
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
        """All rows, those used longest ago first."""
        found = self._db.execute(f"SELECT {_COLUMNS} FROM entries ORDER BY turn").fetchall()
        return [Row.parse(row) for row in found]

    def find(self, field: Field, key: str, most: int) -> list[Entry]:
        """Up to so many entries whose note has a key there, those used last first."""
        wanted = f"SELECT {_COLUMNS} FROM entries WHERE {field} = ? ORDER BY turn DESC LIMIT ?"
        found = (Row.parse(row).entry for row in self._db.execute(wanted, (key, most)))
        return [entry for entry in found if entry.note.get(field) == key]

    def n_bytes(self) -> int:
        """What all values take together."""
        (total,) = self._db.execute("SELECT coalesce(sum(n_bytes), 0) FROM entries").fetchone()
        return int(total)

    def add(self, row: Row) -> None:
        """Enter a value, as the one used last; its key has none."""
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
        """Make the value of a key the one used last; False if there is none."""
        change = f"UPDATE entries SET used = ?, turn = {_NEXT} WHERE key = ?"
        return self._db.execute(change, (now, key)).rowcount > 0

    def drop(self, name: Name) -> bool:
        """Forget the row of a file, if it still is there."""
        change = "DELETE FROM entries WHERE key = ? AND generation = ?"
        return self._db.execute(change, (name.key, name.generation)).rowcount > 0

    def evict(self, max_bytes: int) -> list[Row]:
        """Drop those used longest ago until the rest is within the budget; which they were."""
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
        """Whether that is why it is not there, as far as is remembered."""
        found = self._db.execute("SELECT 1 FROM evicted WHERE key = ?", (key,)).fetchone()
        return found is not None

    def close(self) -> None:
        """Close the file; twice is fine."""
        self._db.close()


def create(path: Path, rows: Iterable[Row], sync: bool) -> None:
    """Write a new index, complete and closed, where no file is yet."""
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
    """Damaged text must not raise where it is read, but be refused where it is used."""
    return found.decode(errors="replace")
