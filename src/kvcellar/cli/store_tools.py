"""Stores as the commands use them: opened, searched by key, checked and cleaned.

Only ``run``, ``chat`` and ``import`` create a store: a mistyped path must not become one. URLs are
printed without their passwords.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcellar.cli.blocks import Forest
from kvcellar.cli.units import human_age, human_bytes
from kvcellar.errors import OptionError, SnapshotFileError, StoreError
from kvcellar.prompts.blocks import check_block
from kvcellar.prompts.misses import absent_of
from kvcellar.snapshot.container import snapshot_from
from kvcellar.stores import open_store
from kvcellar.stores.base import WRITING_S
from kvcellar.stores.disk import DiskStore
from kvcellar.stores.disk.index import is_store
from kvcellar.stores.opening import folder_of
from kvcellar.stores.redis_client import without_secrets

if TYPE_CHECKING:
    from kvcellar.cli.blocks import Reason
    from kvcellar.stores.base import Buffer, Entry, Store

# --- opening ------------------------------------------------------------------------------------


@contextmanager
def existing(where: str, *, read_only: bool = False) -> Iterator[Store]:
    """Yield a store that exists; close it at the end.

    With ``read_only`` nothing changes there, not even the order of use; in a folder that order is
    then unknown.

    Raises:
        StoreError: there is none, or it cannot be opened.
        OptionError: no store can be at such a place.
    """
    if (folder := folder_of(where)) is None:
        _refuse_memory(where)
        options = {"read_only": True} if read_only else {}
    else:
        if not folder.exists():
            raise StoreError(
                f"{folder} does not exist: name the folder of a store; "
                f"kvcellar run --prompt-cache creates one"
            )
        try:
            found = is_store(folder)
        except OSError as error:
            raise StoreError(f"{folder} cannot be read: {error}") from error
        if not found:
            raise StoreError(f"{folder} is no store: name the folder that --prompt-cache was given")
        options = {"read_only": read_only}
    with closing(open_store(where, **options)) as store:
        yield store


def open_or_make(where: str, max_bytes: int | None = None, ttl_s: float | None = None) -> Store:
    """Open a store that outlives this process; create its folder if there is none.

    Raises:
        OptionError: no store can be at such a place, or it has no such limit.
        StoreError: it cannot be opened.
    """
    _refuse_memory(where)
    if folder_of(where) is None:
        if max_bytes is not None:
            raise OptionError("--cache-bytes is for folders: a server has its own maxmemory")
        return open_store(where, ttl_s=ttl_s)
    if ttl_s is not None:
        raise OptionError(
            "--cache-ttl is for servers: in a folder, kvcellar cache gc --older-than removes "
            "unused entries"
        )
    return open_store(where, max_bytes=max_bytes)


def _refuse_memory(where: str) -> None:
    if where.lower().startswith("memory:"):
        raise OptionError("memory: is a store within one process: name a folder or a URL")


def shown(where: str) -> str:
    """Return the name of a store as it may be printed."""
    folder = folder_of(where)
    return without_secrets(where) if folder is None else str(folder)


# --- reading ------------------------------------------------------------------------------------

_MIN_PREFIX = 4
_MOST_NAMED = 3


def find(store: Store, prefix: str) -> Entry:
    """Return the only entry whose key begins like that; a block before the mark of a missing one.

    Raises:
        OptionError: there is none, or several.
    """
    found = [entry for entry in store.entries() if entry.key.startswith(prefix)]
    if exact := [entry for entry in found if entry.key == prefix]:
        return exact[0]
    # A mark has its block's key with a suffix, and the block may be there by now.
    found = [entry for entry in found if absent_of(entry.note) is None] or found
    if not found:
        raise OptionError(f"key {prefix!r}: no such entry; kvcellar cache list shows the keys")
    if len(found) > 1 or len(prefix) < _MIN_PREFIX:
        named = ", ".join(entry.key[:16] for entry in found[:_MOST_NAMED])
        raise OptionError(f"key {prefix!r} is too short: {len(found)} begin with it: {named}")
    return found[0]


def value_of(store: Store, key: str) -> Buffer:
    """Return the value of an entry that was listed.

    Raises:
        SnapshotFileError: it is damaged, or gone by now.
    """
    if (value := store.get(key)) is None:
        raise SnapshotFileError(f"{key} is damaged, or was removed just now")
    return value


# --- checking -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Checked:
    """The result of checking a store.

    Attributes:
        n_entries: number of entries.
        n_bytes: the size of their values.
        faults: by key, what is wrong with a value.
        n_strays: files that belong to no entry; they do no harm.
    """

    n_entries: int
    n_bytes: int
    faults: dict[str, str] = field(default_factory=dict)
    n_strays: int = 0


def check_store(where: str) -> Checked:
    """Check every value twice: as the store's bytes, and as a snapshot. Nothing is changed.

    Raises:
        StoreError: there is no such store, or it cannot be read.
        LibraryError: values are compressed by a library that is not installed.
    """
    with existing(where) as store:
        entries = list(store.entries())
        found = Checked(len(entries), sum(entry.n_bytes for entry in entries))
        if isinstance(store, DiskStore):
            report = store.verify()
            found.faults |= dict.fromkeys(report.damaged, "damaged")
            found.faults |= dict.fromkeys(report.missing, "its file is missing")
            found.n_strays = len(report.strays)
    with existing(where, read_only=True) as store:
        for entry in entries:
            if entry.key not in found.faults and (fault := _fault(store, entry)):
                found.faults[entry.key] = fault
    return found


def _fault(store: Store, entry: Entry) -> str:
    if (value := store.get(entry.key)) is None:
        # A value that others removed meanwhile, or a server evicted, is absent and not damaged.
        return "damaged" if store.has(entry.key) else ""
    try:
        if absent_of(entry.note) is not None:
            return ""
        if "parent" in entry.note:
            check_block(entry.key, entry.note, value)
        else:
            snapshot_from(value)
    except SnapshotFileError as error:
        return str(error)
    return ""


# --- cleaning -----------------------------------------------------------------------------------

_WHAT: dict[Reason, str] = {
    "unreachable": "with a missing block before them",
    "unused": "not used for that long",
    "over budget": "to get within the size",
}


def clean_folder(
    where: str, max_bytes: int | None, max_age_s: float | None, *, dry_run: bool
) -> Iterator[str]:
    """Remove unusable entries and those over the limits; yield lines that report it.

    Raises:
        OptionError: it is a server, which has limits of its own.
        StoreError: there is no such store, or it cannot be changed.
    """
    with existing(where) as store:
        if not isinstance(store, DiskStore):
            if max_bytes is not None or max_age_s is not None:
                raise OptionError(
                    "gc --max-bytes, --older-than: a server has limits of its own: set its "
                    "maxmemory with maxmemory-policy allkeys-lru, and a time to live"
                )
            yield "nothing to do: the server's maxmemory and the time to live limit its size"
            return
        since = None if max_age_s is None else time.time() - max_age_s
        yield from _clean(store, max_bytes, since, dry_run=dry_run)


def _clean(
    store: DiskStore, max_bytes: int | None, since: float | None, *, dry_run: bool
) -> Iterator[str]:
    verb = "would remove" if dry_run else "removed"
    report = store.gc(dry_run=dry_run)
    n = len(report.strays) + len(report.missing)
    if n or report.bytes_freed:
        freed = human_bytes(report.bytes_freed)
        yield f"{verb} {n} files without an entry or entries without a file, {freed}"
    n_gone, n_bytes = Counter[str](), Counter[str]()
    forest = Forest(entry for entry in store.entries() if entry.key not in report.missing)
    n_lost = sum(not forest.is_reachable(block) for block in forest.blocks.values())
    for block, reason in forest.removable(max_bytes, since, time.time() - WRITING_S):
        n_lost -= not forest.is_reachable(block)
        if dry_run or store.delete(block.key):
            n_gone[reason] += 1
            n_bytes[reason] += block.entry.n_bytes
    for reason, what in _WHAT.items():
        if n := n_gone[reason]:
            yield f"{verb} {n} entries {what}, {human_bytes(n_bytes[reason])}"
    if not n_gone:
        yield "no entries to remove"
    if n_lost:
        yield (
            f"{n_lost} entries have a missing block before them, which may be being stored right "
            f"now: they are kept until unused for {human_age(WRITING_S)}"
        )
    if dry_run:
        n_left = len(forest.blocks) - n_gone.total()
        left = sum(block.entry.n_bytes for block in forest.blocks.values()) - n_bytes.total()
    else:
        n_left, left = sum(1 for _ in store.entries()), store.bytes_used
    yield f"{n_left} entries, {human_bytes(left)} are left"
