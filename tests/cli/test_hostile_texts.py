"""Texts of strangers in every command: nothing of them drives the terminal they are printed to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import Result

from kvcellar.cli.console import visible
from kvcellar.runtime.model import Model
from kvcellar.snapshot.container import read_snapshot, write_snapshot
from kvcellar.stores.disk import DiskStore
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.tiny_llama import TinyLlama
from tests.cli.conftest import _byte_letters
from tests.cli.helpers import Invoke, Start, listed

HOSTILE = (
    "\x1b]0;title\x07\x1b[666m\x9b6n\x90q\x9c\x7f\x08\x0e\u202elrm\u2066\u200f\u061c\u2028[bold]\r"
)
SHOWN = (
    r"\x1b]0;title\x07\x1b[666m\x9b6n\x90q\x9c\x7f\x08\x0e\u202elrm\u2066\u200f\u061c\u2028[bold]"
)
MARK = r"\x1b]0;title"
GREEDY = ("--temp", "0", "--threads", "1", "--n-ctx", "128")
OWN = re.compile(r"\x1b\[(?:[0-9]{1,2}|[0-9]{1,2}(?:;[0-9]{1,3})+)?[mABCDGHJK]|\x1b\[\?25[lh]|\r")
"""What rich writes, and the terminal where a line ends."""

TEMPLATES = {
    "refuses": f"{{{{ raise_exception('no ' ~ messages[0].content ~ {HOSTILE!r}) }}}}",
    "fails": f"{{{{ messages[0][{HOSTILE!r}].x }}}}",
    "fails in a string": f"{{{{ messages[0]['{HOSTILE}'].x }}}}",
    "does not compile": f"{{% x{HOSTILE} %}}",
    "does not compile either": f"{{{{ 1 '{HOSTILE}' }}}}",
    "has no such filter": f"{{{{ 1 | nothing }}}}{HOSTILE}",
}


def _letters(text: str) -> str:
    return "".join(_byte_letters()[byte] for byte in text.encode())


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a model of random weights that says nothing but controls."""

    def make(name: str = f"m{HOSTILE}.gguf", **more: Any) -> Path:
        spoken = [_letters(piece) for piece in (HOSTILE, "\x1b[2J", "\x9b", "\u202e", "\x7f\x7f")]
        tokens = [*_byte_letters(), *spoken, "<|im_start|>", "<|im_end|>"]
        tiny = TinyLlama(n_vocab=len(tokens))
        tensors = tiny.tensors()
        output = tensors["output.weight"]
        assert isinstance(output, np.ndarray)
        output[-2:] = output[:256] = 0
        output[0x1B], output[0x0D], output[0xFF] = output[-3], -output[-4], -output[-5]
        metadata = {
            **tiny.metadata(),
            "general.name": HOSTILE,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array([1] * (len(tokens) - 2) + [3] * 2, np.int32),
            "tokenizer.ggml.merges": list[str](),
            "tokenizer.ggml.eos_token_id": len(tokens) - 1,
            "tokenizer.chat_template": "{{ messages[-1].content }}",
            **{key.replace("__", "."): value for key, value in more.items()},
        }
        return write_gguf(tmp_path_factory.mktemp("models") / name, metadata, tensors)

    return make


@pytest.fixture(scope="module")
def speaker(make_model: Callable[..., Path]) -> Path:
    return make_model()


def check(result: Result | subprocess.CompletedProcess[str], *, shows: str = MARK) -> None:
    """Check that nothing printed drives a terminal, and that the hostile text was printed."""
    for text in (result.stdout, result.stderr):
        assert visible(text) == text, ascii(text)
    assert shows in re.sub(r"\s*\n\W*", "", result.stdout + result.stderr), result.stderr


# --- models and templates -----------------------------------------------------------------------


def test_info(invoke: Invoke, speaker: Path) -> None:
    result = invoke("info", speaker)
    assert result.exit_code == 0, result.stderr
    check(result)
    assert f"name              {SHOWN[:40]}" in result.stdout
    found = invoke("info", speaker, "--json")
    check(found, shows="u001b]0;title")
    assert json.loads(found.stdout)["name"] == HOSTILE


