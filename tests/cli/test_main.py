"""How commands are found and how they end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcellar import __version__
from kvcellar.errors import KVCellarError
from tests.cli.helpers import Invoke, Start

CUT_OFF = b"(cut off after 4 tokens; -n allows more)\n"


def test_help_names_every_command(invoke: Invoke) -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("run", "chat", "info", "tour", "cache"):
        assert command in result.stdout


@pytest.mark.parametrize("command", ["run", "chat", "info", "tour"])
def test_every_command_has_help(invoke: Invoke, command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "MODEL" in result.stdout


def test_what_looks_after_caches_has_help(invoke: Invoke) -> None:
    result = invoke("cache")
    for command in ("list", "inspect", "verify", "gc", "export", "import"):
        assert command in result.output
        assert "DIR_" in invoke("cache", command, "--help").stdout


def test_version(invoke: Invoke) -> None:
    assert invoke("--version").stdout == f"kvcellar {__version__}\n"


@pytest.mark.parametrize(
    "args",
    [
        ("nonsense",),
        ("run",),
        ("info", "x", "--nonsense"),
        ("run", "x", "-n", "y"),
        ("cache", "nonsense"),
        ("cache", "list", "x", "--sort", "y"),
    ],
)
def test_a_wrong_command_line_is_2(invoke: Invoke, args: tuple[str, ...]) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert "Usage" in result.stderr
    assert result.stdout == ""


def test_an_error_is_one_line_and_1(invoke: Invoke) -> None:
    result = invoke("info", "absent.gguf")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: absent.gguf does not exist")
    assert result.stderr.count("\n") == 1


def test_debug_shows_where_an_error_came_from(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(invoke("--debug", "info", "absent.gguf").exception, KVCellarError)
    monkeypatch.setenv("KVCELLAR_DEBUG", "1")
    assert isinstance(invoke("info", "absent.gguf").exception, KVCellarError)


def test_the_module_is_the_command_and_a_pipe_is_plain(start: Start) -> None:
    with start("--help") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"tour" in out
    assert b"\x1b" not in out + err


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, kvcellar.cli.app; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert not loaded & {"numpy", "tokenizers", "jinja2"}
    assert "kvcellar.runtime.model" not in result.stdout.split()


@pytest.mark.parametrize("module", ["typer", "numpy"])
def test_ctrl_c_during_an_import_ends_it_quietly(module: str) -> None:
    code = f"""
import signal, sys

class Impatient:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Impatient())
sys.argv = ["kvcellar", "run", "absent.gguf", "hello"]
from kvcellar.__main__ import main
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"")


def test_next_to_nothing_is_loaded_before_ctrl_c_is_answered() -> None:
    code = "import sys; before = {*sys.modules}; import kvcellar.__main__; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "kvcellar.__main__" in result.stdout.split()
    assert not {"typing", "re", "typer", "kvcellar.cli.app"} & {*result.stdout.split()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        ("run MODEL hello -n 4 --temp 0 --threads 1 >&-", 0, b"", CUT_OFF),
        ("run MODEL hello -n 4 --temp 0 --threads 1 --stats 2>&- | wc -c", 0, b"5", b""),
        ("run MODEL <&-", 1, b"", b"error: the prompt is empty\n"),
        ("chat MODEL <&-", 0, b"", b""),
        ("info absent >&- 2>&- <&-", 1, b"", b""),
    ],
)
def test_streams_that_are_closed_are_empty(
    talker: Path, command: str, code: int, out: bytes, err: bytes
) -> None:
    result = _shell(command, talker)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (code, out, err)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["run MODEL hello -n 4 --threads 1", "info MODEL", "--help"])
def test_what_cannot_be_written_is_an_error_of_one_line(talker: Path, command: str) -> None:
    result = _shell(f"{command} > /dev/full", talker)
    assert result.returncode == 1
    assert result.stderr.startswith(b"error: input or output failed: ")
    assert result.stderr.count(b"\n") == 1
    assert _shell(f"{command} > /dev/full 2> /dev/full", talker).returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_debug_shows_what_could_not_be_written(talker: Path) -> None:
    assert b"Traceback" in _shell("--debug info MODEL > /dev/full", talker).stderr


def _shell(command: str, model: Path) -> subprocess.CompletedProcess[bytes]:
    """What came of a command line, in which MODEL is the model."""
    line = f'echo hi | "$0" -m kvcellar {command.replace("MODEL", chr(34) + "$1" + chr(34))}'
    return subprocess.run(
        ["sh", "-c", line, sys.executable, model], capture_output=True, timeout=60
    )
