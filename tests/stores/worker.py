"""A process that uses a store until it is done or killed: ``worker.py TASK WHERE ARGUMENTS…``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvcellar.errors import StoreError
from kvcellar.stores.base import Entry
from kvcellar.stores.disk import DiskStore
from kvcellar.stores.disk.access import Access
from kvcellar.stores.disk.files import Name, write_value
from kvcellar.stores.disk.index import index_path, newest_index
from kvcellar.stores.opening import open_store
from kvcellar.testing.store_use import use_at_random, value_of

MAX_BYTES = 120_000
SIZES = (17, 900, 40_000, 5_000, 1, 0, 20_000)


def numbered(i: int) -> tuple[str, bytes]:
    """The key and value that a writer puts as its i-th."""
    return f"k{i}", value_of(f"k{i}", SIZES[i % len(SIZES)])


def write(where: str, start: str, fsync: str) -> None:
    """Put values without end, and say so after each."""
    store = DiskStore(where, MAX_BYTES, fsync=fsync == "fsync")
    _tell("open")
    i = int(start)
    while True:
        key, value = numbered(i)
        store.put(key, [value[:7], value[7:]], {"i": i})
        _tell(str(i))
        i += 1


def clean(where: str) -> None:
    """Leave files behind and remove them, without end."""
    store = DiskStore(where, fsync=False)
    _tell("open")
    while True:
        for i in range(20):
            name = Name.new(f"stray{i}")
            entry, pieces = Entry(name.key, 3, 0, 0, {}), [memoryview(b"abc")]
            write_value(name.under(Path(where)), entry, pieces, False, Access())
        store.gc(0)


def press(where: str) -> None:
    """Fill a disk with values, then delete some and put others, without end."""
    store, i = DiskStore(where), 0
    while True:
        key, value = numbered(i + 10)
        i += 1
        try:
            store.put(key, [value])
        except StoreError:
            _tell("full")
            for entry in [entry for entry in store.entries() if len(entry.key) > 2][:3]:
                store.delete(entry.key)


def rebuild(where: str, pause_s: str = "0") -> None:
    """Spoil the index and have it made anew, without end."""
    _tell("open")
    while True:
        number = newest_index(Path(where))
        if number:
            index_path(Path(where), number).write_bytes(b"no index at all")
        DiskStore(where, fsync=False).close()
        time.sleep(float(pause_s))


def use(where: str, seed: str, n_steps: str, max_bytes: str = "") -> None:
    """Put, get and delete what others do too; then put what nobody else does."""
    store = open_store(where, **({"max_bytes": int(max_bytes)} if max_bytes else {}))
    use_at_random(store, int(seed), int(n_steps))
    for key in (f"own-{seed}-{i}" for i in range(20)):
        store.put(key, [value_of(key, 300)], {"key": key})
    store.close()


def _tell(what: str) -> None:
    os.write(1, f"{what}\n".encode())


TASKS: dict[str, Callable[..., None]] = {
    "write": write,
    "clean": clean,
    "press": press,
    "rebuild": rebuild,
    "use": use,
}

if __name__ == "__main__":
    TASKS[sys.argv[1]](*sys.argv[2:])