@pytest.mark.parametrize(
    ("key", "command"),
    [
        ("general.architecture", "info"),
        ("general.architecture", "run"),
        ("tokenizer.ggml.model", "info"),
        ("tokenizer.ggml.model", "run"),
        ("tokenizer.ggml.pre", "info"),
        ("tokenizer.ggml.pre", "run"),
        ("llama.rope.scaling.type", "info"),
        ("llama.rope.scaling.type", "run"),
    ],
)
def test_metadata(invoke: Invoke, make_model: Callable[..., Path], key: str, command: str) -> None:
    path = make_model(**{key: HOSTILE})
    result = invoke(command, path, *(["hello", *GREEDY] if command == "run" else []))
    check(result)


def test_a_name_of_many_lines_is_one_line(invoke: Invoke, make_model: Callable[..., Path]) -> None:
    path = make_model("lines.gguf", general__name="a\nweights           none\tat all")
    lines = invoke("info", path).stdout.splitlines()
    assert any(r"a\nweights           none\tat all" in line for line in lines)
    assert len([line for line in lines if line.lstrip().startswith("weights")]) == 1


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("command", ["run", "chat"])
def test_templates(
    invoke: Invoke, make_model: Callable[..., Path], command: str, template: str
) -> None:
    path = make_model(**{"tokenizer.chat_template": TEMPLATES[template]})
    more = ("hello", "--chat") if command == "run" else ()
    result = invoke(command, path, *more, *GREEDY, stdin="hello\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    for text in (result.stdout, result.stderr):
        assert visible(text) == text, ascii(text)
    assert result.stderr.count("\n") == 1
    if template == "refuses":
        check(result)


def test_messages_of_a_template_are_cut(invoke: Invoke, make_model: Callable[..., Path]) -> None:
    path = make_model(**{"tokenizer.chat_template": "{{ raise_exception('\x1b' * 9999) }}"})
    result = invoke("run", path, "hello", "--chat", *GREEDY)
    check(result, shows=r"\x1b\x1b")
    assert len(result.stderr) < 2000


# --- generated text -----------------------------------------------------------------------------


def test_an_answer_in_a_pipe_is_passed_on_as_it_is(invoke: Invoke, speaker: Path) -> None:
    result = invoke("run", speaker, "hello", "-n", "12", "--seed", "3", *GREEDY)
    assert result.exit_code == 0
    assert visible(result.stdout) != result.stdout


@pytest.mark.parametrize("args", [("--stats",), ("--profile",)])
def test_statistics(invoke: Invoke, speaker: Path, args: tuple[str, ...]) -> None:
    result = invoke("run", speaker, "hello", "-n", "4", *GREEDY, *args)
    assert result.exit_code == 0
    assert visible(result.stderr) == result.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("command", "typed"),
    [
        (("run", "MODEL", HOSTILE, "-n", "40", *GREEDY, "--stats"), ""),
        (("run", "MODEL", HOSTILE, "-n", "40", "--seed", "1", "--threads", "1"), ""),
        (("run", "MODEL", HOSTILE, "-n", "9", *GREEDY, "--chat"), ""),
        (
            ("chat", "MODEL", "-n", "40", *GREEDY, "--stats"),
            "hello\n/cells\n/nothing\n/undo\n/exit\n",
        ),
        (("tour", "MODEL", "--fast", "--threads", "1", "--prompt", HOSTILE), ""),
        (("info", "MODEL"), ""),
        (("--debug", "info", f"absent{HOSTILE}"), ""),
    ],
)
def test_a_terminal(
    start: Start,
    speaker: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    typed: str,
    plain: bool,
) -> None:
    if plain:
        monkeypatch.setenv("NO_COLOR", "1")
    args = [speaker if arg == "MODEL" else arg for arg in command]
    screen = on_terminal(start, args, typed)
    seen = screen.replace("\r\n", "\n")
    if not plain:
        assert not re.search(r"\x1b\[666m|\x1b\]", seen), ascii(seen)
        seen = OWN.sub("", seen)
    assert visible(seen) == seen, ascii(seen)
    assert re.search(r"\\(x1b|x9b|x7f|u202e|x0d|r)", seen), ascii(seen)


def on_terminal(start: Start, args: list[Any], typed: str) -> str:
    """Return all that a command writes to a terminal that is its stdin, stdout and stderr."""
    import pty
    import termios

    ours, theirs = pty.openpty()
    modes = termios.tcgetattr(theirs)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    process = start(*args, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, typed.encode())
    screen = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not chunk:
            break
        screen += chunk
    process.wait(timeout=60)
    os.close(ours)
    return screen.decode()


