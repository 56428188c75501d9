"""What is no file is refused at once, by everything that opens files of others."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcellar.cli.cache_inspect import inspect_file
from kvcellar.cli.model_info import read_model_info
from kvcellar.errors import KVCellarError, ModelFileError, OptionError, SnapshotFileError
from kvcellar.files import FileStamp, NotAFile, open_regular
from kvcellar.prompts.archive import check_export, import_blocks
from kvcellar.runtime.context import Context
from kvcellar.runtime.llama_files import is_llama_file, read_state
from kvcellar.runtime.model import Model
from kvcellar.snapshot.container import read_description, read_snapshot
from kvcellar.snapshot.llama.layout import MAGIC
from kvcellar.stores.disk.files import Damaged, header_of
from kvcellar.stores.memory import MemoryStore
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.tiny_llama import TinyLlama

pytestmark = pytest.mark.skipif(os.name != "posix", reason="there are no such things")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(str(path))


def a_chain(path: Path) -> None:
    """A link to a link to a pipe."""
    pipe, between = path.with_name("pipe"), path.with_name("between")
    os.mkfifo(pipe)
    between.symlink_to(pipe)
    path.symlink_to("between")


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder": (lambda path: path.mkdir(), "it is a folder"),
    "pipe": (lambda path: os.mkfifo(path), "it is a pipe"),
    "link to a pipe": (a_chain, "it is a pipe"),
    "socket": (a_socket, "it is a socket"),
    "/dev/zero": (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    "/dev/full": (lambda path: path.symlink_to("/dev/full"), "it is a device"),
    "/dev/tty": (lambda path: path.symlink_to("/dev/tty"), "it is a device"),
    "empty": (lambda path: path.touch(), "it is empty"),
    "/proc/version": (lambda path: path.symlink_to("/proc/version"), "it is empty"),
    "a loop": (lambda path: path.symlink_to(path), "symbolic links"),
    "absent": (lambda _: None, "No such file"),
}
"""How to put it at a path, and what is said of it."""


@pytest.fixture(autouse=True)
def _at_once() -> Iterator[None]:
    """End a test that waits."""

    def fail(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, 20)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    tiny = TinyLlama()
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_gguf(path, tiny.metadata(), tiny.tensors())
    with Model.from_gguf(path, n_threads=1) as model, model.context(n_ctx=32) as made:
        yield made


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """What is no file, and what is said of it."""
    make, said = ODD[request.param]
    path = tmp_path / "x"
    make(path)
    return path, said


# --- opening ------------------------------------------------------------------------------------


def test_a_file_is_opened(tmp_path: Path) -> None:
    path, link = tmp_path / "x", tmp_path / "link"
    path.write_bytes(b"content")
    link.symlink_to(path)
    for name in (path, str(path), link):
        with open_regular(name) as file:
            assert file.read() == b"content"
            assert FileStamp.of(file) == FileStamp.at(path)
            assert not os.get_inheritable(file.fileno())
    with pytest.raises(NotAFile, match="it is a link"):
        open_regular(link, follow_links=False)


def test_what_is_no_file_is_named(odd: tuple[Path, str]) -> None:
    path, said = odd
    with pytest.raises(OSError, match=said):
        open_regular(path)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_a_name_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError, match=r"no file can have that name|too long|No such file"):
        open_regular(tmp_path / name)
    with pytest.raises((ModelFileError, OptionError), match=r"cannot open|no file can have"):
        Model.from_gguf(tmp_path / name)
    assert FileStamp.at(tmp_path / name) is None


def open_files() -> int:
    """How many files this process has open; 0 where the system does not say."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


@pytest.mark.parametrize("what", ["pipe", "folder", "/dev/zero", "empty"])
@pytest.mark.parametrize("follow", [True, False])
def test_what_took_the_place_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, follow: bool
) -> None:
    """Between the look and the opening; nothing stays open."""
    path = tmp_path / "x"
    path.write_bytes(b"content")
    look = Path.stat

    def exchange(name: Path, **more: bool) -> os.stat_result:
        found = look(name, **more)
        path.unlink()
        ODD[what][0](path)
        return found

    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", exchange)
        with pytest.raises(NotAFile):
            open_regular(path, follow_links=follow)
    assert open_files() == before


