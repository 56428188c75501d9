"""How commands are found and how they end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvcellar import __version__
from kvcellar.errors import KVCellarError
from tests.cli.helpers import Invoke, Start


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
    code = "import sys, kvcellar.cli.main; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert not loaded & {"numpy", "tokenizers", "jinja2"}
    assert "kvcellar.runtime.model" not in result.stdout.split()
