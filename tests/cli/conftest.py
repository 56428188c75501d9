"""A tiny model that can talk, the demo model, a small store, and ways to run the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kvcellar.cli.app import app
from kvcellar.errors import ModelFileError
from kvcellar.prompts.cache import PromptCache
from kvcellar.runtime.demo import find_model
from kvcellar.runtime.model import Model
from kvcellar.stores.disk import DiskStore
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.tiny_llama import TinyLlama
from tests.cli.helpers import LEFT, RIGHT, TRUNK, Invoke, Start, listed

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_letters() -> list[str]:
    """The letters that stand for the bytes 0 to 255 in byte-level vocabularies."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@pytest.fixture(scope="session")
def talker(chatter: Path) -> Path:
    """A model to run; modules that complete texts override it with one that has no template."""
    return chatter


@pytest.fixture(scope="session")
def completer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without a chat template."""
    return _write_talker(tmp_path_factory.mktemp("models") / "completer.gguf", {})


@pytest.fixture(scope="session")
def chatter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights whose tokens are bytes; greedy, it never stops by itself."""
    path = tmp_path_factory.mktemp("models") / "talker.gguf"
    return _write_talker(path, {"tokenizer.chat_template": TEMPLATE})


def _write_talker(path: Path, more: dict[str, str]) -> Path:
    tokens = [*_byte_letters(), "<|im_start|>", "<|im_end|>"]
    tiny = TinyLlama(n_vocab=len(tokens))
    tensors = tiny.tensors()
    output = tensors["output.weight"]
    assert isinstance(output, np.ndarray)
    output[-2:] = 0
    output[128:256] = 0  # only bytes that are characters
    metadata = {
        **tiny.metadata(),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * 256 + [3] * 2, np.int32),
        "tokenizer.ggml.merges": list[str](),
        "tokenizer.ggml.eos_token_id": 257,
        **more,
    }
    return write_gguf(path, metadata, tensors)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model."""
    try:
        return find_model("smollm2")
    except ModelFileError as error:
        if os.environ.get("KVCELLAR_REQUIRE_DATA") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that change what is printed are those of a common terminal."""
    for name in ("NO_COLOR", "FORCE_COLOR", "KVCELLAR_DEBUG", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def invoke() -> Invoke:
    """Runs the command in this process."""

    def call(*args: str | Path, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)

    return call


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the command in a process of its own, with pipes unless told otherwise."""
    processes: list[subprocess.Popen[bytes]] = []

    def call(*args: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "kvcellar", *(str(arg) for arg in args)]
        processes.append(subprocess.Popen(command, **{**pipes, **options}))
        return processes[-1]

    yield call
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture(scope="session")
def filled_once(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two texts, of which the second was used last; and a snapshot beside it."""
    folder = tmp_path_factory.mktemp("filled")
    with Model.from_gguf(talker, n_threads=1) as model, model.context(n_ctx=64) as context:
        store = DiskStore(folder / "store")
        prompts = PromptCache(store, block_size=8)
        for text in (TRUNK + LEFT, TRUNK + RIGHT):
            with context.sequence() as sequence:
                prompts.append(sequence, text)
                sequence.save(folder / "chat.kv")
        store.close()
    return folder


@pytest.fixture
def filled(filled_once: Path, tmp_path: Path) -> Path:
    """A store that may be changed."""
    return shutil.copytree(filled_once / "store", tmp_path / "store")


@pytest.fixture
def entries(invoke: Invoke, filled: Path) -> list[dict[str, Any]]:
    """What is listed of it, in the order of the texts."""
    found: list[dict[str, Any]] = listed(invoke, filled)["entries"]
    return sorted(found, key=lambda entry: (entry["start"], entry["tokens"]))