# --- stores and snapshots -----------------------------------------------------------------------


@pytest.fixture
def hostile_store(filled: Path) -> Path:
    """A store with entries whose notes are hostile, sound and damaged."""
    with closing(DiskStore(filled)) as store:
        note: dict[str, str | int] = {
            "model": HOSTILE,
            "parent": HOSTILE,
            "tokens": f"1 2 {HOSTILE}",
            "start": 0,
        }
        store.put("a" * 32, [b"no snapshot"], note)
        store.put("b" * 32, [b"no snapshot"], {HOSTILE: HOSTILE, "absent": "window slid"})
        store.put("c" * 32, [HOSTILE.encode()], {"start": 9, "parent": HOSTILE, "tokens": "1 2"})
    return filled


@pytest.fixture
def hostile_snapshot(filled_once: Path, tmp_path: Path) -> Path:
    snapshot = read_snapshot(filled_once / "chat.kv")
    about = {**snapshot.fingerprint, "architecture": HOSTILE, "weights": HOSTILE}
    path = tmp_path / f"s{HOSTILE}.kv"
    write_snapshot(
        path, replace(snapshot, note={HOSTILE: HOSTILE}, fingerprint=about), compress=False
    )
    return path


def header_of(path: Path) -> dict[str, str]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    found: dict[str, str] = header["__metadata__"]
    return found


@pytest.mark.parametrize("as_json", [False, True])
def test_lists_of_entries(invoke: Invoke, hostile_store: Path, as_json: bool) -> None:
    result = invoke("cache", "list", hostile_store, *(["--json"] if as_json else []))
    assert result.exit_code == 0
    check(result, shows="u001b]0;" if as_json else r"\x1b]0;")


def test_entries(invoke: Invoke, hostile_store: Path) -> None:
    keys = [entry["key"] for entry in listed(invoke, hostile_store)["entries"]]
    for key in keys:
        for more in ((), ("--json",)):
            result = invoke("cache", "inspect", hostile_store, key, *more)
            for text in (result.stdout, result.stderr):
                assert visible(text) == text, ascii(text)


@pytest.mark.parametrize(
    "args",
    [
        ("verify", "STORE"),
        ("gc", "STORE", "--dry-run", "--max-bytes", "1"),
        ("gc", "STORE", "--max-bytes", "1"),
        ("export", "STORE", "cccccc", "out.zip"),
        ("inspect", "STORE", HOSTILE),
        ("list", HOSTILE),
        ("list", f"redis://user:secret@{HOSTILE}/0"),
        ("inspect", HOSTILE),
        ("import", "STORE", HOSTILE),
        ("gc", "STORE", "--max-bytes", HOSTILE),
        ("gc", "STORE", "--older-than", HOSTILE),
    ],
)
def test_other_commands_of_a_store(
    invoke: Invoke, hostile_store: Path, args: tuple[str, ...]
) -> None:
    result = invoke("cache", *[hostile_store if arg == "STORE" else arg for arg in args])
    for text in (result.stdout, result.stderr):
        assert visible(text) == text, ascii(text)
    if HOSTILE in args:
        check(result)