def test_a_stamp_tells_changes(tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "y"
    path.write_bytes(b"content")
    before = FileStamp.at(path)
    assert before is not None
    assert before == FileStamp.at(path)
    os.utime(path, ns=(1, before.mtime_ns + 1))
    os.utime(path, ns=(1, before.mtime_ns))  # only when it was changed tells
    after = FileStamp.at(path)
    assert after is not None
    assert after._replace(ctime_ns=0) == before._replace(ctime_ns=0)
    other.write_bytes(b"context")
    os.utime(other, ns=(1, before.mtime_ns))
    assert FileStamp.at(other) not in (before, after)


# --- all that open files ------------------------------------------------------------------------

Open = Callable[[Context, Path], object]

MODELS: dict[str, Open] = {
    "ggml": lambda _, path: Model.from_gguf(path, n_threads=1),
    "numpy": lambda _, path: Model.from_gguf(path, backend="numpy"),
    "info": lambda _, path: read_model_info(path),
}
SNAPSHOTS: dict[str, Open] = {
    "Context.load": lambda context, path: context.load(path),
    "Context.load_all": lambda context, path: context.load_all(path),
    "Sequence.load": lambda context, path: _sequence_load(context, path),
    "read_snapshot": lambda _, path: read_snapshot(path),
    "read_description": lambda _, path: read_description(path),
    "inspect": lambda _, path: inspect_file(path, None, as_json=False),
    "read_state": lambda context, path: read_state(path, context.memory_spec, "llama", 64),
    "check_export": lambda _, path: check_export(path),
    "import_blocks": lambda _, path: import_blocks(MemoryStore(), path),
}


def _sequence_load(context: Context, path: Path) -> None:
    with context.sequence() as sequence:
        sequence.load(path)


def test_all_that_open_models(context: Context, odd: tuple[Path, str]) -> None:
    path, said = odd
    for how in MODELS.values():
        with pytest.raises(ModelFileError, match=f"x: .*{said}"):
            how(context, path)


def test_all_that_open_snapshots(context: Context, odd: tuple[Path, str]) -> None:
    path, said = odd
    before = (context.sequences, context.cache.used)
    for how in SNAPSHOTS.values():
        with pytest.raises(SnapshotFileError, match=f"x: .*{said}"):
            how(context, path)
    assert (context.sequences, context.cache.used) == before
    assert not is_llama_file(path)


def test_values_of_a_store(odd: tuple[Path, str]) -> None:
    path, said = odd
    expected = FileNotFoundError if said == "No such file" else Damaged
    with pytest.raises(expected):
        header_of(path)


def test_a_pipe_keeps_what_was_written_into_it(tmp_path: Path, context: Context) -> None:
    """It is not even opened: whoever writes into it would take that for a reader."""
    path = tmp_path / "x"
    os.mkfifo(path)
    for how in (*MODELS.values(), *SNAPSHOTS.values()):
        with pytest.raises(KVCellarError):
            how(context, path)
        with pytest.raises(OSError, match="No such device"):  # there is no reader
            os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    assert stat.S_ISFIFO(path.stat().st_mode)


COMMANDS = (
    "info {pipe}",
    "run {pipe} prompt",
    "cache inspect {pipe}",
    "cache inspect {file} --model {pipe}",
    "cache import {folder} {pipe}",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_do_not_wait_for_stdin(tmp_path: Path, command: str) -> None:
    file, folder = tmp_path / "file", tmp_path / "store"
    file.write_bytes(MAGIC["session"].to_bytes(4, "little"))
    args = command.format(pipe="/dev/stdin", file=file, folder=folder).split()
    with subprocess.Popen(
        [sys.executable, "-m", "kvcellar", *args],
        stdin=subprocess.PIPE,  # nobody ever writes into it
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.wait(15) == 1
        assert process.stderr is not None
        message = process.stderr.read()
    assert message.count("\n") == 1
    assert "/dev/stdin" in message
    assert not folder.exists()
