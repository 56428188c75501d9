"""The identity of a model: what counts, and when a kept hash is believed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.base import TensorBytes
from kvcellar.errors import ModelFileError, SnapshotMismatch
from kvcellar.files import FileStamp
from kvcellar.prompts.cache import PromptCache
from kvcellar.runtime import weights_hash as module
from kvcellar.runtime.hash_cache import ENV
from kvcellar.runtime.model import BACKENDS, Model, open_model_file
from kvcellar.stores.memory import MemoryStore
from kvcellar.testing.gguf_writer import Tensor, Value, gguf_bytes
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.types import ByteArray
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where hashes are kept, at once also those of files that were just made."""
    monkeypatch.setenv(ENV, str(tmp_path / "caches"))
    monkeypatch.setattr(module, "SETTLED_NS", 0)
    return tmp_path / "caches" / "hashes"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    models.mkdir()
    return tuned(models / "tiny.gguf", 0)


def numbers() -> dict[str, Tensor]:
    """Weights that no generator of random numbers decides."""
    return {
        name: (np.arange(tensor.size, dtype=np.float32) % 7 - 3).reshape(tensor.shape) / 8
        for name, tensor in LLAMA.tensors().items()
        if isinstance(tensor, np.ndarray)
    }


def tuned(path: Path, i: int) -> Path:
    """Write a fine-tune: another file of the same size, with every weight a bit different."""
    tensors: dict[str, Tensor] = {
        name: tensor + np.float32(i / 64)
        for name, tensor in numbers().items()
        if isinstance(tensor, np.ndarray)
    }
    path.write_bytes(gguf_bytes(LLAMA.metadata(), tensors))
    return path


def hash_of(path: Path, backend: str = "numpy") -> str:
    with Model.from_gguf(path, n_threads=1, backend=backend) as model:
        return model.weights_hash


def changed(path: Path, metadata: dict[str, Value], tensors: dict[str, Tensor]) -> str:
    """The hash of the file with other metadata and tensors."""
    other = path.with_name("other.gguf")
    other.write_bytes(gguf_bytes({**LLAMA.metadata(), **metadata}, {**numbers(), **tensors}))
    return hash_of(other)


# -- what counts


def test_the_hash_is_pinned(path: Path) -> None:
    assert hash_of(path) == PINNED


@pytest.mark.parametrize("arch", ARCHS)
def test_both_backends_have_the_same(shared: Path, arch: str) -> None:
    """The digest of samples too, so that one backend confirms what the other kept."""
    found = set()
    for backend in BACKENDS:
        file = open_model_file(shared / "models" / f"{arch}.gguf", backend, 1)
        found.add((module.compute_hash(file), module.sample_digest(file, b"x" * 32)))
        file.close()
    assert len(found) == 1


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


@dataclass
class Parts:
    """A file as the hash sees it."""

    metadata: dict[str, object] = field(default_factory=dict)
    named: dict[str, bytes] = field(default_factory=dict)

    def tensors(self) -> list[TensorBytes]:
        """Tensors of bytes."""
        return [
            TensorBytes(name, "i8", (len(data),), np.frombuffer(data, np.uint8))
            for name, data in sorted(self.named.items())
        ]


LINE = b"b:i8:[4]:4\n"
ALIKE = [
    (Parts({"x": 1, "y": 2}), Parts({"x=1\ny": 2})),
    (Parts({"x": "1\ny=2"}), Parts({"x": "1", "y": 2})),
    (Parts({"x": 1}, {"a": b"1234"}), Parts({"x=1\na:i8:[4]:4\n": 0}, {"a": b"1234"})),
    (Parts({}, {"a": b"1234", "b": b"5678"}), Parts({}, {"a:i8:[4]:4\n1234b": b"5678"})),
    (Parts({}, {"a": b"1234", "b": b"5678"}), Parts({}, {"a": b"1234" + LINE + b"5678"})),
]


@pytest.mark.parametrize(("a", "b"), ALIKE)
def test_no_name_or_value_can_be_taken_for_several(a: Any, b: Any) -> None:
    """What a file says in one place cannot stand for what another says in two."""
    for parts in (a, b):
        parts.metadata = {f".{key}": value for key, value in parts.metadata.items()}
    assert module.compute_hash(a) != module.compute_hash(b)
    assert module.sample_digest(a, b"x") != module.sample_digest(b, b"x")


# -- when a kept hash is believed


def test_it_is_computed_once_and_nothing_is_written_beside_the_model(
    path: Path, counted: Counted, folder: Path
) -> None:
    for backend in ("numpy", "numpy", "ggml"):
        assert hash_of(path, backend) == PINNED
    assert counted.n == 1
    assert list(path.parent.iterdir()) == [path]
    assert len(list(folder.iterdir())) == 1


def _copied(source: Path, target: Path) -> None:
    shutil.copy2(source, target)  # cp -p


def _unpacked(source: Path, target: Path) -> None:
    archive = source.with_suffix(".tar")
    with tarfile.open(archive, "w") as packed:
        packed.add(source, target.name)
    with tarfile.open(archive) as packed:
        packed.extractall(target.parent, filter="data")
    archive.unlink()


