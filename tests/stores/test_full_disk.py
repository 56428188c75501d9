"""A store on a disk that is full, or cannot be written to for another reason."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvcellar.disk_errors import disk_trouble
from kvcellar.errors import StoreError
from kvcellar.stores.disk import DiskStore
from kvcellar.stores.disk.index import newest_index
from kvcellar.testing.store_use import content, found, order, refusal, value_of
from tests.disks import DISKS, Disk, is_full, mounted
from tests.stores.test_processes import WORKER

KEYS = [f"k{i}" for i in range(8)]
SIZE = 20_000


@pytest.fixture(params=DISKS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with DISKS[request.param](tmp_path / "disk") as made:
        yield made


@pytest.fixture
def folder(disk: Disk) -> Path:
    """A store that was closed, used in an order of its own, that has evicted one value."""
    store = DiskStore(disk.root / "store", 8 * SIZE)
    for key in ("gone", *KEYS):
        put(store, key)
    for key in ("k5", "k2"):
        store.get(key)
    store.close()
    return disk.root / "store"


ORDER = ["k0", "k1", "k3", "k4", "k6", "k7", "k5", "k2"]


def put(store: DiskStore, key: str) -> bool:
    return store.put(key, [value_of(key, SIZE)], {"key": key, "parent": "p"})


def values(folder: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in folder.glob("values/*/*")}


def assert_holds(store: DiskStore, keys: list[str]) -> None:
    """It has exactly these, whole, in that order of use."""
    assert order(store) == keys
    assert found(store, "parent", "p") == sorted(keys)
    assert store.bytes_used == SIZE * len(keys)
    assert {key: store.has(key) for key in KEYS} == {key: key in keys for key in KEYS}


def test_it_opens_and_says_so(disk: Disk, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk.fill()
    store = DiskStore(folder)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("kvcellar.stores.disk.store", "WARNING")
    assert f"the store in {folder}: {disk.why}" in record.getMessage()
    assert_holds(store, ORDER)
    assert content(store, KEYS) == [value_of(key, SIZE) for key in KEYS]
    assert store.why_absent("gone") == "evicted"
    assert store.verify().is_sound
    store.close()


def test_it_refuses_what_is_new_and_keeps_the_rest(disk: Disk, folder: Path) -> None:
    disk.fill()
    store = DiskStore(folder)
    assert disk.why in refusal(StoreError, lambda: put(store, "new"))
    assert put(store, "k0")  # is there, so that nothing has to be written
    assert values(folder) == set(KEYS)
    assert_holds(store, ORDER)
    store.close()


@pytest.mark.parametrize("is_open", [True, False])
def test_values_can_be_deleted(disk: Disk, folder: Path, is_open: bool) -> None:
    """Their files are gone at once; the index follows, at the latest when there is room."""
    store = DiskStore(folder) if is_open else None
    disk.fill()
    store = store or DiskStore(folder)
    assert is_full(disk.root)
    assert store.delete("k4")
    assert not store.delete("k4")
    assert not store.delete("gone")
    assert (store.get("k4"), store.why_absent("k4")) == (None, "never stored")
    left = [key for key in ORDER if key != "k4"]
    assert_holds(store, left)
    assert values(folder) == set(left)
    disk.free()
    assert_holds(store, left)
    assert put(store, "k4")
    other = DiskStore(folder)
    assert_holds(other, [*left, "k4"])
    report = other.verify()
    assert (report.is_sound, report.strays) == (True, ())
    store.close()
    other.close()


def test_many_values_can_be_deleted(disk: Disk, folder: Path) -> None:
    """Whether the index can be told of them or not, and by whom."""
    disk.fill()
    one, two = DiskStore(folder), DiskStore(folder)
    for i, key in enumerate(KEYS):
        assert (one if i % 2 else two).delete(key)
        disk.fill()
    for store in (one, two):
        assert content(store, KEYS) == [None] * 8
        store.close()
    disk.free()
    store = DiskStore(folder)
    store.gc(0)
    assert_holds(store, [])
    assert store.verify().strays == ()
    store.close()


def test_it_can_be_cleaned(disk: Disk, folder: Path) -> None:
    """Strays go, then those used longest ago."""
    stray = _stray(folder)
    disk.fill()
    store = DiskStore(folder, 5 * SIZE)
    report = store.gc(0)
    assert report.strays == (stray,)
    assert report.evicted == ("k0", "k1", "k3")
    assert values(folder) == set(ORDER[3:])
    assert_holds(store, ORDER[3:])
    assert store.why_absent("k0") == "evicted"
    disk.free()
    again = DiskStore(folder)
    again.gc(0)
    assert_holds(again, ORDER[3:])
    assert_holds(store, ORDER[3:])
    store.close()
    again.close()


def _stray(folder: Path) -> Path:
    store = DiskStore(folder)
    put(store, "stray")
    row = store._row("stray")
    assert row is not None
    store._index.write(lambda index: index.drop(row.name))
    store.close()
    path: Path = row.name.under(folder)
    return path


def test_damage_is_found_without_room_to_mend_it(disk: Disk, folder: Path) -> None:
    """Of a value and of the index: the files tell what there is."""
    next(folder.glob("values/*/k1.*")).write_bytes(b"?")
    (folder / "index-1.sqlite").write_bytes(b"no longer an index" * 99)
    disk.fill()
    store = DiskStore(folder)
    assert set(order(store)) == set(KEYS) - {"k1"}
    assert store.get("k1") is None
    assert content(store, ["k0"]) == [value_of("k0", SIZE)]
    disk.free()
    assert put(store, "k1")
    assert set(order(store)) == set(KEYS)
    assert newest_index(folder) == 2
    assert store.verify().is_sound
    store.close()


def test_what_a_killed_process_had_committed_is_there(disk: Disk, folder: Path) -> None:
    """It is in SQLite's log alone, which nobody has merged."""
    if (child := os.fork()) == 0:
        _put_and_die(folder)
    os.waitpid(child, 0)
    assert (folder / "index-1.sqlite-wal").stat().st_size > 0
    (folder / "index-1.sqlite-shm").unlink()
    disk.fill()
    store = DiskStore(folder)
    assert_holds(store, [*ORDER, "late"])
    assert store.delete("late")
    store.close()
    disk.free()
    again = DiskStore(folder)
    assert again.get("late") is None
    again.gc(0)
    assert_holds(again, ORDER)
    again.close()


