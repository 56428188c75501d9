"""GGUF files that both backends read, or refuse with the same error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import pytest

from kvcellar.backends.ggml.gguf import GgufFile
from kvcellar.backends.numpy.gguf import GgufTensors
from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.testing.gguf_writer import RawTensor, gguf_bytes, write_gguf
from kvcellar.testing.tiny_llama import TinyLlama


class Read(Protocol):
    """What a reader gives."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """Values by key."""


Reader: TypeAlias = Callable[[Path], Read]


@pytest.fixture(params=[GgufFile, GgufTensors], ids=["ggml", "numpy"])
def read(request: pytest.FixtureRequest) -> Reader:
    reader: Reader = request.param
    return reader


def test_a_missing_file_is_named(read: Reader, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"cannot open .*none\.gguf: No such file"):
        read(tmp_path / "none.gguf")


def test_a_folder_is_an_error(read: Reader, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot open"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"GG", b"PK\x03\x04 a zip", b"ggjt" + bytes(100)])
def test_what_is_no_gguf_is_an_error(read: Reader, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="not a GGUF file" if read is GgufFile else "."):
        read(path)


@pytest.mark.parametrize("version", [0, 1, 4, 2**31, 0x03000000])
def test_another_version_is_an_error(read: Reader, tmp_path: Path, version: int) -> None:
    data = bytearray(TinyLlama(n_layer=1).to_bytes())
    data[4:8] = version.to_bytes(4, "little")
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"not a usable GGUF file|damaged"):
        read(path)


def test_every_truncation_is_an_error(read: Reader, tmp_path: Path) -> None:
    sound = TinyLlama(n_layer=1, n_embd=32, n_vocab=8, n_ff=32).to_bytes()
    path = tmp_path / "x.gguf"
    path.write_bytes(sound)
    start = min(info.offset for info in GgufFile(path).tensors.values())
    in_header, in_data = range(4, start, 7), range(start, len(sound) - 32, 4001)
    for length in (*in_header, *in_data, len(sound) - 33):
        path.write_bytes(sound[:length])
        with pytest.raises(ModelFileError, match=r"not a usable GGUF|truncated"):
            read(path)


def test_tensors_beyond_the_end_are_an_error(read: Reader, tmp_path: Path) -> None:
    huge = RawTensor(0, (2**20, 2**20), b"")
    path = write_gguf(tmp_path / "x.gguf", {}, {"a": huge})
    with pytest.raises(ModelFileError, match="truncated"):
        read(path)


@pytest.mark.parametrize(
    "shape", [(2**62, 4), (2**40, 2**40), (0, 2**63), (2**63 - 1,), (2**32, 2**32, 2**32)]
)
def test_absurd_shapes_are_an_error(read: Reader, tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, {"a": RawTensor(0, shape, b"")})
    with pytest.raises(ModelFileError):
        read(path)


@pytest.mark.parametrize("kind", [4, 5, 31, 36, 43, 1000, 2**31, 2**32 - 1])
def test_types_that_do_not_exist_are_an_error(read: Reader, tmp_path: Path, kind: int) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, {"a": RawTensor(kind, (32,), bytes(128))})
    with pytest.raises(ModelFileError):
        read(path)


def test_arrays_of_arrays_are_refused(read: Reader, tmp_path: Path) -> None:
    data = gguf_bytes({"key": np.zeros(1, np.uint8)}, {})
    at = data.index(b"key") + 3 + 4
    nested = data[:at] + (9).to_bytes(4, "little") + data[at + 4 :]
    path = tmp_path / "x.gguf"
    path.write_bytes(nested)
    with pytest.raises((ModelFileError, UnsupportedModel)):
        read(path)


def test_text_that_is_not_utf8_is_kept_readable(read: Reader, tmp_path: Path) -> None:
    data = gguf_bytes({"general.name": "abc"}, {})
    path = tmp_path / "x.gguf"
    path.write_bytes(data.replace(b"abc", b"\xff\xfec"))
    assert read(path).metadata["general.name"] == "\ufffd\ufffdc"


def test_an_error_leaves_no_open_file(read: Reader, tmp_path: Path) -> None:
    fds = Path("/proc/self/fd")
    if not fds.is_dir():
        pytest.skip("no /proc to count open files in")
    path = tmp_path / "x.gguf"
    path.write_bytes(TinyLlama().to_bytes()[:-1000])
    before = len(list(fds.iterdir()))
    for _ in range(20):
        with pytest.raises(ModelFileError):
            read(path)
    assert len(list(fds.iterdir())) == before
