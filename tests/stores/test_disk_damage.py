"""Files of a store are damaged in thousands of ways: what is got is what was put, or nothing."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcellar.stores.disk import DiskStore
from kvcellar.testing.store_use import content, value_of

KEYS = ("a", "b", "c", "d")
SIZES = (64, 3, 0, 500)
VALUES = {key: value_of(key, size) for key, size in zip(KEYS, SIZES, strict=True)}


def fill(store: DiskStore) -> None:
    for key in KEYS:
        assert put(store, key)


def put(store: DiskStore, key: str) -> bool:
    return store.put(key, [VALUES[key]], {"key": key, "parent": "p"})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    opened = DiskStore(tmp_path / "store", fsync=False)
    fill(opened)
    yield opened
    opened.close()


def file_of(root: Path, key: str) -> Path:
    (path,) = root.glob(f"values/*/{key}.*")
    return path


def assert_exact_or_absent(store: DiskStore, key: str) -> bool:
    """Whether it is there. If it is not, it is gone for all, and can be put again."""
    value = store.get(key)
    if value is not None:
        assert bytes(value) == VALUES[key]
        return True
    assert not store.has(key)
    assert store.why_absent(key) == "never stored"
    assert put(store, key)
    assert content(store, [key]) == [VALUES[key]]
    return False


@pytest.mark.slow
def test_every_byte_of_a_file_counts(store: DiskStore, tmp_path: Path) -> None:
    """But those that fill up the header's last line, which nobody reads."""
    n_bits = 8 * file_of(tmp_path / "store", "a").stat().st_size
    assert n_bits > 1000
    for bit in range(0, n_bits, 3):  # two or three of each byte
        path = file_of(tmp_path / "store", "a")
        data = bytearray(path.read_bytes())
        fills_up = data.rindex(b"}", 0, -64) < bit // 8 < len(data) - 64
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert assert_exact_or_absent(store, "a") == fills_up


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _lengthen(data: bytearray, rng: random.Random) -> None:
    data.extend(rng.randbytes(rng.randint(1, 100)))


def _zero(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    stop = rng.randint(start + 1, len(data))
    data[start:stop] = bytes(stop - start)


def _garble(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.randint(1, 200))
    data[start:stop] = rng.randbytes(stop - start)


DAMAGES = (_flip, _cut, _lengthen, _zero, _garble)


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(
    store: DiskStore, tmp_path: Path, damage: Callable[[bytearray, random.Random], None]
) -> None:
    rng = random.Random(1)
    for _ in range(250):
        key = rng.choice(KEYS)
        path = file_of(tmp_path / "store", key)
        data = bytearray(path.read_bytes())
        damage(data, rng)
        path.write_bytes(data)
        assert_exact_or_absent(store, key)


def test_swapped_files(store: DiskStore, tmp_path: Path) -> None:
    """A sound file under another's name is not taken for it, not even by a new index."""
    root = tmp_path / "store"
    a, d = file_of(root, "a"), file_of(root, "d")
    data_a, data_d = a.read_bytes(), d.read_bytes()
    a.write_bytes(data_d)
    d.write_bytes(data_a)
    report = store.verify()
    assert (report.damaged, report.missing) == (("a", "d"), ())
    store.close()
    (root / "index-1.sqlite").unlink()
    again = DiskStore(root)
    assert content(again, KEYS) == [None, VALUES["b"], VALUES["c"], None]
    again.close()


def test_a_link_is_not_followed(store: DiskStore, tmp_path: Path) -> None:
    """Neither for reading nor for removing."""
    path, other = file_of(tmp_path / "store", "a"), tmp_path / "other"
    path.rename(other)
    path.symlink_to(other)
    assert not assert_exact_or_absent(store, "a")
    assert other.read_bytes()


def test_a_folder_in_place_of_a_file(store: DiskStore, tmp_path: Path) -> None:
    path = file_of(tmp_path / "store", "a")
    path.unlink()
    path.mkdir()
    assert store.get("a") is None
    assert not store.has("a")


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_indexes(
    tmp_path: Path, damage: Callable[[bytearray, random.Random], None]
) -> None:
    """The store opens, works and checks; nothing is raised, whatever SQLite says."""
    rng, original, n_lost = random.Random(2), _closed_store(tmp_path), 0
    for attempt in range(30):
        folder = tmp_path / str(attempt)
        shutil.copytree(original, folder)
        _damage_file(folder / "index-1.sqlite", damage, rng)
        n_lost += _survives(folder)
        shutil.rmtree(folder)
    assert n_lost < 40  # of 120


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("end", ["-wal", "-shm"])
def test_damaged_logs_of_an_index(
    tmp_path: Path, end: str, damage: Callable[[bytearray, random.Random], None]
) -> None:
    """As a machine leaves them that was switched off."""
    rng, original = random.Random(3), tmp_path / "original"
    store = DiskStore(original, fsync=False)
    fill(store)
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        shutil.copytree(original, folder)
        _damage_file(folder / f"index-1.sqlite{end}", damage, rng)
        _survives(folder)
        shutil.rmtree(folder)
    store.close()


def _closed_store(tmp_path: Path) -> Path:
    store = DiskStore(tmp_path / "original", 600, fsync=False)
    fill(store)
    store.put("gone", [bytes(500)])  # so that something was evicted
    fill(store)
    store.close()
    return tmp_path / "original"


def _damage_file(
    path: Path, damage: Callable[[bytearray, random.Random], None], rng: random.Random
) -> None:
    data = bytearray(path.read_bytes())
    damage(data, rng)
    path.write_bytes(data)


def _survives(folder: Path) -> int:
    """Use a store whose index is damaged in every way; how many values cannot be found."""
    store = DiskStore(folder, 600, fsync=False)
    found = content(store, KEYS)
    assert all(got in (None, VALUES[key]) for key, got in zip(KEYS, found, strict=True))
    assert store.bytes_used >= 0
    assert {entry.key for entry in store.find("parent", "p", 9)} <= set(KEYS)
    assert store.why_absent("gone") in ("evicted", "never stored")
    store.put("new", [b"new"])
    assert content(store, ["new"]) == [b"new"]
    store.delete("new")
    store.verify()
    store.gc(0)
    assert store.verify().is_sound
    assert {entry.key for entry in store.entries()} <= {*KEYS, "gone"}
    fill(store)
    assert content(store, KEYS) == list(VALUES.values())
    store.close()
    return found.count(None)
