"""A store on disk: opening, outliving processes, sharing, refusals, maintenance."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvcellar.errors import OptionError, StoreError
from kvcellar.stores.base import Note
from kvcellar.stores.disk import DiskStore, index
from kvcellar.stores.disk import store as store_module
from kvcellar.stores.disk.files import Name, header_of, map_value, write_value
from kvcellar.testing.store_use import content, found, order, refusal, value_of
from tests.disks import files_of_at_most


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., DiskStore]]:
    """Opens the same folder again and again; all are closed at the end."""
    opened: list[DiskStore] = []

    def open_(max_bytes: int | None = None, **options: bool) -> DiskStore:
        opened.append(DiskStore(tmp_path / "store", max_bytes, **{"fsync": False, **options}))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


Open = Callable[..., DiskStore]


def files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "values").rglob("*") if path.is_file())


def state(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(root.rglob("*"))}


# --- opening ------------------------------------------------------------------------------------


def test_everything_outlives_the_store(open_store: Open) -> None:
    first = open_store(10)
    for key in "abc":
        first.put(key, [key.encode() * 4], {"n": ord(key)})
    first.get("b")
    entries = list(first.entries())
    first.close()
    again = open_store(10)
    assert list(again.entries()) == entries
    assert content(again, ["a", "b", "c"]) == [None, b"bbbb", b"cccc"]
    assert again.why_absent("a") == "evicted"


@pytest.mark.parametrize("name", ["a b", "100%", "what?", "#1", "ö", "a'b", "file:x"])
def test_any_folder_will_do(tmp_path: Path, name: str) -> None:
    store = DiskStore(tmp_path / name / "deeper")
    store.put("a", [b"1"])
    assert content(store, ["a"]) == [b"1"]
    store.close()
    assert (tmp_path / name / "deeper" / "index-1.sqlite").exists()


def test_the_home_folder_may_be_abbreviated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    DiskStore("~/cache").close()
    assert (tmp_path / "cache" / "kvcellar-store-1").exists()


def test_other_folders_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    before = state(tmp_path)
    assert str(tmp_path) in refusal(StoreError, lambda: DiskStore(tmp_path))
    file = tmp_path / "notes.txt"
    assert str(file) in refusal(StoreError, lambda: DiskStore(file))
    assert str(file) in refusal(StoreError, lambda: DiskStore(file / "below"))
    refusal(StoreError, lambda: DiskStore(tmp_path, read_only=True))
    refusal(StoreError, lambda: DiskStore(tmp_path / "none", read_only=True))
    assert state(tmp_path) == before


def test_newer_versions_are_refused(open_store: Open, tmp_path: Path) -> None:
    open_store().close()
    (tmp_path / "store" / "kvcellar-store-2").touch()
    message = refusal(StoreError, open_store)
    assert str(tmp_path / "store") in message
    assert "version 2" in message


def test_bad_budgets_are_refused(tmp_path: Path) -> None:
    refusal(OptionError, lambda: DiskStore(tmp_path / "store", -5))
    assert not (tmp_path / "store").exists()


# --- sharing ------------------------------------------------------------------------------------


def test_two_handles_are_one_store(open_store: Open) -> None:
    one, two = open_store(10), open_store(10)
    one.put("a", [b"aaaa"])
    two.put("b", [b"bbbb"])
    assert content(one, ["b", "a"]) == content(two, ["b", "a"]) == [b"bbbb", b"aaaa"]
    one.put("c", [b"cccc"])
    assert (two.why_absent("b"), order(two)) == ("evicted", ["a", "c"])
    assert two.delete("a")
    assert (one.has("a"), one.bytes_used) == (False, 4)


def test_two_writers_of_one_key_leave_one_file(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second to be done keeps what the first has entered."""
    one, two = open_store(), open_store()
    write = write_value

    def overtaken(*args: Any) -> None:
        write(*args)
        monkeypatch.setattr(store_module, "write_value", write)
        assert two.put("a", [b"value"])

    monkeypatch.setattr(store_module, "write_value", overtaken)
    assert one.put("a", [b"value"])
    assert len(files(tmp_path / "store")) == 1
    assert content(one, ["a"]) == content(two, ["a"]) == [b"value"]


