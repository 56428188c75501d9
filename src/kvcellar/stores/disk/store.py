"""A store in a folder: several processes may use it at once, and it outlives all of them.

A put writes a file, then its row in the index; a file without a row is a stray. Dropping an entry
removes the row, then the file. So a process that is killed leaves a stray at most, and gc removes
it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcellar.errors import StoreError, not_copied
from kvcellar.stores.base import (
    WRITING_S,
    Absence,
    BytesLike,
    Entry,
    Field,
    Note,
    check_budget,
    check_key,
    decode_note,
    encode_note,
    flat,
)
from kvcellar.stores.disk.files import (
    Damaged,
    Name,
    header_of,
    map_value,
    remove,
    size_of,
    write_value,
)
from kvcellar.stores.disk.index import (
    Index,
    LiveIndex,
    Row,
    is_store,
    prepare,
    remove_leftovers,
    strays,
)

_ATTEMPTS = 3


class DiskStore:
    """A folder of values: an index, and a file for each.

    ::

        store = DiskStore("~/.cache/prompts", max_bytes=20 * 2**30)
        store.put("3f9a", [header, rows], {"n_tokens": 512})
        store.get("3f9a")  # mapped from the file, nothing is copied

    Any number of processes and threads may use it. One that is killed loses at most the value that
    it was writing; :meth:`gc` removes the rest of it. A get checks the value: a damaged one is
    dropped and counts as absent. A damaged index is rebuilt from the files. After a power cut the
    last entries may be missing.

    The folder has to be on a local disk: SQLite's logs are not made for network file systems.

    The budget counts values; headers and the index add about a kilobyte per value. Every put
    enforces its own store's budget, so a smaller one takes effect with the next put or :meth:`gc`.
    A value that a get returned stays readable when its entry is dropped, but do not shorten its
    file.

    Args:
        path: a folder that is a store, or empty, or does not exist.
        max_bytes: limit of the bytes of all values; None: no limit.
        read_only: never write, and show what is there at opening. A store whose folder cannot be
            written to is read-only.
        fsync: wait for the disk in every put. Without it a power cut, and nothing less, may damage
            values, which then count as absent.

    Raises:
        StoreError: the folder is something else, of a newer version, or cannot be read.
    """

    __reduce_ex__ = not_copied(
        "an open store", "open its folder again: any number of processes may"
    )

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int | None = None,
        *,
        read_only: bool = False,
        fsync: bool = True,
    ) -> None:
        self._root = Path(path).expanduser()
        self._max_bytes = check_budget(max_bytes)
        self._fsync = fsync
        try:
            self.read_only = read_only or (self._root.exists() and not _can_write(self._root))
            if not self.read_only:
                prepare(self._root)
            elif not is_store(self._root):
                raise StoreError(f"{self._root} is not a store, and cannot be made one: read-only")
        except OSError as error:
            raise StoreError(f"the store in {self._root} cannot be opened: {error}") from error
        self._index = LiveIndex(self._root, self.read_only, fsync)

    def put(self, key: str, value: Sequence[BytesLike], note: Note | None = None) -> bool:
        """Write a file, then its row; see :class:`~kvcellar.stores.base.Store`."""
        check_key(key)
        pieces, about = flat(value), decode_note(encode_note(note))
        n_bytes = sum(piece.nbytes for piece in pieces)
        if self._max_bytes is not None and n_bytes > self._max_bytes:
            return False
        self._check_writable()
        if self._renew(key):
            return True
        now = time.time()
        entry = Entry(key, n_bytes, now, now, about)
        if not any(self._write(entry, pieces) for _ in range(_ATTEMPTS)):
            raise StoreError(f"the file of {key} in {self._root} is removed again and again")
        return True

    def get(self, key: str) -> BytesLike | None:
        """Return the value, checked and mapped; a damaged one is dropped and None returned."""
        check_key(key)
        while (row := self._row(key)) is not None:
            if (value := self._read(row)) is not None:
                self._use(key)
                return value
            if self.read_only:
                return None
            self._drop(row.name)
        return None

    def has(self, key: str) -> bool:
        """Whether there is a value; it is not read."""
        row = self._row(check_key(key))
        return row is not None and self._is_there(row.name)

    def touch(self, key: str) -> bool:
        """Make a value the most recently used; it is not read."""
        return self.has(key) and self._use(key)

    def why_absent(self, key: str) -> Absence:
        """What was deleted, or damaged, counts as never stored."""
        check_key(key)
        evicted = self._index.read(lambda index: index.was_evicted(key))
        return "evicted" if evicted else "never stored"

    def delete(self, key: str) -> bool:
        """Drop a value; False if there was none."""
        self._check_writable()
        row = self._row(check_key(key))
        return row is not None and self._drop(row.name)

    def entries(self) -> Iterator[Entry]:
        """All values at this moment, least recently used first."""
        return (row.entry for row in self._index.read(Index.rows))

    def find(self, field: Field, key: str, most: int) -> list[Entry]:
        """Up to ``most`` values whose note has a key there, most recently used first."""
        check_key(key)
        return self._index.read(lambda index: index.find(field, key, most))

    @property
    def bytes_used(self) -> int:
        """Bytes of all values."""
        return self._index.read(Index.n_bytes)

    def verify(self) -> VerifyReport:
        """Read and check every value; others may use the store meanwhile.

        Nothing is changed, except that a damaged index is rebuilt.
        """
        try:
            return examine(self._root, self._index)
        except OSError as error:
            raise StoreError(f"the store in {self._root} cannot be read: {error}") from error

    def gc(self, min_age_s: float = WRITING_S, *, dry_run: bool = False) -> GcReport:
        """Remove files without an entry, entries without a file, and what exceeds the budget.

        Args:
            min_age_s: the age of the youngest file to remove: another process may be about to enter
                a younger one.
            dry_run: only report what would be removed.
        """
        if not dry_run:
            self._check_writable()
        work = plan if dry_run else collect
        try:
            return work(self._root, self._index, self._max_bytes, min_age_s)
        except OSError as error:
            raise StoreError(f"the store in {self._root} cannot be cleaned: {error}") from error

    def close(self) -> None:
        """Close the index; values that a get returned stay readable."""
        self._index.close()

    def _row(self, key: str) -> Row | None:
        return self._index.read(lambda index: index.row(key))

    def _read(self, row: Row) -> memoryview | None:
        """Read the value of a row; None if its file is damaged or gone."""
        try:
            value = map_value(row.name.under(self._root), row.name.key)
        except (Damaged, FileNotFoundError):
            return None
        except OSError as error:
            raise StoreError(f"{row.name.key} in {self._root} cannot be read: {error}") from error
        return value if value.nbytes == row.entry.n_bytes else None

    def _is_there(self, name: Name) -> bool:
        try:
            name.under(self._root).stat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"{name.key} in {self._root} cannot be seen: {error}") from error
        return True

    def _renew(self, key: str) -> bool:
        """Count a put of a value that is there as a use; drop an entry whose file is gone."""
        if (row := self._row(key)) is None:
            return False
        if self._is_there(row.name):
            return self._use(key)
        self._drop(row.name)
        return False

    def _use(self, key: str) -> bool:
        """Make a value the most recently used. A disk too full to note it is no error."""
        if self.read_only:
            return True
        try:
            return self._index.write(lambda index: index.use(key, time.time()))
        except StoreError:
            return True

    def _write(self, entry: Entry, pieces: Sequence[memoryview]) -> bool:
        """Write a file and enter its row; False if the file was removed in between."""
        row = Row(entry, Name.new(entry.key))
        path = row.name.under(self._root)
        try:
            write_value(path, entry, pieces, self._fsync)
        except OSError as error:
            raise StoreError(
                f"{entry.n_bytes} bytes cannot be put into {self._root}: {error}"
            ) from error
        try:
            leaving = self._index.write(lambda index: self._enter(index, row))
        except BaseException:
            remove(path)
            raise
        for name in leaving or ():
            remove(name.under(self._root))
        return leaving is not None

    def _enter(self, index: Index, row: Row) -> list[Name] | None:
        """Enter the row; return the files to be removed, None if the row's file is gone."""
        held = index.row(row.name.key)
        if held is not None:
            index.use(row.name.key, row.entry.used)
        elif row.name.under(self._root).exists():
            index.add(row)
        else:
            return None
        unused = [] if held is None or held.name == row.name else [row.name]
        victims = [] if self._max_bytes is None else index.evict(self._max_bytes)
        return unused + [victim.name for victim in victims]

    def _drop(self, name: Name) -> bool:
        """Drop an entry and its file, unless the key was put again meanwhile."""
        dropped = self._index.write(lambda index: index.drop(name))
        if dropped:
            remove(name.under(self._root))
        return dropped

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError(f"the store in {self._root} is read-only: nothing can be changed")


