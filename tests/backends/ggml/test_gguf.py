"""GGUF files, sound and unsound."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvcellar.backends.ggml.gguf import GgufFile, stored_shape
from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.testing.gguf_writer import RawTensor, gguf_bytes, write_gguf
from kvcellar.testing.tiny_llama import TinyLlama

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
FLOATS = st.floats(width=32, allow_nan=False)
ARRAYS = hnp.arrays(
    st.sampled_from(["u1", "i1", "u2", "i2", "u4", "i4", "f4", "?", "u8", "i8", "f8"]),
    st.integers(0, 9),
    elements={"allow_nan": False},
)
VALUES = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**64 - 1), FLOATS, TEXTS, st.lists(TEXTS), ARRAYS
)
TENSORS = hnp.arrays("f4", hnp.array_shapes(max_dims=4, max_side=5), elements=FLOATS)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=6), st.dictionaries(NAMES, TENSORS, max_size=4))
def test_what_is_written_is_read(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    metadata.pop("general.alignment", None)
    with tempfile.TemporaryDirectory() as folder:
        file = GgufFile(write_gguf(Path(folder) / "x.gguf", metadata, tensors))
        raw = (Path(folder) / "x.gguf").read_bytes()
    assert list(file.metadata) == list(metadata)
    for key, value in metadata.items():
        _assert_same(file.metadata[key], value)
    assert list(file.tensors) == list(tensors)
    for name, tensor in tensors.items():
        info = file.tensors[name]
        assert info.shape == stored_shape(tensor.shape)
        assert raw[info.offset : info.offset + info.n_bytes] == tensor.tobytes()


def _assert_same(read: object, written: Any) -> None:
    if isinstance(written, np.ndarray):
        assert isinstance(read, np.ndarray)
        assert read.dtype == written.dtype
        np.testing.assert_array_equal(read, written)
    else:
        assert type(read) is type(written)
        assert read == written


@pytest.mark.parametrize(
    ("shape", "stored"),
    [((3, 4), (3, 4)), ((1, 4), (4,)), ((1, 1, 1), (1,)), ((2, 1), (2, 1)), ((7,), (7,))],
)
def test_files_do_not_tell_a_row_from_a_vector(
    shape: tuple[int, ...], stored: tuple[int, ...]
) -> None:
    assert stored_shape(shape) == stored


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"cannot open .*none\.gguf: No such file"):
        GgufFile(tmp_path / "none.gguf")


def test_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot open"):
        GgufFile(tmp_path)


def test_a_path_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ModelFileError, match="cannot open"):
        GgufFile("a\0b.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip", b"ggjt" + bytes(100)])
def test_what_is_no_gguf_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        GgufFile(path)


@pytest.mark.parametrize("version", [0, 1, 4, 2**31, 0x03000000])
def test_another_version_is_an_error(tmp_path: Path, version: int) -> None:
    data = bytearray(TinyLlama(n_layer=1).to_bytes())
    data[4:8] = version.to_bytes(4, "little")
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="not a usable GGUF file"):
        GgufFile(path)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    sound = TinyLlama(n_layer=1, n_embd=32, n_vocab=8, n_ff=32).to_bytes()
    path = tmp_path / "x.gguf"
    path.write_bytes(sound)
    start = min(info.offset for info in GgufFile(path).tensors.values())
    in_header, in_data = range(4, start, 7), range(start, len(sound) - 32, 4001)
    for length in (*in_header, *in_data, len(sound) - 33):
        path.write_bytes(sound[:length])
        with pytest.raises(ModelFileError, match=r"not a usable GGUF|truncated"):
            GgufFile(path)


def test_a_truncation_says_what_is_missing(tmp_path: Path) -> None:
    sound = TinyLlama().to_bytes()
    path = tmp_path / "x.gguf"
    path.write_bytes(sound[:-1000])
    with pytest.raises(ModelFileError, match=rf"end at byte {len(sound)}, the file at"):
        GgufFile(path)


def test_tensors_beyond_the_end_are_an_error(tmp_path: Path) -> None:
    huge = RawTensor(0, (2**20, 2**20), b"")
    path = write_gguf(tmp_path / "x.gguf", {}, {"a": huge})
    with pytest.raises(ModelFileError, match="truncated"):
        GgufFile(path)


@pytest.mark.parametrize(
    "shape", [(2**62, 4), (2**40, 2**40), (0, 2**63), (2**63 - 1,), (2**32, 2**32, 2**32)]
)
def test_absurd_shapes_are_an_error(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, {"a": RawTensor(0, shape, b"")})
    with pytest.raises(ModelFileError):
        GgufFile(path)


@pytest.mark.parametrize("kind", [4, 5, 31, 36, 43, 1000, 2**31, 2**32 - 1])
def test_types_that_do_not_exist_are_an_error(tmp_path: Path, kind: int) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, {"a": RawTensor(kind, (32,), bytes(128))})
    with pytest.raises(ModelFileError):
        GgufFile(path)


def test_a_name_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, {"n" * 64: np.zeros(4, np.float32)})
    with pytest.raises(ModelFileError):
        GgufFile(path)


def test_the_longest_name_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, {"n" * 63: np.zeros(4, np.float32)})
    assert list(GgufFile(path).tensors) == ["n" * 63]


def test_arrays_of_arrays_are_refused(tmp_path: Path) -> None:
    data = gguf_bytes({"key": np.zeros(1, np.uint8)}, {})
    at = data.index(b"key") + 3 + 4
    nested = data[:at] + (9).to_bytes(4, "little") + data[at + 4 :]
    path = tmp_path / "x.gguf"
    path.write_bytes(nested)
    with pytest.raises((ModelFileError, UnsupportedModel)):
        GgufFile(path)


def test_text_that_is_not_utf8_is_kept_readable(tmp_path: Path) -> None:
    data = gguf_bytes({"general.name": "abc"}, {})
    path = tmp_path / "x.gguf"
    path.write_bytes(data.replace(b"abc", b"\xff\xfec"))
    assert GgufFile(path).metadata["general.name"] == "\ufffd\ufffdc"


def test_an_error_leaves_no_open_file(tmp_path: Path) -> None:
    fds = Path("/proc/self/fd")
    if not fds.is_dir():
        pytest.skip("no /proc to count open files in")
    path = tmp_path / "x.gguf"
    path.write_bytes(TinyLlama().to_bytes()[:-1000])
    before = len(list(fds.iterdir()))
    for _ in range(20):
        with pytest.raises(ModelFileError):
            GgufFile(path)
    assert len(list(fds.iterdir())) == before
