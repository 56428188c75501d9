"""Every verb of every store is interrupted at every line: it happened or did not, and all works."""

from __future__ import annotations

import gc
import shutil
import threading
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import kvcellar.stores
from kvcellar.stores.base import Store
from kvcellar.stores.disk import DiskStore
from kvcellar.stores.memory import MemoryStore
from kvcellar.stores.redis import RedisStore
from kvcellar.testing.store_use import content, found, order, value_of
from tests.stores.interrupting import each_line

# A file that was just opened when the exception came is closed with its last reference, and Python
# says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
    ),
]

SOURCE = Path(kvcellar.stores.__file__).parent
SIZE = 300
KEYS = ("a", "b", "c")
BUDGET = 4 * SIZE

Verb = Callable[[Store], object]


def put(store: Store, key: str) -> bool:
    return store.put(key, [value_of(key, SIZE)], {"key": key, "parent": "p"})


VERBS: dict[str, tuple[Verb, set[str]]] = {
    "put": (lambda store: put(store, "d"), set()),
    "put what is there": (lambda store: put(store, "b"), set()),
    "put and evict": (
        lambda store: [put(store, "d"), put(store, "e"), put(store, "f")],
        {"a", "b"},
    ),
    "get": (lambda store: store.get("b"), set()),
    "get nothing": (lambda store: store.get("x"), set()),
    "touch": (lambda store: store.touch_all(["c", "a", "x"]), set()),
    "delete": (lambda store: store.delete("b"), {"b"}),
    "list": (lambda store: list(store.entries()), set()),
    "find": (lambda store: store.find("parent", "p", 9), set()),
    "ask": (lambda store: (store.has("a"), store.why_absent("x"), store.bytes_used), set()),
}
"""What is done to a store that has three values and room for a fourth; and what that may drop."""


def fill(store: Store) -> Store:
    for key in KEYS:
        put(store, key)
    return store


def assert_sound(store: Store, may_lack: set[str], where: str) -> None:
    """What is there is whole, counted, and in reach of all threads; new values can be stored."""
    for key in may_lack:  # what was damaged before the verb is dropped when it is read
        store.get(key)
    held = order(store)
    assert set(KEYS) - may_lack <= set(held) <= {*KEYS, *"def"}, where
    assert store.bytes_used == SIZE * len(held), where
    assert found(store, "parent", "p") == sorted(held), where
    assert {key for key in "abcdefx" if store.has(key)} == set(held), where
    for key in held:
        assert content(store, [key]) == [value_of(key, SIZE)], where
    assert put(store, "new"), where
    assert content(store, ["new"]) == [value_of("new", SIZE)], where
    assert store.delete("new"), where
    if store.max_bytes is not None:
        assert store.bytes_used <= store.max_bytes, where
        for i in range(9):  # what was counted too high or too low would show
            put(store, f"more{i}")
        assert order(store) == [f"more{i}" for i in range(5, 9)], where


def in_another_thread(work: Callable[[], object], where: str) -> None:
    """Do work there; it must not wait for a lock that was never released."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), f"{where}: a lock was not released"
    if failures:
        raise failures[0]


def n_open_files() -> int:
    gc.collect()
    found = Path("/proc/self/fd")
    return len(list(found.iterdir())) if found.exists() else 0


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("in_thread", [False, True])
def test_memory(verb: str, in_thread: bool) -> None:
    act, may_lack = VERBS[verb]
    store: Store = MemoryStore()

    def prepare() -> Callable[[], object]:
        nonlocal store
        store = fill(MemoryStore(BUDGET))
        return lambda: act(store)

    for where in each_line(prepare, SOURCE):

        def check(where: str = where) -> None:
            assert_sound(store, may_lack, where)

        in_another_thread(check, where) if in_thread else check()


# --- on disk ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three values."""
    folder = tmp_path_factory.mktemp("interrupts") / "store"
    fill(DiskStore(folder, BUDGET, fsync=False)).close()
    return folder


@pytest.fixture
def folders(filled: Path, tmp_path: Path) -> Callable[[], Path]:
    """Gives a copy of that folder, each time a new one."""

    def copy() -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return shutil.copytree(filled, tmp_path / "copy")

    return copy


def assert_clean(folder: Path, where: str, *, is_tidy: bool = True) -> None:
    """Nothing stays that no row has, or nothing that gc does not remove; others find the same."""
    gc.collect(1)  # an index that nobody refers to is closed then
    with closing(DiskStore(folder, fsync=False)) as other:
        report = other.verify()
        assert report.is_sound, where
        assert report.strays == () or not is_tidy, where
        if not is_tidy:
            other.gc(0)
        assert other.gc(0).bytes_freed == 0, where
    left = {path.name for path in folder.iterdir()}
    assert left <= {"kvcellar-store-1", "index-1.sqlite", "index-2.sqlite", "values"}, where