def _can_write(root: Path) -> bool:
    return os.access(root, os.W_OK | os.X_OK)


# -- maintenance


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What :meth:`DiskStore.verify` found.

    Attributes:
        n_entries: entries in the store.
        n_bytes: bytes of their values.
        damaged: keys of damaged values; a get would drop them.
        missing: keys whose file is gone.
        strays: files without an entry: left by a writer that was killed, or being written.
    """

    n_entries: int
    n_bytes: int
    damaged: tuple[str, ...]
    missing: tuple[str, ...]
    strays: tuple[Path, ...]

    @property
    def is_sound(self) -> bool:
        """Whether every entry has its value; strays are harmless."""
        return not self.damaged and not self.missing


@dataclass(frozen=True, slots=True)
class GcReport:
    """What :meth:`DiskStore.gc` removed, or would remove.

    Attributes:
        strays: files without an entry.
        missing: keys whose file was gone or had the wrong size.
        evicted: keys that exceeded the budget.
        bytes_freed: bytes of all these files.
    """

    strays: tuple[Path, ...]
    missing: tuple[str, ...]
    evicted: tuple[str, ...]
    bytes_freed: int


def examine(root: Path, live: LiveIndex) -> VerifyReport:
    """Read and check every value."""
    live.write(Index.check)
    files = list(strays(root, set()))  # before the entries: what is entered meanwhile is no stray
    rows = live.read(Index.rows)
    faults = {row.name.key: _fault(root, row, whole=True) for row in rows}
    faults = {row.name.key: faults[row.name.key] for row in rows if _is_still_there(live, row)}
    known = {row.name.under(root) for row in rows}
    return VerifyReport(
        len(rows),
        sum(row.entry.n_bytes for row in rows),
        tuple(key for key, fault in faults.items() if fault == "damaged"),
        tuple(key for key, fault in faults.items() if fault == "missing"),
        tuple(path for path in files if path not in known and path.exists()),
    )


def plan(root: Path, live: LiveIndex, max_bytes: int | None, min_age_s: float) -> GcReport:
    """Return what :func:`collect` would remove, except replaced indexes."""
    rows = live.read(Index.rows)
    files, broken = _useless(root, rows, min_age_s)
    evicted = [] if max_bytes is None else _excess([r for r in rows if r not in broken], max_bytes)
    going = [*files, *(row.name.under(root) for row in broken + evicted)]
    return GcReport(tuple(files), _keys(broken), _keys(evicted), sum(map(size_of, going)))


def collect(root: Path, live: LiveIndex, max_bytes: int | None, min_age_s: float) -> GcReport:
    """Remove strays while nobody can enter one, then entries without a file, then the excess."""
    removed: dict[Path, int] = {}

    def clean(index: Index) -> tuple[list[Row], list[Row]]:
        index.check()
        rows = index.rows()
        files, broken = _useless(root, rows, min_age_s)
        removed.update({path: remove(path) for path in files})
        for row in broken:
            index.drop(row.name)
        return broken, [] if max_bytes is None else index.evict(max_bytes)

    broken, evicted = live.write(clean)
    freed = sum(remove(row.name.under(root)) for row in broken + evicted)
    freed += sum(removed.values()) + remove_leftovers(root, min_age_s)
    return GcReport(tuple(removed), _keys(broken), _keys(evicted), freed)


def _useless(root: Path, rows: list[Row], min_age_s: float) -> tuple[list[Path], list[Row]]:
    """Files without an entry, and entries without a file."""
    files = list(strays(root, {row.name for row in rows}, min_age_s))
    return files, [row for row in rows if _fault(root, row, whole=False)]


def _fault(root: Path, row: Row, whole: bool) -> str:
    """Name what is wrong with the file of a row; "" if nothing is."""
    path = row.name.under(root)
    try:
        header = header_of(path)
        if header.entry.key != row.name.key or header.entry.n_bytes != row.entry.n_bytes:
            return "damaged"
        if whole:
            map_value(path, row.name.key)
    except FileNotFoundError:
        return "missing"
    except (Damaged, OSError):
        return "damaged"
    return ""


def _excess(rows: list[Row], max_bytes: int) -> list[Row]:
    """The first rows, as many as must go for the others to be within the budget."""
    left = sum(row.entry.n_bytes for row in rows)
    for i, row in enumerate(rows):
        if left <= max_bytes:
            return rows[:i]
        left -= row.entry.n_bytes
    return rows


def _is_still_there(live: LiveIndex, row: Row) -> bool:
    found = live.read(lambda index: index.row(row.name.key))
    return found is not None and found.name == row.name


def _keys(rows: list[Row]) -> tuple[str, ...]:
    return tuple(row.name.key for row in rows)