def _put_and_die(folder: Path) -> NoReturn:
    code = 1
    try:
        put(DiskStore(folder), "late")
        code = 0
    finally:
        os._exit(code)


def test_a_new_store_needs_room(tmp_path: Path) -> None:
    """Its folder can be made on such a disk, files with something in them cannot."""
    with mounted(tmp_path / "disk", "size=64k,nr_inodes=4") as root:
        (root / "one").touch()
        message = refusal(StoreError, lambda: DiskStore(root / "a" / "b" / "c"))
        assert f"the disk mounted at {root} has no room for another file" in message


def test_a_disk_with_too_many_files(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=4m,nr_inodes=40") as root:
        store = DiskStore(root / "store")
        with pytest.raises(StoreError, match="has no room for another file"):
            deque((put(store, f"k{i}") for i in range(99)), maxlen=0)
        held = order(store)
        assert 5 < len(held) < 40
        store.close()
        again = DiskStore(root / "store")
        assert order(again) == held
        assert again.delete("k0")
        assert order(again) == held[1:]
        again.close()


def test_a_file_system_that_is_read_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mounted(tmp_path / "disk") as root:
        store = DiskStore(root / "store")
        put(store, "a")
        store.close()
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        again = DiskStore(root / "store")
        assert again.read_only
        assert "read-only (its file system is)" in caplog.text
        message = refusal(StoreError, lambda: put(again, "b"))
        assert "is read-only (its file system is): nothing can be changed" in message
        assert content(again, ["a"]) == [value_of("a", SIZE)]
        again.close()
        why = f"the file system mounted at {root} is read-only"
        assert why in refusal(StoreError, lambda: DiskStore(root / "new"))


TROUBLES = {
    errno.ENOSPC: r"the disk mounted at .* is full \(No space left on device\): make room there",
    errno.EDQUOT: r"the disk quota on .* is used up \(Disk quota exceeded\)",
    errno.EROFS: r"the file system mounted at .* is read-only \(Read-only file system\)",
    errno.EACCES: r".* may not be used \(Permission denied\): change its owner or mode",
    errno.EPERM: r".* may not be used \(Operation not permitted\): change its owner or mode",
    errno.EFBIG: r"a file would be larger than is allowed \(File too large\)",
    errno.EIO: r"the disk mounted at .* fails \(Input/output error\): check it",
    errno.EMFILE: r"too many files are open \(Too many open files\)",
    errno.ENOTDIR: r"Not a directory",
}


@pytest.mark.parametrize("number", TROUBLES)
def test_each_trouble_has_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """And leaves no file."""
    store = DiskStore(tmp_path / "store", fsync=False)
    put(store, "a")

    def fail(*_: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(StoreError, match=TROUBLES[number]):
        put(store, "b")
    monkeypatch.undo()
    assert values(tmp_path / "store") == {"a"}
    assert content(store, ["a"]) == [value_of("a", SIZE)]
    assert put(store, "b")
    store.close()


def test_a_disk_is_named_by_where_it_is_mounted(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "full")
    with mounted(tmp_path / "disk") as root:
        (root / "a").mkdir()
        for path in (root, root / "a", root / "a" / "b" / "c"):
            assert f"mounted at {root} is" in disk_trouble(full, path)
        (tmp_path / "link").symlink_to(root / "a")
        assert f"mounted at {root} is" in disk_trouble(full, tmp_path / "link" / "x")
    assert f"mounted at {root} is" not in disk_trouble(full, root)


@pytest.mark.slow
@pytest.mark.alone
def test_processes_on_a_full_disk_are_killed(tmp_path: Path) -> None:
    """They put and delete what they can; the values that nobody deletes stay whole."""
    with mounted(tmp_path / "disk", "size=2m") as root:
        store = DiskStore(root / "store")
        for key in KEYS:
            put(store, key)
        store.close()
        for attempt in range(6):
            command = [sys.executable, str(WORKER), "press", str(root / "store")]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "full\n"
                time.sleep(0.02 * attempt)
                process.send_signal(signal.SIGKILL)
            store = DiskStore(root / "store")
            assert content(store, KEYS) == [value_of(key, SIZE) for key in KEYS]
            for entry in list(store.entries()):
                value = store.get(entry.key)
                assert value is None or bytes(value) == value_of(entry.key, entry.n_bytes)
                if entry.key not in KEYS:
                    store.delete(entry.key)
            store.gc(0)
            report = store.verify()
            assert (report.is_sound, report.n_entries, report.strays) == (True, len(KEYS), ())
            store.close()


def test_a_copied_store_on_a_full_disk(disk: Disk, folder: Path) -> None:
    """A copy of the folder of an open store has its log, but nobody shares memory for it."""
    store = DiskStore(folder)
    put(store, "late")
    shutil.copytree(folder, copy := disk.root / "copy")
    store.close()
    for path in copy.glob("*-shm"):
        path.unlink()
    disk.fill()
    opened = DiskStore(copy)
    assert_holds(opened, [*ORDER, "late"])
    opened.close()
