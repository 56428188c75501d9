"""Several processes use one store, and are killed while they do."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcellar.stores.disk import DiskStore
from kvcellar.stores.disk.index import newest_index
from kvcellar.stores.opening import open_store
from kvcellar.stores.redis_client import RedisClient
from kvcellar.testing.store_use import NaiveStore, content, order, value_of
from tests.stores.worker import MAX_BYTES, numbered

pytestmark = [pytest.mark.alone, pytest.mark.slow]

WORKER = Path(__file__).with_name("worker.py")


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill_after(process: subprocess.Popen[str], opened_s: float) -> list[str]:
    """What it had said by then; the time begins when it has opened its store."""
    assert process.stdout is not None
    told = [process.stdout.readline().strip()]
    time.sleep(opened_s)
    assert process.poll() is None, process.communicate()[1]
    process.kill()
    told += process.stdout.read().split()
    process.communicate()
    return told[1:]


def all_files(folder: Path) -> int:
    return sum(path.is_file() for path in (folder / "values").rglob("*"))


def test_a_killed_writer_loses_at_most_what_it_was_writing(tmp_path: Path) -> None:
    """All that it said it had put is there; the put in flight happened, or did not."""
    rng, oracle, i = random.Random(6), NaiveStore(MAX_BYTES), 0
    for attempt in range(24):
        process = start("write", tmp_path, i, "fsync" if attempt % 4 == 0 else "no fsync")
        told = kill_after(process, rng.uniform(0, 0.06))
        assert told == [str(n) for n in range(i, i + len(told))]
        for n in map(int, told):
            oracle.put(*numbered(n))
        i += len(told) + 1
        store = DiskStore(tmp_path, MAX_BYTES, fsync=False)
        held = order(store)
        if held != list(oracle.held):
            oracle.put(*numbered(i - 1))
        assert held == list(oracle.held)
        report = store.verify()
        assert report.is_sound
        assert content(store, held) == list(oracle.held.values())
        assert all(store.why_absent(key) == "evicted" for key in oracle.evicted)
        assert len(store.gc(0).strays) == len(report.strays)
        assert all_files(tmp_path) == len(held)
        store.close()
    assert i > 100
    assert len(oracle.evicted) > 50


def test_killed_while_opening(tmp_path: Path) -> None:
    """A folder that is half a store becomes a whole one."""
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        process = start("write", folder, 0, "fsync")
        deadline = time.monotonic() + 20
        while not folder.exists() and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(0.001 * attempt)
        process.kill()
        process.communicate()
        store = DiskStore(folder, MAX_BYTES)
        assert store.verify().is_sound
        store.gc(0)
        assert store.put("a", [b"1"])
        store.close()
        left = {path.name for path in folder.iterdir()}
        assert left == {"kvcellar-store-1", "index-1.sqlite", "values"}


@pytest.mark.parametrize("task", ["clean", "rebuild"])
def test_killed_while_cleaning_or_mending(tmp_path: Path, task: str) -> None:
    """Every entry is there afterwards, in its order of use."""
    keys, rng = [f"k{i}" for i in range(25)], random.Random(7)
    store = DiskStore(tmp_path, fsync=False)
    for key in keys:
        store.put(key, [value_of(key, 200)], {"key": key})
    store.close()
    for _ in range(8):
        kill_after(start(task, tmp_path), rng.uniform(0, 0.08))
        store = DiskStore(tmp_path, fsync=False)
        assert store.verify().is_sound
        assert [entry.key for entry in store.entries() if entry.note == {"key": entry.key}] == keys
        assert content(store, keys) == [value_of(key, 200) for key in keys]
        store.gc(0)
        assert all_files(tmp_path) == len(keys)
        store.close()


@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_processes_lose_and_mix_nothing(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """They put, get and delete the same keys; what only one of them put stays."""
    where = str(tmp_path)
    if kind == "redis":
        where = request.getfixturevalue("redis_url")
        server = RedisClient(where)
        server.call("FLUSHALL")  # other tests use it, too
        server.close()
    processes = [start("use", where, seed, 60) for seed in range(4)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    store = open_store(where)
    own = [f"own-{seed}-{i}" for seed in range(4) for i in range(20)]
    assert content(store, own) == [value_of(key, 300) for key in own]
    assert set(own) <= set(order(store))
    if isinstance(store, DiskStore):
        report = store.verify()
        assert report.is_sound
        assert report.strays == ()
    store.close()


def test_an_index_is_spoilt_while_processes_use_it(tmp_path: Path) -> None:
    """It is made anew again and again, and nothing that they put is lost."""
    spoiler = start("rebuild", tmp_path, 0.06)
    processes = [start("use", tmp_path, seed, 60) for seed in range(2)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    kill_after(spoiler, 0)
    store = DiskStore(tmp_path)
    own = [f"own-{seed}-{i}" for seed in range(2) for i in range(20)]
    assert content(store, own) == [value_of(key, 300) for key in own]
    assert store.verify().is_sound
    store.close()
    assert newest_index(tmp_path) > 1


def test_processes_keep_within_the_budget(tmp_path: Path) -> None:
    """Although all of them evict: every file has its entry, every entry its file."""
    processes = [start("use", tmp_path, seed, 80, 3000) for seed in range(3)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    store = DiskStore(tmp_path, 3000)
    assert 2000 < store.bytes_used <= 3000
    report = store.verify()
    assert report.is_sound
    assert report.strays == ()
    store.close()