def test_exports_with_hostile_names(
    invoke: Invoke, filled: Path, entries: list[dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / f"e{HOSTILE}.zip"
    check(invoke("cache", "export", filled, entries[-1]["key"], out))
    check(invoke("cache", "import", tmp_path / f"new{HOSTILE}", out))
    out.write_bytes(out.read_bytes()[:-9])
    result = invoke("cache", "import", tmp_path / "other", out)
    assert result.exit_code == 1
    check(result)


def test_snapshots(invoke: Invoke, hostile_snapshot: Path) -> None:
    result = invoke("cache", "inspect", hostile_snapshot)
    assert result.exit_code == 0, result.stderr
    check(result, shows=f"note: {MARK}")
    found = invoke("cache", "inspect", hostile_snapshot, "--json")
    check(found, shows="u001b]0;title")
    assert json.loads(found.stdout)["note"] == {HOSTILE: HOSTILE}


@pytest.mark.parametrize("field", ["kvcellar", "version", "format", "description"])
def test_heads_of_snapshots(invoke: Invoke, hostile_snapshot: Path, field: str) -> None:
    head = header_of(hostile_snapshot)
    save_file(load_file(hostile_snapshot), hostile_snapshot, {**head, field: HOSTILE})
    check(invoke("cache", "inspect", hostile_snapshot))


def test_names_of_arrays(invoke: Invoke, hostile_snapshot: Path) -> None:
    arrays = {**load_file(hostile_snapshot), HOSTILE: np.zeros(1, np.float32)}
    save_file(arrays, hostile_snapshot, header_of(hostile_snapshot))
    result = invoke("cache", "inspect", hostile_snapshot)
    check(result)


def test_what_a_run_says_of_a_store(
    invoke: Invoke, speaker: Path, hostile_store: Path, tmp_path: Path
) -> None:
    args = ("run", speaker, "hello", "-n", "2", *GREEDY, "--stats", "--prompt-cache")
    assert visible(invoke(*args, hostile_store).stderr).startswith("prompt ")
    folder = tmp_path / f"x{HOSTILE}"
    folder.mkdir()
    (folder / "occupied").touch()
    result = invoke(*args, folder)
    assert result.exit_code == 1
    assert visible(result.stderr) == result.stderr


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        (HOSTILE,),
        ("info", f"absent{HOSTILE}"),
        ("info", "x", f"--{HOSTILE}"),
        ("info", "x", HOSTILE),
        ("run", "x", "-n", HOSTILE),
        ("run", "x", "hello", "--type-k", HOSTILE),
        ("run", "x", "hello", "--prompt-cache", "y", "--cache-bytes", HOSTILE),
        ("cache", HOSTILE),
        ("cache", "list", "x", "--sort", HOSTILE),
        ("tour", f"absent{HOSTILE}"),
    ],
)
def test_wrong_command_lines(invoke: Invoke, args: tuple[str, ...]) -> None:
    result = invoke(*args)
    assert result.exit_code in (1, 2)
    for text in (result.stdout, result.stderr):
        assert visible(text) == text, ascii(text)


def test_values_of_options_after_the_model_was_opened(invoke: Invoke, speaker: Path) -> None:
    check(invoke("run", speaker, "hello", "--type-k", HOSTILE, "--threads", "1"))


@pytest.mark.skipif(sys.platform == "win32", reason="names of files are text there")
def test_bytes_of_no_text_in_a_name(start: Start) -> None:
    with start("info", os.fsdecode(b"absent\xff\x1b[666m.gguf")) as process:
        out, err = process.communicate(timeout=60)
    assert out == b""
    assert err.startswith(rb"error: absent\udcff\x1b[666m.gguf does not exist")


@pytest.mark.slow
@pytest.mark.parametrize("args", [("info", "--environment"), ("info", "--environment", "--json")])
def test_the_environment(
    start: Start, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.setenv("KVCELLAR_LIBGGML", f"/absent{HOSTILE}")
    with start(*args) as process:
        out, err = (text.decode() for text in process.communicate(timeout=60))
    assert visible(out + err) == out + err
    assert "x1b]0;title" in out or "u001b]0;title" in out


@pytest.mark.parametrize("debug", [["--debug"], []])
def test_tracebacks_and_faults_of_ours(start: Start, debug: list[str]) -> None:
    with start(*debug, "info", f"absent{HOSTILE}") as process:
        out, err = (text.decode() for text in process.communicate(timeout=60))
    assert (out, visible(err)) == ("", err)
    assert MARK in err
    assert ("Traceback" in err) == bool(debug)
    code = (
        "import sys; sys.argv = ['kvcellar', 'info', 'x']\n"
        "import kvcellar.runtime.demo as demo, kvcellar.__main__ as m\n"
        f"def find_model(name): raise RuntimeError({HOSTILE!r})\n"
        "demo.find_model = find_model\nm.main()"
    )
    fault = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert fault.returncode == 1
    assert "RuntimeError" in fault.stderr
    check(fault)


# --- the texts reach what is tried ----------------------------------------------------------------


def test_the_model_says_what_it_should(speaker: Path) -> None:
    said: Iterator[str]
    with Model.from_gguf(speaker, n_threads=1) as model, model.context(n_ctx=256) as context:
        said = context.sequence("hello").stream(200, temperature=2.0, seed=1)
        text = "".join(said)
    assert {"\x1b", "\x9b", "\u202e", "\x7f", "\r", "\ufffd"} <= set(text)
