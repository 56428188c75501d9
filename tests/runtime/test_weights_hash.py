"""The hash of a model's weights: what counts, and where it is kept."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.runtime import weights_hash as module
from kvcellar.runtime.model import Model
from kvcellar.runtime.weights_hash import SUFFIX, file_stamp, weights_hash
from kvcellar.testing.gguf_writer import Tensor, Value, gguf_bytes
from kvcellar.testing.tiny_llama import TinyLlama
from tests.runtime.archs import ARCHS

LLAMA = TinyLlama(n_layer=1)
PINNED = "086a7241ac3e08d8ff465087e7c87d8814ad4a19f7c449e139677b1295d315cd"


class Counted:
    """How often a hash was computed."""

    n = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found, compute = Counted(), module.compute_hash

    def count(file: Any) -> str:
        found.n += 1
        return compute(file)

    monkeypatch.setattr(module, "compute_hash", count)
    return found


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    path = folder / "tiny.gguf"
    path.write_bytes(gguf_bytes(LLAMA.metadata(), numbers()))
    return path


def numbers() -> dict[str, Tensor]:
    """Weights that no generator of random numbers decides."""
    return {
        name: (np.arange(tensor.size, dtype=np.float32) % 7 - 3).reshape(tensor.shape) / 8
        for name, tensor in LLAMA.tensors().items()
        if isinstance(tensor, np.ndarray)
    }


def hash_of(path: Path, backend: str = "numpy") -> str:
    with Model.from_gguf(path, n_threads=1, backend=backend) as model:
        return model.weights_hash


def changed(path: Path, metadata: dict[str, Value], tensors: dict[str, Tensor]) -> str:
    """The hash of the file with other metadata and tensors."""
    other = path.with_name("other.gguf")
    other.write_bytes(gguf_bytes({**LLAMA.metadata(), **metadata}, {**numbers(), **tensors}))
    found = hash_of(other)
    other.unlink()
    other.with_name(other.name + SUFFIX).unlink()
    return found


def sidecar(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


# -- what counts


def test_the_hash_is_pinned(path: Path) -> None:
    assert hash_of(path) == PINNED


@pytest.mark.parametrize("arch", ARCHS)
def test_both_backends_have_the_same(shared: Path, arch: str, counted: Counted) -> None:
    path = shared / "models" / f"{arch}.gguf"
    sidecar(path).unlink(missing_ok=True)
    first = hash_of(path, "ggml")
    sidecar(path).unlink()
    assert hash_of(path, "numpy") == first
    assert counted.n == 2


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.ffn_norm.weight", "output.weight"])
@pytest.mark.parametrize("at", [0, -1])
def test_every_weight_counts(path: Path, name: str, at: int) -> None:
    tensor = numbers()[name]
    assert isinstance(tensor, np.ndarray)
    tensor.reshape(-1).view(np.uint8)[at] ^= 1
    assert changed(path, {}, {name: tensor}) != PINNED


def test_types_count(path: Path) -> None:
    tensor = numbers()["output.weight"]
    assert isinstance(tensor, np.ndarray)
    half = tensor.astype(np.float16)
    assert np.array_equal(half, tensor)
    assert changed(path, {}, {"output.weight": half}) != PINNED


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.layer_norm_rms_epsilon", 1e-6),
        ("llama.rope.freq_base", 20000.0),
        ("llama.context_length", 513),
        ("llama.rope.scaling.type", "linear"),
    ],
)
def test_hyper_parameters_count(path: Path, key: str, value: Value) -> None:
    assert changed(path, {key: value}, {}) != PINNED


def test_names_templates_and_the_order_of_tensors_do_not(path: Path) -> None:
    names: dict[str, Value] = {
        "general.name": "another",
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.ggml.tokens": ["a", "b"],
    }
    assert changed(path, names, {}) == PINNED
    other = path.with_name("other.gguf")
    backwards = dict(reversed(list(numbers().items())))
    other.write_bytes(gguf_bytes(LLAMA.metadata(), backwards))
    assert hash_of(other) == PINNED


# -- where it is kept


def test_it_is_computed_once(path: Path, counted: Counted, home: Path) -> None:
    for backend in ("numpy", "numpy", "ggml"):
        assert hash_of(path, backend) == PINNED
    assert counted.n == 1
    kept = json.loads(sidecar(path).read_text())
    status = path.stat()
    stamp = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    assert kept == {"version": 1, **stamp, "weights": PINNED}
    assert not home.exists()
    assert {one.name for one in path.parent.iterdir()} == {path.name, sidecar(path).name}


def test_a_file_that_changed_is_hashed_again(path: Path, counted: Counted) -> None:
    hash_of(path)
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    assert hash_of(path) == PINNED
    tensors = numbers()
    output = tensors["output.weight"]
    assert isinstance(output, np.ndarray)
    tensors["output.weight"] = output + 1
    path.write_bytes(gguf_bytes(LLAMA.metadata(), tensors))
    assert hash_of(path) != PINNED
    assert counted.n == 3
    assert hash_of(path) != PINNED
    assert counted.n == 3


def test_a_file_of_another_size_is_hashed_again(path: Path, counted: Counted) -> None:
    hash_of(path)
    before = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes() + bytes(32))
    os.utime(path, ns=(before, before))
    hash_of(path)
    assert counted.n == 2


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff\xfe",
        b"{}",
        b"[" * 100_000,
        {"weights": "short"},
        {"weights": "G" * 64},
        {"weights": None},
        {"version": 0},
        {"size": -1},
        {"mtime_ns": "1"},
    ],
)
def test_what_is_damaged_is_not_believed(
    path: Path, counted: Counted, damage: bytes | dict[str, object]
) -> None:
    hash_of(path)
    kept = json.loads(sidecar(path).read_text())
    data = damage if isinstance(damage, bytes) else json.dumps({**kept, **damage}).encode()
    sidecar(path).write_bytes(data)
    assert hash_of(path) == PINNED
    assert counted.n == 2
    assert json.loads(sidecar(path).read_text()) == kept  # it is mended


def closed(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Let no file be written in these folders, nor below."""
    write = Path.write_text

    def refuse(self: Path, *args: Any, **more: Any) -> int:
        if any(folder in self.parents for folder in folders):
            raise PermissionError(13, "Permission denied")
        return write(self, *args, **more)

    monkeypatch.setattr(Path, "write_text", refuse)


