"""Where hashes of models are kept: for this user alone, and never a condition of anything."""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from kvcellar.cli import environment
from kvcellar.files import FileStamp
from kvcellar.runtime import hash_cache as module
from kvcellar.runtime import weights_hash
from kvcellar.runtime.hash_cache import ENV, HashCache, KeptHash
from kvcellar.runtime.model import Model
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.tiny_llama import TinyLlama

STAMP = FileStamp(1, 2, 3, 4, 5)
KEPT = KeptHash("a" * 64, b"s" * 32, "b" * 64)
OTHER = KeptHash("c" * 64, b"t" * 32, "d" * 64)

posix = pytest.mark.skipif(os.name != "posix", reason="files have no owners there")


@pytest.fixture(autouse=True)
def _common_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where entries are."""
    monkeypatch.setenv(ENV, str(tmp_path / "caches"))
    return tmp_path / "caches" / "hashes"


@pytest.fixture
def entry(folder: Path) -> Path:
    """The file of an entry."""
    HashCache.of_user().put(STAMP, KEPT)
    (path,) = folder.iterdir()
    assert HashCache.of_user().get(STAMP) == KEPT
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def get(stamp: FileStamp = STAMP) -> KeptHash | None:
    return HashCache.of_user().get(stamp)


# -- what is kept


def test_an_entry_is_for_one_stamp(entry: Path) -> None:
    for name in STAMP._fields:
        other = STAMP._replace(**{name: 9})
        assert get(other) is None
        HashCache.of_user().put(other, OTHER)
        assert get(other) == OTHER
        expected = None if other[:2] == STAMP[:2] else KEPT  # the file's next version
        assert get() == expected
        HashCache.of_user().put(STAMP, KEPT)
    assert len(list(entry.parent.iterdir())) == 3


@posix
def test_nobody_else_may_read_or_write_it(entry: Path) -> None:
    assert mode_of(entry) == 0o600
    assert mode_of(entry.parent) == mode_of(entry.parent.parent) == 0o700


@pytest.mark.parametrize("what", ["", "~/caches", "relative"])
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(ENV, what)
    root = {"": platformdirs.user_cache_path("kvcellar", appauthor=False)}.get(
        what, tmp_path / Path(what).name
    )
    HashCache.of_user().put(STAMP, KEPT)
    assert [path.name for path in (root / "hashes").iterdir()] == ["1-2.json"]
    assert root.is_relative_to(tmp_path)


def test_the_variable_is_in_bug_reports() -> None:
    assert ENV in environment.VARIABLES


def test_those_unused_for_longest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 4)
    cache = HashCache.of_user()
    for i in range(4):
        cache.put(STAMP._replace(inode=i), KEPT)
        os.utime(folder / f"1-{i}.json", (i, i))
    (folder / ".new-left").touch()  # by a writer that was killed
    os.utime(folder / ".new-left", (0, 0))
    assert get(STAMP._replace(inode=1)) == KEPT  # it is used
    cache.put(STAMP._replace(inode=9), KEPT)
    assert {path.name for path in folder.iterdir()} == {
        "1-1.json",
        "1-2.json",
        "1-3.json",
        "1-9.json",
    }


# -- what is not believed


def rewritten(**changes: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def filled(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def a_link(path: Path) -> None:
    """To what would be believed if it were no link."""
    target = path.parent.parent / "target"
    HashCache.of_user().put(STAMP, OTHER)
    path.replace(target)
    path.symlink_to(target)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(str(path))


WRONG: dict[str, Callable[[Path], object]] = {
    "nothing": filled(b""),
    "half": filled(b'{"version": 1, "stamp"'),
    "list": filled(b"[]"),
    "number": filled(b"3"),
    "no text": filled(b"\xff\xfe"),
    "no keys": filled(b"{}"),
    "deep": filled(b"[" * 4000),
    "long": filled(b" " * 5000),
    "zeros": filled(bytes(400)),
    "version": rewritten(version=0),
    "no stamp": rewritten(stamp=None),
    "short stamp": rewritten(stamp={"device": 1}),
    "stamp": rewritten(stamp={**STAMP._asdict(), "ctime_ns": 6}),
    "short": rewritten(weights="a"),
    "letters": rewritten(weights="G" * 64),
    "capitals": rewritten(weights="A" * 64),
    "line": rewritten(weights="a" * 64 + "\n"),
    "none": rewritten(weights=None),
    "secret": rewritten(secret=3),
    "samples": rewritten(samples=["b" * 64]),
    "pipe": replaced(lambda path: os.mkfifo(path)),
    "socket": replaced(a_socket),
    "device": replaced(lambda path: path.symlink_to("/dev/zero")),
    "link": replaced(a_link),
    "readable": lambda path: path.chmod(0o640),
    "writable": lambda path: path.chmod(0o602),
}


@posix
@pytest.mark.parametrize("what", WRONG)
def test_what_is_damaged_or_forged_is_ignored_and_replaced(entry: Path, what: str) -> None:
    WRONG[what](entry)
    assert get() is None
    HashCache.of_user().put(STAMP, KEPT)
    assert get() == KEPT
    assert entry.is_file()
    assert not entry.is_symlink()
    assert mode_of(entry) == 0o600
    assert list(entry.parent.iterdir()) == [entry]


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can chown")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_another_user_owns_is_not_believed(entry: Path, what: str) -> None:
    other = {"file": entry, "folder": entry.parent}[what]
    os.chown(other, 12345, -1)
    assert get() is None
    HashCache.of_user().put(STAMP, OTHER)
    if what == "folder":  # nothing was written into it
        assert get() is None
        assert json.loads(entry.read_text())["weights"] == KEPT.weights
    else:
        assert get() == OTHER
        assert entry.lstat().st_uid == 0


@posix
def test_what_another_user_owns_as_the_system_says(
    entry: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: entry.lstat().st_uid + 1)
    caplog.set_level(logging.DEBUG, "kvcellar")
    assert get() is None
    assert "belongs to user" in caplog.text


@posix
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_may_write_is_not_used(entry: Path, mode: int) -> None:
    entry.parent.chmod(mode)
    assert get() is None
    HashCache.of_user().put(STAMP, OTHER)
    entry.parent.chmod(0o755)  # to list it does no harm
    assert get() == KEPT


@posix
def test_a_folder_that_is_a_link_is_not_used(entry: Path) -> None:
    folder, target = entry.parent, entry.parent.with_name("elsewhere")
    folder.rename(target)
    folder.symlink_to(target)
    assert get() is None
    HashCache.of_user().put(STAMP, OTHER)
    folder.unlink()
    target.rename(folder)
    assert get() == KEPT


# -- where nothing can be kept


@pytest.fixture
def model_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(weights_hash, "SETTLED_NS", 0)
    tiny = TinyLlama(n_layer=1)
    return write_gguf(tmp_path / "tiny.gguf", tiny.metadata(), tiny.tensors())


def hash_of(path: Path) -> str:
    with Model.from_gguf(path, n_threads=1) as model:
        return model.weights_hash


def refused(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def homeless(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.delenv(ENV)
    patch.setattr(platformdirs, "user_cache_dir", lambda *_, **__: "~/.cache/kvcellar")


def below_a_file(patch: pytest.MonkeyPatch, root: Path) -> None:
    root.write_bytes(b"")
    patch.setenv(ENV, f"{root}/a/b")


Patch = Callable[[pytest.MonkeyPatch, Path], object]
NOWHERE: dict[str, Patch] = {
    "no folder can be made": lambda patch, _: patch.setattr(Path, "mkdir", refused),
    "no file can be made": lambda patch, _: patch.setattr(tempfile, "mkstemp", refused),
    "disk full": lambda patch, _: patch.setattr(os, "replace", full),
    "a file in its place": lambda _, root: root.write_bytes(b""),
    "below a file": below_a_file,
    "no such device": lambda patch, _: patch.setenv(ENV, "/dev/null/caches"),
    "no home": homeless,
    "no home for ~": lambda patch, _: patch.setenv(ENV, "~no-such-user/caches"),
    "no such name": lambda patch, root: patch.setenv(ENV, f"{root}/{'x' * 300}"),
}


@pytest.mark.parametrize("what", NOWHERE)
def test_hashes_are_made_each_time_and_one_line_says_why(
    model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    expected = hash_of(model_path)
    monkeypatch.setenv(ENV, str(tmp_path / "caches"))
    NOWHERE[what](monkeypatch, tmp_path / "caches")
    caplog.set_level(logging.DEBUG, "kvcellar")
    for n in (1, 2):
        assert hash_of(model_path) == expected
        lines = [record for record in caplog.records if record.name == "kvcellar.hashes"]
        assert len(lines) == n
        assert {record.levelno for record in lines} == {logging.DEBUG}
    assert not list(tmp_path.rglob(".new-*"))


def test_what_is_kept_is_used_where_nothing_can_be_written(
    entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(Path, "mkdir", refused)
    assert entry.exists()
    assert get() == KEPT