DISK_VERBS: dict[str, tuple[Callable[[DiskStore], object], set[str]]] = {
    **{name: VERBS[name] for name in VERBS},  # a DiskStore is a Store
    "verify": (lambda store: store.verify(), set()),
    "gc": (lambda store: store.gc(0), set()),
    "get what is damaged": (lambda store: [_damage(store), store.get("b")], {"b"}),
    "put what is missing": (lambda store: [_lose(store), put(store, "b")], {"b"}),
    "rebuild": (lambda store: [_spoil(store), store.get("a")], set()),
    "close": (lambda store: store.close(), set()),
}


def _file_of(store: DiskStore, key: str) -> Path:
    (path,) = store._root.glob(f"values/*/{key}.*")
    return path


def _damage(store: DiskStore) -> object:
    return _file_of(store, "b").write_bytes(b"?")


def _lose(store: DiskStore) -> object:
    path = _file_of(store, "b")
    path.unlink()
    return path


def _spoil(store: DiskStore) -> object:
    garbage = b"no longer an index" * 99
    return [path.write_bytes(garbage) for path in store._root.glob("index-1.sqlite*")]


@pytest.mark.slow
@pytest.mark.parametrize("verb", DISK_VERBS)
def test_disk(folders: Callable[[], Path], verb: str) -> None:
    act, may_lack = DISK_VERBS[verb]
    opened: list[DiskStore] = []

    def prepare() -> Callable[[], object]:
        for one in opened:
            one.close()
        opened[:] = [DiskStore(folders(), BUDGET, fsync=False)]
        return lambda: act(opened[0])

    n_files = n_open_files()
    for where in each_line(prepare, SOURCE, step=3):
        store = opened[0]
        if verb == "close":
            store.close()
            store = opened[0] = DiskStore(store._root, BUDGET, fsync=False)
        in_another_thread(lambda store=store: list(store.entries()), where)  # type: ignore[misc]
        assert_sound(store, may_lack, where)
        store.close()
        assert_clean(store._root, where, is_tidy=verb not in ("gc", "rebuild"))
    for one in opened:
        one.close()
    opened.clear()
    assert n_open_files() <= n_files


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a store", "nothing", "a damaged index", "no index", "read-only"])
def test_opening_a_folder(folders: Callable[[], Path], what: str) -> None:
    opened: list[DiskStore] = []
    folder = Path()

    def prepare() -> Callable[[], object]:
        nonlocal folder
        folder = folders()
        if what == "nothing":
            shutil.rmtree(folder)
        elif what == "a damaged index":
            (folder / "index-1.sqlite").write_bytes(b"no longer an index" * 99)
        elif what == "no index":
            (folder / "index-1.sqlite").unlink()
        return lambda: opened.append(
            DiskStore(folder, BUDGET, fsync=False, read_only=what == "read-only")
        )

    n_files = n_open_files()
    for where in each_line(prepare, SOURCE, step=3):
        store = DiskStore(folder, BUDGET, fsync=False)
        assert_sound(store, set(KEYS) if what == "nothing" else set(), where)
        store.close()
        assert_clean(folder, where, is_tidy=False)
    opened.pop().close()
    assert n_open_files() <= n_files


# --- in Redis -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("where_to", ["ours", "the package's"])
def test_redis(redis_url: str, verb: str, where_to: str) -> None:
    """Also within the package: no connection is used that has an answer left."""
    import redis

    act, may_lack = VERBS[verb]
    store = RedisStore(redis_url, prefix=f"interrupts-{uuid.uuid4()}:")
    files = SOURCE if where_to == "ours" else Path(redis.__file__).parent

    def prepare() -> Callable[[], object]:
        for entry in store.entries():
            store.delete(entry.key)
        fill(store)
        return lambda: act(store)

    n_files = n_open_files()
    for where in each_line(prepare, files, step=2 if where_to == "ours" else 7):
        in_another_thread(lambda: list(store.entries()), where)
        assert_sound(store, may_lack, where)
    assert n_open_files() <= n_files + 2
    for entry in store.entries():
        store.delete(entry.key)
    store.close()


@pytest.mark.slow
def test_opening_a_server(redis_url: str) -> None:
    opened: list[RedisStore] = []
    n_files = n_open_files()
    for where in each_line(lambda: lambda: opened.append(RedisStore(redis_url)), SOURCE):
        assert not opened, where
    opened.pop().close()
    assert n_open_files() <= n_files
