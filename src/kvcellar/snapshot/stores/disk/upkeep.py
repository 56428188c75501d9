"""Looking after a store on disk: finding what is damaged, removing what nobody needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcellar.snapshot.stores.disk.files import Damaged, header_of, map_value, remove, size_of
from kvcellar.snapshot.stores.disk.folder import remove_leftovers, strays
from kvcellar.snapshot.stores.disk.index import Index, Row
from kvcellar.snapshot.stores.disk.live import LiveIndex


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found in a store.

    Attributes:
        n_entries: how many entries there are.
        n_bytes: what their values take.
        damaged: keys of values that are not what was put; a get would drop them.
        missing: keys whose file is gone.
        strays: files that no entry has: left behind by a writer that was killed, or being
            written right now.
    """

    n_entries: int
    n_bytes: int
    damaged: tuple[str, ...]
    missing: tuple[str, ...]
    strays: tuple[Path, ...]

    @property
    def is_sound(self) -> bool:
        """Whether every entry has its value; strays do no harm."""
        return not self.damaged and not self.missing


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was removed from a store, or would be.

    Attributes:
        strays: files that no entry had.
        missing: keys whose file was gone, or not even as long as it should be.
        evicted: keys that exceeded the budget.
        bytes_freed: what all the files took.
    """

    strays: tuple[Path, ...]
    missing: tuple[str, ...]
    evicted: tuple[str, ...]
    bytes_freed: int


def examine(root: Path, live: LiveIndex) -> VerifyReport:
    """Read every value and compare."""
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
    """What :func:`collect` would remove, beside replaced indexes; nothing is changed."""
    rows = live.read(Index.rows)
    files, broken = _useless(root, rows, min_age_s)
    evicted = [] if max_bytes is None else _excess([r for r in rows if r not in broken], max_bytes)
    going = [*files, *(row.name.under(root) for row in broken + evicted)]
    return GcReport(tuple(files), _keys(broken), _keys(evicted), sum(map(size_of, going)))


def collect(root: Path, live: LiveIndex, max_bytes: int | None, min_age_s: float) -> GcReport:
    """Remove strays while nobody can enter one, then what has no file, then what is too much."""
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
    """What is wrong with the file of a row, empty if nothing is."""
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
    """The first rows, so many that the others are within the budget."""
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
