"""What is written takes the place of a file, and of nothing else; all that write files do so."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcellar.errors import SnapshotFileError
from kvcellar.prompts.archive import export_blocks
from kvcellar.prompts.cache import PromptCache
from kvcellar.runtime.context import Context, save_llama_file
from kvcellar.runtime.model import Model
from kvcellar.snapshot.atomic import replacing
from kvcellar.stores.memory import MemoryStore
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.tiny_llama import TinyLlama
from tests.disks import DISKS

Save = Callable[[Path], object]


def write(path: Path, data: bytes = b"new") -> None:
    with replacing(path) as beside:
        beside.write_bytes(data)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def _umask() -> Iterator[None]:
    """New files are for all to read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_a_file_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    write(path, b"old")
    assert mode_of(path) == 0o644
    path.chmod(mode)
    write(path)
    assert (path.read_bytes(), oct(mode_of(path))) == (b"new", oct(mode))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("_umask")
def test_nobody_else_reads_what_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    with replacing(path) as beside:
        assert mode_of(beside) == 0o600


def test_what_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, b"old")
    path.chmod(0o600)

    def fail() -> None:
        with replacing(path) as beside:
            beside.write_bytes(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (path.read_bytes(), mode_of(path)) == (b"old", 0o600)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("there", [True, False])
def test_links_stay_and_what_they_point_to_is_written(tmp_path: Path, there: bool) -> None:
    """Over another link, into another folder; also where no file is yet."""
    folder, path, between = tmp_path / "folder", tmp_path / "link", tmp_path / "between"
    folder.mkdir()
    target = folder / "file"
    between.symlink_to(Path("folder", "file"))
    path.symlink_to(between)
    if there:
        target.write_bytes(b"old")
        target.chmod(0o600)
    write(path)
    assert (path.is_symlink(), between.is_symlink(), target.is_symlink()) == (True, True, False)
    assert target.read_bytes() == b"new"
    assert mode_of(target) == 0o600 or not there
    assert list(folder.iterdir()) == [target]


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "link"
    path.symlink_to(path)
    with pytest.raises(SnapshotFileError, match=f"cannot write {re.escape(str(path))}: "):
        write(path)
    (tmp_path / "lost").symlink_to(tmp_path / "absent" / "file")
    with pytest.raises(SnapshotFileError, match=r"cannot write .*lost: "):
        write(tmp_path / "lost")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "lost"]


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(str(path))


ODD: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a socket": a_socket,
    "a device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.skipif(os.name != "posix", reason="there are no such things")
@pytest.mark.parametrize("what", ODD)
def test_what_is_no_file_is_named_and_stays(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    ODD[what](path)
    before = path.stat()
    with pytest.raises(SnapshotFileError, match=f"cannot write .*x: it is {what}; name a file"):
        write(path)
    after = path.stat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_a_new_file_follows_the_umask(tmp_path: Path, umask: int) -> None:
    """As any file that somebody writes; what is being written is for nobody else."""
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "file") as beside:
            beside.write_bytes(b"new")
            assert mode_of(beside.parent) == 0o700
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "file") == 0o666 & ~umask


def test_what_a_killed_process_left_goes_a_day_later(tmp_path: Path) -> None:
    """With all that a library put there; younger folders are being written."""
    old, young = (tmp_path / f".kvcellar-{digit * 16}" for digit in "0f")
    other = tmp_path / ".kvcellar-mine"
    for folder in (old, young, other):
        folder.mkdir()
        (folder / ".tmp123").write_bytes(b"half")
        os.utime(folder, (time.time() - 90_000,) * 2)
    os.utime(young, (time.time() - 80_000,) * 2)
    write(tmp_path / "file")
    assert set(tmp_path.iterdir()) == {young, other, tmp_path / "file"}


@pytest.mark.parametrize("kind", DISKS)
def test_a_full_disk_is_named(tmp_path: Path, kind: str) -> None:
    with DISKS[kind](tmp_path / "disk") as disk:
        path = disk.root / "file"
        write(path, b"old")
        disk.fill()
        before = set(disk.root.iterdir())
        with pytest.raises(SnapshotFileError, match=f"cannot write {path}: {disk.why}"):
            write(path, bytes(5000))
        assert (path.read_bytes(), set(disk.root.iterdir())) == (b"old", before)
        disk.free()
        write(path, bytes(5000))
        assert path.stat().st_size == 5000


# --- all that write files -----------------------------------------------------------------------


def _export(context: Context, path: Path) -> None:
    store = MemoryStore()
    with context.sequence() as sequence:
        PromptCache(store, block_size=4).append(sequence, [1, 2, 3, 4])
    export_blocks(store, list(store.entries()), path)


SAVES: dict[str, Callable[[Context, Path], object]] = {
    "Sequence.save": lambda context, path: context.sequences[0].save(path),
    "Context.save": lambda context, path: context.save(path),
    "llama.cpp": save_llama_file,
    "export": _export,
}


@pytest.fixture
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    tiny = TinyLlama()
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_gguf(path, tiny.metadata(), tiny.tensors())
    with Model.from_gguf(path, n_threads=1) as model, model.context(n_ctx=32) as made:
        made.sequence([1, 2, 3])
        yield made


@pytest.mark.skipif(os.name != "posix", reason="there are no pipes with names")
@pytest.mark.parametrize("how", SAVES)
def test_whoever_saves(context: Context, tmp_path: Path, how: str) -> None:
    path, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    path.touch(0o600)
    link.symlink_to(path)
    os.mkfifo(pipe)
    SAVES[how](context, link)
    assert link.is_symlink()
    assert path.stat().st_size > 100
    assert mode_of(path) == 0o600
    with pytest.raises(SnapshotFileError, match="pipe: it is a pipe; name a file"):
        SAVES[how](context, pipe)
    assert pipe.is_fifo()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "link", "pipe"]


@pytest.mark.parametrize("kind", DISKS)
@pytest.mark.parametrize("how", SAVES)
def test_whoever_saves_on_a_full_disk(
    context: Context, tmp_path: Path, kind: str, how: str
) -> None:
    """There is the old file, or none; the disk is named, and nothing stays there."""
    with DISKS[kind](tmp_path / "disk") as disk:
        old, new = disk.root / "old", disk.root / "new"
        SAVES[how](context, old)
        before = old.read_bytes()
        disk.fill()
        there = set(disk.root.iterdir())
        for path in (old, new):
            with pytest.raises(SnapshotFileError, match=f"cannot write {path}: {disk.why}"):
                SAVES[how](context, path)
        assert (old.read_bytes(), set(disk.root.iterdir())) == (before, there)
        disk.free()
        SAVES[how](context, new)


def test_a_process_that_is_killed_leaves_one_folder(tmp_path: Path) -> None:
    """Which the next to save there removes in time; the file is as it was."""
    path = tmp_path / "file"
    write(path, b"old")
    if (child := os.fork()) == 0:
        with replacing(path) as beside:
            beside.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert path.read_bytes() == b"old"
    (left,) = set(tmp_path.iterdir()) - {path}
    os.utime(left, (1, 1))
    write(path)
    assert list(tmp_path.iterdir()) == [path]