def test_a_folder_that_cannot_be_written(
    path: Path, counted: Counted, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed(monkeypatch, path.parent)
    assert hash_of(path) == hash_of(path) == PINNED
    assert counted.n == 1
    assert list(path.parent.iterdir()) == [path]
    kept = list((home / "kvcellar" / "weights").iterdir())
    assert (home / "kvcellar" / "weights").stat().st_mode & 0o777 == 0o700
    assert len(kept) == 1
    assert kept[0].suffix == ".json"
    other = path.with_name("other.gguf")
    other.write_bytes(path.read_bytes())
    hash_of(other)
    assert counted.n == 2  # each has its own


def test_nowhere_to_keep_it(
    path: Path, counted: Counted, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed(monkeypatch, path.parent, home)
    assert hash_of(path) == hash_of(path) == PINNED
    assert counted.n == 2


def test_no_home(path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    closed(monkeypatch, path.parent)
    monkeypatch.setattr(Path, "expanduser", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hash_of(path) == hash_of(path) == PINNED
    assert counted.n == 2


def test_a_home_that_is_a_file(path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_bytes(b"")
    closed(monkeypatch, path.parent)
    assert hash_of(path) == PINNED


# -- files that change while they are open


def test_what_took_its_place_is_not_taken_for_it(path: Path) -> None:
    with Model.from_gguf(path, n_threads=1) as model:
        other = path.with_name("other.gguf")
        other.write_bytes(LLAMA.to_bytes())
        other.replace(path)
        assert model.weights_hash == PINNED
        assert not sidecar(path).exists()
    assert hash_of(path) != PINNED
    with Model.from_gguf(path, n_threads=1) as model:
        path.unlink()
        assert model.weights_hash != PINNED
    assert file_stamp(path) is None


def test_a_file_that_is_gone_has_a_hash(path: Path) -> None:
    with Model.from_gguf(path, n_threads=1) as model:
        path.unlink()
        assert weights_hash(model._file, None) == model.weights_hash == PINNED


@pytest.mark.alone
def test_threads_that_hash_one_file(path: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(hash_of(path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [PINNED] * 4
    assert json.loads(sidecar(path).read_text())["weights"] == PINNED
    assert {one.name for one in path.parent.iterdir()} == {path.name, sidecar(path).name}
