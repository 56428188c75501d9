"""A store in a folder: several processes may use it at once, and it outlives all of them.

A put writes a file, then its row in the index; a file without a row is a stray. Dropping an entry
removes the row, then the file. So a process that is killed leaves a stray at most, and gc removes
it.

A thread claims the files that it is about to enter or whose rows it drops. At the end of the verb,
or at the beginning of its next one if it was interrupted, those that no row has are removed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident

from kvcellar.disk_errors import NO_ROOM, disk_trouble
from kvcellar.errors import (
    ClosedError,
    StoreError,
    check_bool,
    check_real,
    not_copied,
)
from kvcellar.stores.base import (
    MAX_AGE_S,
    WRITING_S,
    Absence,
    BytesLike,
    Entry,
    Field,
    Note,
    check_budget,
    check_key,
    check_keys,
    check_search,
    decode_note,
    encode_note,
    expanded,
    flat,
)
from kvcellar.stores.disk.access import Access, admit
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
    NoRoom,
    Row,
    index_path,
    is_store,
    newest_index,
    prepare,
    remove_leftovers,
    strays,
)

_log = logging.getLogger(__name__)

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

    The folder has to be on a local disk: SQLite's logs are not made for network file systems. It
    and what is in it are for its owner alone, or for its group too if its mode says so
    (:mod:`kvcellar.stores.disk.access`).

    On a full disk a store opens and says so in the log: values can be read, listed and deleted,
    :meth:`gc` works, and a put is refused, until there is room again.

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
        StoreError: the folder is something else, of a newer version, cannot be read, or is
            somebody else's and open to everybody. Later errors say whether the disk is full, the
            quota used up, the file system read-only, or a permission missing.
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
        self._root = expanded("path", path)
        read_only, fsync = check_bool("read_only", read_only), check_bool("fsync", fsync)
        self.max_bytes = check_budget(max_bytes)
        self._fsync = fsync
        self._claimed: dict[int, list[Name]] = {}
        self._why_read_only = "it was opened so" if read_only else ""
        try:
            if not read_only and self._root.exists():
                self._why_read_only = _why_unwritable(self._root)
            self.read_only = self._why_read_only != ""
            self._access = self._look() if self.read_only else prepare(self._root)
        except OSError as error:
            raise self._error("cannot be opened", error) from error
        self._index = LiveIndex(self._root, self.read_only, fsync, self._access)
        if self.read_only and not read_only:
            _log.warning("the store in %s is read-only (%s)", self._root, self._why_read_only)
        if why := self._index.no_room:
            _log.warning("%s; until then nothing new is stored", why)

    def put(self, key: str, value: Sequence[BytesLike], note: Note | None = None) -> bool:
        """Write a file, then its row; see :class:`~kvcellar.stores.base.Store`."""
        check_key(key)
        pieces, about = flat(value), decode_note(encode_note(note))
        n_bytes = sum(piece.nbytes for piece in pieces)
        if self.max_bytes is not None and n_bytes > self.max_bytes:
            return False
        self._check_writable()
        with self._settling():
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
        with self._settling():
            while (row := self._row(key)) is not None:
                if (value := self._read(row)) is not None:
                    self._use([key])
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
        return key in self.touch_all([key])

    def touch_all(self, keys: Sequence[str]) -> set[str]:
        """Make values the most recently used, in one transaction; return which are there."""
        there = [key for key in check_keys(keys) if self.has(key)]
        return set(self._use(there)) if there else set()

    def why_absent(self, key: str) -> Absence:
        """What was deleted, or damaged, counts as never stored."""
        check_key(key)
        evicted = self._index.read(lambda index: index.was_evicted(key))
        return "evicted" if evicted else "never stored"

    def delete(self, key: str) -> bool:
        """Drop a value; False if there was none."""
        check_key(key)
        self._check_writable()
        with self._settling():
            row = self._row(key)
            return row is not None and self._drop(row.name)

    def entries(self) -> Iterator[Entry]:
        """All values at this moment, least recently used first."""
        return (row.entry for row in self._index.read(Index.rows))

    def find(self, field: Field, key: str, most: int) -> list[Entry]:
        """Up to ``most`` values whose note has a key there, most recently used first."""
        check_search(field, key, most)
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
            raise self._error("cannot be read", error) from error

    def gc(self, min_age_s: float = WRITING_S, *, dry_run: bool = False) -> GcReport:
        """Remove files without an entry, entries without a file, and what exceeds the budget.

        Args:
            min_age_s: the age of the youngest file to remove: another process may be about to enter
                a younger one.
            dry_run: only report what would be removed.
        """
        min_age_s = check_real("min_age_s", min_age_s, -MAX_AGE_S, MAX_AGE_S)
        if not check_bool("dry_run", dry_run):
            self._check_writable()
        work = plan if dry_run else collect
        try:
            return work(self._root, self._index, self.max_bytes, min_age_s)
        except OSError as error:
            raise self._error("cannot be cleaned", error) from error

    def close(self) -> None:
        """Close the index; values that a get returned stay readable."""
        try:
            self._settle()
        finally:
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
            raise self._error(f"cannot be read at {row.name.key}", error) from error
        return value if value.nbytes == row.entry.n_bytes else None

    def _is_there(self, name: Name) -> bool:
        try:
            name.under(self._root).stat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._error(f"cannot be read at {name.key}", error) from error
        return True

    def _renew(self, key: str) -> bool:
        """Count a put of a value that is there as a use; drop an entry whose file is gone."""
        if (row := self._row(key)) is None:
            return False
        if self._is_there(row.name):
            return bool(self._use([key]))
        self._drop(row.name)
        return False

    def _use(self, keys: list[str]) -> list[str]:
        """Make values the most recently used, and return them without those that are gone by now.

        A disk too full to note it is no error.
        """
        if self.read_only:
            return keys
        now = time.time()
        try:
            return self._index.write(lambda index: [key for key in keys if index.use(key, now)])
        except StoreError:
            return keys

    def _write(self, entry: Entry, pieces: Sequence[memoryview]) -> bool:
        """Write a file and enter its row; False if the file was removed in between."""
        row = Row(entry, Name.new(entry.key))
        self._claim(row.name)
        try:
            path = row.name.under(self._root)
            write_value(path, entry, pieces, self._fsync, self._access)
        except OSError as error:
            raise self._error(f"takes no {entry.n_bytes} bytes more", error) from error
        return self._index.write(lambda index: self._enter(index, row))

    def _enter(self, index: Index, row: Row) -> bool:
        """Enter the row, and claim the files that are to leave; False if the row's file is gone."""
        held = index.row(row.name.key)
        if held is not None:
            index.use(row.name.key, row.entry.used)
        elif row.name.under(self._root).exists():
            index.add(row)
        else:
            return False
        for victim in [] if self.max_bytes is None else index.evict(self.max_bytes):
            self._claim(victim.name)
        return True

    def _drop(self, name: Name) -> bool:
        """Drop an entry and its file, unless the key was put again meanwhile."""
        self._claim(name)
        dropped = self._index.shrink(lambda index: index.drop(name))
        self._settle()
        return dropped

    def _claim(self, name: Name) -> None:
        self._claimed.setdefault(get_ident(), []).append(name)

    def _settle(self) -> None:
        """Remove the files that this thread claimed and that no row has."""
        claimed = self._claimed.get(get_ident(), [])
        while claimed:
            row = self._row(claimed[-1].key)
            if row is None or row.name != claimed[-1]:
                remove(claimed[-1].under(self._root))
            claimed.pop()
        self._claimed.pop(get_ident(), None)

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """Settle at both ends: before, for what was interrupted."""
        try:
            self._settle()
            yield
        except BaseException:
            with suppress(StoreError, ClosedError):  # if it cannot be told now, then next time
                self._settle()
            raise
        else:
            self._settle()

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError(
                f"the store in {self._root} is read-only ({self._why_read_only}): nothing can be "
                "changed"
            )

    def _look(self) -> Access:
        """Check a store that is only read; nothing is changed."""
        if not is_store(self._root):
            raise StoreError(
                f"{self._root} is not a store, and cannot be made one: it is read-only "
                f"({self._why_read_only})"
            )
        return admit(self._root, read_only=True)

    def _error(self, what: str, error: OSError) -> StoreError:
        kind = NoRoom if error.errno in NO_ROOM else StoreError
        return kind(f"the store in {self._root} {what}: {disk_trouble(error, self._root)}")


def _why_unwritable(root: Path) -> str:
    """Why nothing can be written to a store that exists; "" if it can."""
    number = newest_index(root) if root.is_dir() else 0
    for path in (root, *([index_path(root, number)] if number else [])):
        if not os.access(path, os.W_OK):
            if hasattr(os, "statvfs") and os.statvfs(root).f_flag & os.ST_RDONLY:
                return "its file system is"
            return f"there is no permission to write to {path}"
    return "" if os.access(root, os.X_OK) else f"there is no permission to enter {root}"


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
    live.read(Index.check)
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

    broken, evicted = live.shrink(clean)
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