@pytest.mark.parametrize("put_again", [False, True])
def test_a_reader_is_overtaken(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, put_again: bool
) -> None:
    """Its file is removed after it was found and before it was opened: nothing, or the new one."""
    one, two = open_store(), open_store()
    one.put("a", [b"value"])
    read = map_value

    def overtaken(path: Path, key: str) -> memoryview:
        monkeypatch.setattr(store_module, "map_value", read)
        two.delete("a")
        if put_again:
            two.put("a", [b"value"])
        return read(path, key)

    monkeypatch.setattr(store_module, "map_value", overtaken)
    assert content(one, ["a"]) == [b"value" if put_again else None]
    assert two.has("a") == put_again
    assert one.verify().is_sound


def test_a_store_does_not_cross_a_fork(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's connections cannot, so it says so."""
    store = open_store()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert "fork" in refusal(StoreError, lambda: store.get("a"))
    monkeypatch.undo()
    assert store.get("a") is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
@pytest.mark.parametrize("use", ["has", "close"])
def test_a_fork_of_a_busy_process_does_not_wait(open_store: Open, use: str) -> None:
    """For a thread that is not there any more: it had the lock when the process forked."""
    store = open_store()
    store.put("a", [b"value"])
    ready, done = threading.Event(), threading.Event()

    def work(_: index.Index) -> bool:
        ready.set()
        return done.wait(30)

    thread = threading.Thread(target=lambda: store._index.read(work))
    thread.start()
    assert ready.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what this is about
        child = os.fork()
    if child == 0:
        _end_as_told(store, use)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == (42 if use == "has" else 0)
    assert content(store, ["a"]) == [b"value"]


def _end_as_told(store: DiskStore, use: str) -> NoReturn:
    """In the child: end with 42 if the store refuses as it should, 0 if it does what it is told."""
    code = 1
    try:
        signal.alarm(10)  # ends the child, if it waits
        store.has("a") if use == "has" else store.close()
        code = 0
    except StoreError as error:
        code = 42 if "was opened before a fork" in str(error) else 2
    finally:
        os._exit(code)


# --- the index ----------------------------------------------------------------------------------


def test_an_index_is_made_anew_while_stores_are_open(open_store: Open, tmp_path: Path) -> None:
    """Whoever finds it damaged does so; the others notice and go on."""
    root = tmp_path / "store"
    one, two = open_store(), open_store()
    for key in "abc":
        one.put(key, [key.encode() * 9], {"key": key, "parent": "p"})
    for path in root.glob("index-1.sqlite*"):
        path.write_bytes(b"no longer an index" * 99)
    three = open_store()
    for store in (two, one, three):
        assert [(entry.key, entry.note) for entry in store.entries()] == [
            (key, {"key": key, "parent": "p"}) for key in "abc"
        ]
        assert found(store, "parent", "p") == ["a", "b", "c"]
    one.put("d", [b"d"])
    assert content(two, ["d"]) == content(three, ["d"]) == [b"d"]
    assert [path.name for path in root.glob("index*.sqlite")] == ["index-2.sqlite"]


def test_an_index_may_be_removed_by_hand(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.put("a", [b"1"])
    for path in (tmp_path / "store").glob("index*"):
        path.unlink()
    assert content(store, ["a"]) == [b"1"]
    store.put("b", [b"2"])
    store.close()
    assert content(open_store(), ["a", "b"]) == [b"1", b"2"]


def test_a_new_index_takes_one_of_two_files(open_store: Open, tmp_path: Path) -> None:
    """The other is a stray."""
    store, root = open_store(), tmp_path / "store"
    store.put("a", [b"1"])
    (path,) = files(root)
    Name.new("a").under(root).write_bytes(path.read_bytes())
    (root / "index-1.sqlite").write_bytes(b"")
    assert content(open_store(), ["a"]) == [b"1"]
    assert len(store.gc(0).strays) == 1
    assert content(store, ["a"]) == [b"1"]


def test_files_tell_what_they_hold(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    note: Note = {"model": "ö", "n": 3}
    store.put("a", [b"12", b"345"], note)
    (path,) = files(tmp_path / "store")
    header = header_of(path)
    (entry,) = store.entries()
    assert (header.entry.key, header.entry.note, header.entry.n_bytes) == ("a", note, 5)
    assert header.entry.created == entry.created
    assert header.start % 64 == 0
    assert path.read_bytes()[header.start :] == b"12345"


def test_a_bounded_number_of_evictions_is_remembered(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "REMEMBERED", 5)
    store = open_store(2)
    for i in range(10):
        store.put(f"k{i}", [b"xx"])
    reasons = [store.why_absent(f"k{i}") for i in range(9)]
    assert reasons == ["never stored"] * 4 + ["evicted"] * 5


# --- what cannot be written or read -------------------------------------------------------------


@pytest.mark.parametrize("limit", [1000, 50_000])
def test_a_full_disk_changes_nothing(open_store: Open, tmp_path: Path, limit: int) -> None:
    """Whether the value does not fit, or the index does not either."""
    store, root = open_store(200_000), tmp_path / "store"
    store.put("a", [b"a" * 400])
    with files_of_at_most(limit):
        assert str(root) in refusal(StoreError, lambda: store.put("b", [bytes(100_000)]))
        assert content(store, ["a"]) == [b"a" * 400]
    assert (order(store), len(files(root)), store.has("b")) == (["a"], 1, False)
    assert store.put("b", [bytes(100_000)])
    assert store.verify().is_sound


def test_an_index_without_room_changes_nothing(open_store: Open, tmp_path: Path) -> None:
    """The value is written by then, and removed."""
    store, root = open_store(), tmp_path / "store"
    store.put("a", [b"a"])
    size = (root / "index-1.sqlite-wal").stat().st_size
    with files_of_at_most(size - 1):
        refusal(StoreError, lambda: store.put("b", [b"b"], {"long": "x" * 5000}))
    assert (order(store), len(files(root))) == (["a"], 1)
    assert store.put("b", [b"b"])


def test_a_writer_that_is_interrupted_leaves_nothing(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    n_writes = 0
    write = os.write

    def interrupted(descriptor: int, data: memoryview) -> int:
        nonlocal n_writes
        n_writes += 1
        if n_writes == 2:
            raise KeyboardInterrupt
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", interrupted)
    refusal(KeyboardInterrupt, lambda: store.put("a", [b"1", b"2"]))  # type: ignore[arg-type]
    assert files(tmp_path / "store") == []
    assert store.put("a", [b"1", b"2"])


def test_a_read_only_store_is_read_and_left_alone(open_store: Open, tmp_path: Path) -> None:
    writer = open_store()
    for key in "abc":
        writer.put(key, [key.encode()], {"key": key})
    (damaged,) = (tmp_path / "store").glob("values/*/b.*")
    damaged.write_bytes(b"?")
    before = state(tmp_path)
    reader = open_store(read_only=True)
    assert content(reader, ["c", "b", "a"]) == [b"c", None, b"a"]
    assert [entry.note for entry in reader.entries()] == [{"key": "a"}, {"key": "c"}]
    assert reader.bytes_used == 2
    assert reader.verify().n_entries == 2
    for change in (lambda: reader.put("d", [b"d"]), lambda: reader.delete("a"), reader.gc):
        assert "read-only" in refusal(StoreError, change)
    assert state(tmp_path) == before
    writer.delete("a")
    assert reader.get("a") is None


def test_a_folder_without_permission_is_read_only(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store().put("a", [b"1"])
    if os.getuid() == 0:  # root may write anywhere
        monkeypatch.setattr(os, "access", lambda *_: False)
    (tmp_path / "store").chmod(stat.S_IRUSR | stat.S_IXUSR)
    reader = open_store()
    assert reader.read_only
    assert content(reader, ["a"]) == [b"1"]
    (tmp_path / "store").chmod(stat.S_IRWXU)


# --- maintenance --------------------------------------------------------------------------------


def test_verify_names_what_is_wrong_and_changes_nothing(open_store: Open, tmp_path: Path) -> None:
    store, root = open_store(), tmp_path / "store"
    for key in "abcd":
        store.put(key, [value_of(key, 100)])
    damaged, missing = (next(root.glob(f"values/*/{key}.*")) for key in "bc")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    missing.unlink()
    stray = Name.new("e").under(root)
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"half a val")
    before = state(root / "values")
    report = store.verify()
    assert (report.n_entries, report.n_bytes, report.is_sound) == (4, 400, False)
    assert (report.damaged, report.missing, report.strays) == (("b",), ("c",), (stray,))
    assert order(store) == list("abcd")
    assert state(root / "values") == before


def test_gc_removes_what_nobody_needs(open_store: Open, tmp_path: Path) -> None:
    store, root = open_store(), tmp_path / "store"
    for key in "abcd":
        store.put(key, [value_of(key, 100)])
    next(root.glob("values/*/b.*")).unlink()
    stray = Name.new("e").under(root)
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"half a val")
    old_index = root / "index-0.sqlite"
    unfinished = root / f"unfinished-{'0' * 16}.sqlite-wal"
    for path in (old_index, unfinished):
        path.write_bytes(bytes(30))
    (root / "values" / "README").write_text("not ours to remove")
    n_value = next(root.glob("values/*/a.*")).stat().st_size
    before = sorted(root.rglob("*"))
    planned = open_store(200).gc(0, dry_run=True)
    assert sorted(root.rglob("*")) == before
    report = open_store(200).gc(0)
    assert planned == replace(report, bytes_freed=report.bytes_freed - 60)
    assert (report.strays, report.missing, report.evicted) == ((stray,), ("b",), ("a",))
    assert report.bytes_freed == 10 + n_value + 60
    assert order(store) == ["c", "d"]
    assert {path.name.split("-")[0] for path in root.iterdir()} == {"kvcellar", "index", "values"}
    assert not old_index.exists()
    assert (root / "values" / "README").exists()
    assert store.gc(0).bytes_freed == 0


def test_gc_leaves_young_files_alone(open_store: Open, tmp_path: Path) -> None:
    """They may be about to be entered."""
    store, root = open_store(), tmp_path / "store"
    stray = Name.new("e").under(root)
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"half a val")
    assert store.gc().strays == ()
    os.utime(stray, (1, 1))
    assert store.gc().strays == (stray,)


@pytest.mark.parametrize("times", [1, 3])
def test_a_file_is_removed_before_it_is_entered(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """It is written again, but not for ever."""
    store, cleaner, n_removed = open_store(), open_store(), 0
    write = write_value

    def cleaned(*args: Any) -> None:
        nonlocal n_removed
        write(*args)
        if n_removed < times:
            n_removed += len(cleaner.gc(0).strays)

    monkeypatch.setattr(store_module, "write_value", cleaned)
    if times == 1:
        assert store.put("a", [b"1"])
    else:
        assert "removed again and again" in refusal(StoreError, lambda: store.put("a", [b"1"]))
    assert (store.verify().n_entries, n_removed) == (int(times == 1), times)


def test_a_smaller_budget_takes_effect_with_the_next_put(open_store: Open) -> None:
    store = open_store()
    for key in "abcd":
        store.put(key, [key.encode()])
    smaller = open_store(2)
    assert smaller.bytes_used == 4
    smaller.put("e", [b"e"])
    assert order(store) == ["d", "e"]


@pytest.mark.skipif(os.name != "posix", reason="open files keep their folder there")
def test_a_folder_that_is_removed_is_said_by_name(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.put("a", [b"1"])
    shutil.rmtree(tmp_path / "store")
    verbs: list[Callable[[], object]] = [
        *(lambda verb=verb: verb("a") for verb in (store.get, store.has, store.touch)),
        lambda: store.put("b", [b"1"]),
        lambda: store.find("parent", "p", 1),
        lambda: list(store.entries()),
        lambda: store.why_absent("a"),
        store.gc,
        store.verify,
    ]
    for verb in verbs:
        assert str(tmp_path / "store") in refusal(StoreError, verb)
