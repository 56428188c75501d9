"""Memory, disk and Redis do the same; memory and disk as a naive store does it."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcellar.stores.base import Store
from kvcellar.stores.disk import DiskStore
from kvcellar.stores.memory import MemoryStore
from kvcellar.stores.redis import RedisStore
from kvcellar.testing.store_conformance import BudgetConformance, StoreConformance
from kvcellar.testing.store_use import NaiveStore, order, value_of
from tests.profiles import examples


@pytest.mark.alone
class TestMemory(StoreConformance):
    def open(self) -> Store:
        return MemoryStore()


@pytest.mark.alone
class TestBudgetOfMemory(BudgetConformance):
    def open(self, max_bytes: int) -> Store:
        return MemoryStore(max_bytes)


@pytest.mark.alone
class TestDisk(StoreConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "new" / "store"

    def open(self) -> Store:
        return DiskStore(self.folder, fsync=False)


@pytest.mark.alone
class TestBudgetOfDisk(BudgetConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "store"

    def open(self, max_bytes: int) -> Store:
        return DiskStore(self.folder, max_bytes, fsync=False)


@pytest.mark.alone
class TestRedis(StoreConformance):
    ttl_s: float | None = None

    @pytest.fixture(autouse=True)
    def _server(self, redis_url: str) -> None:
        self.url = redis_url

    def open(self) -> Store:
        return RedisStore(self.url, prefix=f"[te*st?]-{uuid.uuid4()}:", ttl_s=self.ttl_s)


class TestRedisForSomeTime(TestRedis):
    ttl_s = 100.0


KEYS = st.sampled_from("abcdefgh")
SIZES = {
    key: 3 * i + 1 for i, key in enumerate("abcdefgh")
}  # of 92 bytes, 20 are kept; the last never fits


class StoreAndOracle(RuleBasedStateMachine):
    """A store beside the naive one: every answer, the order of use, and what was evicted."""

    MAX_BYTES = 20

    def __init__(self) -> None:
        super().__init__()
        self.oracle = NaiveStore(self.MAX_BYTES)
        self.store = self.open()

    def open(self) -> Store:
        return MemoryStore(self.MAX_BYTES)

    @rule(key=KEYS)
    def put(self, key: str) -> None:
        value = value_of(key, SIZES[key])
        assert self.store.put(key, [value]) == self.oracle.put(key, value)

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        got = self.store.get(key)
        assert (None if got is None else bytes(got)) == self.oracle.get(key)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        assert self.store.delete(key) == self.oracle.delete(key)

    @rule(key=KEYS)
    def ask(self, key: str) -> None:
        assert self.store.has(key) == (key in self.oracle.held)
        assert self.store.why_absent(key) == self.oracle.why_absent(key)

    @invariant()
    def holds_the_same(self) -> None:
        assert order(self.store) == list(self.oracle.held)
        assert self.store.bytes_used == self.oracle.bytes_used <= self.MAX_BYTES

    def teardown(self) -> None:
        self.store.close()


class DiskAndOracle(StoreAndOracle):
    """The same through two handles; closing, opening, checking and cleaning change nothing."""

    def open(self) -> Store:
        self.folder = Path(tempfile.mkdtemp())
        self.other = DiskStore(self.folder, self.MAX_BYTES, fsync=False)
        return DiskStore(self.folder, self.MAX_BYTES, fsync=False)

    @rule()
    def take_the_other(self) -> None:
        assert isinstance(self.store, DiskStore)
        self.store, self.other = self.other, self.store

    @rule()
    def open_again(self) -> None:
        self.store.close()
        self.store = DiskStore(self.folder, self.MAX_BYTES, fsync=False)

    @rule()
    def clean(self) -> None:
        report = self.other.gc(0)
        assert (report.strays, report.missing, report.evicted) == ((), (), ())

    @rule()
    def verify(self) -> None:
        report = self.other.verify()
        assert report.is_sound
        assert report.strays == ()
        assert report.n_bytes == self.oracle.bytes_used

    def teardown(self) -> None:
        super().teardown()
        self.other.close()
        shutil.rmtree(self.folder)


TestMemoryAndOracle = StoreAndOracle.TestCase
TestMemoryAndOracle.settings = examples(60, steps=30)
TestDiskAndOracle = DiskAndOracle.TestCase
TestDiskAndOracle.settings = examples(20, steps=25)
