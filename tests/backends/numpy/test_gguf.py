"""GGUF files read through the library: the same as ggml reads, damage included."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from kvcellar.backends.ggml.gguf import GgufFile
from kvcellar.backends.numpy import gguf as library
from kvcellar.backends.numpy.gguf import GgufTensors
from kvcellar.errors import KVCellarError, LibraryError, ModelFileError, UnsupportedModel
from kvcellar.testing.gguf_writer import Value, gguf_bytes, write_gguf
from kvcellar.testing.tiny_llama import TinyLlama

METADATA: dict[str, Value] = {
    "a.text": "häuser",
    "a.texts": ["x", "", "ÿ"],
    "a.flag": True,
    "a.count": 7,
    "a.below": -3,
    "a.huge": 2**63,
    "a.number": 1.5,
    "a.ints": np.array([1, -2, 3], np.int32),
    "a.flags": np.array([True, False]),
    "a.halves": np.array([0.5, 2.5], np.float32),
}


def test_metadata_are_what_ggml_reads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", METADATA, {})
    ours, theirs = GgufTensors(path).metadata, GgufFile(path).metadata
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert type(ours[key]) is type(value)
        np.testing.assert_array_equal(ours[key], value)


@pytest.mark.parametrize("name", ["llama-dense", "gpt-oss-moe", "gemma3-dense"])
def test_reference_models_are_what_ggml_reads(shared: Path, name: str) -> None:
    path = shared / "models" / f"{name}.gguf"
    ours, theirs = GgufTensors(path), GgufFile(path)
    for key, value in theirs.metadata.items():
        np.testing.assert_array_equal(ours.metadata[key], value)
    for tensor in theirs.tensors.values():
        assert ours.shape(tensor.name) == tensor.shape
        assert ours.type_name(tensor.name) == tensor.type_name
    assert ours.n_bytes == sum(tensor.n_bytes for tensor in theirs.tensors.values())


def test_a_file_for_other_machines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))
    with pytest.raises(UnsupportedModel, match="other byte order"):
        GgufTensors(path)


def test_an_absurd_count_is_an_error_at_once(tmp_path: Path) -> None:
    """The library would go through all of them, finding nothing."""
    path = tmp_path / "x.gguf"
    data = gguf_bytes({"a": ["one", "two"]}, {})
    at = data.index(b"a", 24) + 1 + 4 + 4
    path.write_bytes(data[:at] + (2**60).to_bytes(8, "little") + data[at + 8 :])
    start = perf_counter()
    with pytest.raises(ModelFileError, match="truncated or damaged"):
        GgufTensors(path)
    assert perf_counter() - start < 5


def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(library, "import_module", absent)
    with pytest.raises(LibraryError, match=r"pip install 'kvcellar\[numpy\]'"):
        GgufTensors(tmp_path / "x.gguf")


def test_arrays_of_arrays_are_refused(tmp_path: Path) -> None:
    data = gguf_bytes({"key": np.zeros(3, np.uint32)}, {})
    at = data.index(b"key") + 3 + 4
    path = tmp_path / "x.gguf"
    inner = (4).to_bytes(4, "little") + (0).to_bytes(8, "little")
    nested = (9).to_bytes(4, "little") + (1).to_bytes(8, "little") + inner
    path.write_bytes(data[:at] + nested + bytes(64))
    with pytest.raises(UnsupportedModel, match="array of arrays"):
        GgufTensors(path)


@pytest.mark.slow
def test_flipped_bits_give_errors_of_ours(tmp_path: Path) -> None:
    sound = TinyLlama(n_layer=1, n_embd=32, n_vocab=8, n_ff=32).to_bytes()
    path, outcomes = tmp_path / "x.gguf", Counter[str]()
    for seed in range(300):
        rng, data = random.Random(seed), bytearray(sound)
        for _ in range(rng.choice([1, 1, 4, 40])):
            data[rng.randrange(4, 1400)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            GgufTensors(path)
            outcomes["read"] += 1
        except KVCellarError as error:
            outcomes[type(error).__name__] += 1
    assert outcomes["read"] > 20
    assert outcomes["ModelFileError"] > 50
