"""Reading all that a store holds, to see whether it is what was put."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcellar.cli.opened import existing
from kvcellar.errors import SnapshotFileError
from kvcellar.snapshot.absence import absent_of
from kvcellar.snapshot.block_checks import check_block
from kvcellar.snapshot.reading import snapshot_from
from kvcellar.snapshot.stores.disk import DiskStore

if TYPE_CHECKING:
    from kvcellar.snapshot.stores.base import Buffer, Entry, Store


@dataclass(slots=True)
class Checked:
    """What was found.

    Attributes:
        n_entries: how many entries there are.
        n_bytes: what their values take.
        faults: by key, what is wrong with a value.
        n_strays: how many files belong to no entry; they do no harm.
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
            found.faults |= dict.fromkeys(report.missing, "its file is gone")
            found.n_strays = len(report.strays)
    with existing(where, read_only=True) as store:
        for entry in entries:
            if entry.key not in found.faults and (fault := _fault(store, entry)):
                found.faults[entry.key] = fault
    return found


def _fault(store: Store, entry: Entry) -> str:
    if (value := store.get(entry.key)) is None:
        # What others removed meanwhile, or a server evicted, is absent and not damaged.
        return "damaged" if store.has(entry.key) else ""
    try:
        _check(entry, value)
    except SnapshotFileError as error:
        return str(error)
    return ""


def _check(entry: Entry, value: Buffer) -> None:
    if absent_of(entry.note) is not None:
        return
    if "parent" in entry.note:
        check_block(entry.key, entry.note, value)
    else:
        snapshot_from(value)