def _overwritten(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())
    os.utime(target, ns=(0, source.stat().st_mtime_ns))


def _moved(source: Path, target: Path) -> None:
    source.replace(target)


def _linked(source: Path, target: Path) -> None:
    target.unlink()
    target.symlink_to(source)


@pytest.mark.parametrize("put", [_copied, _unpacked, _overwritten, _moved, _linked])
def test_another_fine_tune_in_its_place_is_another_model(
    path: Path, counted: Counted, put: Callable[[Path, Path], None]
) -> None:
    """Of the same size and time of modification: what copies and archives keep decides nothing."""
    os.utime(path, (0, 1_700_000_000))  # archives round to less than nanoseconds
    assert hash_of(path) == PINNED
    status = path.stat()
    other = tuned(path.with_name("other.gguf"), 1)
    os.utime(other, ns=(0, status.st_mtime_ns))
    put(other, path)
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert hash_of(path) != PINNED
    assert counted.n == 2


def test_a_file_that_lies_beside_a_model_is_not_believed(path: Path, counted: Counted) -> None:
    """As older versions wrote them, or whoever made the model."""
    status = path.stat()
    forged = path.with_name(f"{path.name}.kvcellar.json")
    text = (
        f'{{"version": 1, "size": {status.st_size}, "mtime_ns": {status.st_mtime_ns}, '
        f'"weights": "{"0" * 64}"}}'
    )
    forged.write_text(text)
    assert hash_of(path) == PINNED
    assert forged.read_text() == text
    assert counted.n == 1


def same_stamp(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let every file have the stamp that this one has now."""
    stamp = FileStamp.at(path)
    monkeypatch.setattr(FileStamp, "of", lambda _: stamp)
    monkeypatch.setattr(FileStamp, "at", lambda _: stamp)


def test_a_stamp_that_was_seen_before_is_not_enough(
    path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Samples tell fine-tunes apart; what is wrong is replaced."""
    same_stamp(monkeypatch, path)
    first = hash_of(path)
    others = [hash_of(tuned(path, i)) for i in range(1, 6)]
    assert len({first, *others}) == counted.n == 6
    assert hash_of(path) == others[-1]
    assert counted.n == 6
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("key", ["llama.rope.freq_base", "llama.context_length"])
def test_every_setting_is_in_the_samples(
    path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    same_stamp(monkeypatch, path)
    assert hash_of(path) == PINNED
    value = 64 if key.endswith("length") else 2e4
    path.write_bytes(gguf_bytes({**LLAMA.metadata(), key: value}, numbers()))
    assert hash_of(path) != PINNED


def test_every_tensor_is_in_the_samples(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same_stamp(monkeypatch, path)
    assert hash_of(path) == PINNED
    for name, tensor in numbers().items():
        assert isinstance(tensor, np.ndarray)
        path.write_bytes(gguf_bytes(LLAMA.metadata(), {**numbers(), name: -1 - tensor}))
        assert hash_of(path) != PINNED


def big(n_bytes: int, at: slice | None = None) -> Any:
    data: ByteArray = np.zeros(n_bytes, np.uint8)
    if at is not None:
        data[at] = 1
    return Parts({}, {"a": data.tobytes()})


def test_where_samples_are_taken_is_a_secret() -> None:
    """A file that differs in one place passes with some secrets and not with others."""
    size = 4 * module.N_SAMPLES * module.SAMPLE_BYTES
    same, other = big(size), big(size, slice(100, 200))
    found = 0
    for i in range(200):
        secret = i.to_bytes(32, "little")
        found += module.sample_digest(same, secret) != module.sample_digest(other, secret)
    assert 10 < found < 100


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_difference_passes_as_often_as_is_said(share: float) -> None:
    """Of one tensor, in one stretch: a sample meets it with about its share of the tensor."""
    size = 1 << 20
    same, other = big(size), big(size, slice(0, int(share * size)))
    n, passed = 400, 0
    for i in range(n):
        secret = i.to_bytes(32, "little")
        passed += module.sample_digest(same, secret) == module.sample_digest(other, secret)
    expected = n * (1 - share) ** module.N_SAMPLES
    assert abs(passed - expected) <= 5 * np.sqrt(expected) + 1


def test_small_tensors_and_both_ends_are_read() -> None:
    n = module.N_SAMPLES * module.SAMPLE_BYTES
    for at in (0, n // 2, n - 1):
        one = slice(at, at + 1)
        assert module.sample_digest(big(n), b"x") != module.sample_digest(big(n, one), b"x")
    size, found = n + 1, [False, False]
    for i in range(3000):  # a sample begins at the first or the last place that there is
        secret = i.to_bytes(32, "little")
        plain = module.sample_digest(big(size), secret)
        for k, end in enumerate((slice(0, 1), slice(size - 1, size))):
            found[k] |= plain != module.sample_digest(big(size, end), secret)
        if all(found):
            return
    raise AssertionError(found)


def test_a_file_that_was_just_changed_is_not_kept(
    path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """A second change within a tick of the clock would not show; nor where clocks disagree."""
    monkeypatch.setattr(module, "SETTLED_NS", 2_000_000_000)
    now, changed_at = time.time_ns(), path.stat().st_ctime_ns
    for ahead in (0, 1_900_000_000, -3_600_000_000_000):
        monkeypatch.setattr(time, "time_ns", lambda t=changed_at + ahead: t)
        assert hash_of(path) == PINNED
        assert not folder.exists()
    monkeypatch.setattr(time, "time_ns", lambda: now + 3_000_000_000)
    assert hash_of(path) == hash_of(path) == PINNED
    assert counted.n == 4


# -- files that change while they are open


def test_what_took_its_place_is_not_taken_for_it(path: Path, folder: Path) -> None:
    with Model.from_gguf(path, n_threads=1) as model:
        tuned(path.with_name("other.gguf"), 1).replace(path)
        assert model.weights_hash == PINNED
        assert not folder.exists()
    other = hash_of(path)
    assert other != PINNED
    with Model.from_gguf(path, n_threads=1) as model:
        path.unlink()
        assert model.weights_hash == other


def test_what_is_changed_while_it_is_hashed_is_not_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    compute = module.compute_hash

    def touch(file: Any) -> str:
        found = compute(file)
        os.utime(path, ns=(0, path.stat().st_mtime_ns))
        return found

    monkeypatch.setattr(module, "compute_hash", touch)
    assert hash_of(path) == PINNED
    assert not folder.exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_was_truncated_while_open_is_an_error(path: Path, backend: str) -> None:
    """And no end of the process, for as long as nothing was read."""
    size = path.stat().st_size
    with Model.from_gguf(path, n_threads=1, backend=backend) as model:
        os.truncate(path, size - 4096)
        with pytest.raises(ModelFileError, match=f"truncated from {size} to {size - 4096} bytes"):
            model.context(n_ctx=8)
        with pytest.raises(ModelFileError, match="replace files in use by renaming"):
            _ = model.weights_hash
    with pytest.raises(ModelFileError, match="truncated"):
        Model.from_gguf(path, n_threads=1, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shorter_file_that_took_its_place_does_no_harm(path: Path, backend: str) -> None:
    other = path.with_name("other.gguf")
    with Model.from_gguf(path, n_threads=1, backend=backend) as model:
        other.write_bytes(path.read_bytes()[:4096])
        other.replace(path)
        with model.context(n_ctx=8) as context:
            assert len(context.sequence([1, 2, 3]).logits) == LLAMA.n_vocab
        assert model.weights_hash == PINNED


# -- several at once


@pytest.mark.alone
def test_threads_that_hash_one_file(path: Path, folder: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(hash_of(path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [PINNED] * 4
    assert len(list(folder.iterdir())) == 1


@pytest.mark.alone
def test_processes_that_hash_files_at_once(path: Path, folder: Path, counted: Counted) -> None:
    """Each file's hash is whole afterwards, and is believed."""
    paths = [path, *(tuned(path.with_name(f"{i}.gguf"), i) for i in range(1, 4))]
    expected = [hash_of(one) for one in paths]
    shutil.rmtree(folder)
    code = f"""
from kvcellar.runtime import weights_hash as module
from kvcellar.runtime.hash_cache import HashCache
from kvcellar.runtime.model import open_model_file
module.SETTLED_NS = 0
for i in range(40):
    for path, wanted in zip({[str(one) for one in paths]}, {expected}):
        file = open_model_file(path, "ggml", 1)
        assert module.weights_hash(file) == wanted
        HashCache.of_user().put(file.stamp, HashCache.of_user().get(file.stamp))
        file.close()
"""
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(120) for process in running] == [0, 0]
    assert len(list(folder.iterdir())) == len(paths)
    counted.n = 0
    assert [hash_of(one) for one in paths] == expected
    assert counted.n == 0


# -- what depends on it


def test_another_fine_tune_is_refused_what_this_one_computed(path: Path, tmp_path: Path) -> None:
    """Snapshots and blocks of a shared store, where everything but the content is the same."""
    store, saved, text = MemoryStore(), tmp_path / "text.safetensors", [1, 2, 3, 4, 5, 6, 7, 8, 9]
    prompts = PromptCache(store, block_size=4)
    mtime = path.stat().st_mtime_ns
    with Model.from_gguf(path, n_threads=1) as model, model.context(n_ctx=32) as context:
        sequence = context.sequence()
        prompts.append(sequence, text)
        sequence.save(saved)
    with Model.from_gguf(path, n_threads=1) as model, model.context(n_ctx=32) as context:
        assert prompts.restore(context.sequence(), text).n_reused == 8
        context.load(saved)
    tuned(path, 1)
    os.utime(path, ns=(0, mtime))
    with Model.from_gguf(path, n_threads=1) as model, model.context(n_ctx=32) as context:
        assert prompts.restore(context.sequence(), text).n_reused == 0
        with pytest.raises(SnapshotMismatch, match="weights"):
            context.load(saved)
