"""GGUF files as ggml reads them: values, tensors, and what is peculiar to it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvcellar.backends.ggml.gguf import GgufFile, stored_shape
from kvcellar.errors import ModelFileError
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.tiny_llama import TinyLlama
from tests.profiles import examples

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


@examples(60)
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


def test_the_longest_name_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, {"n" * 63: np.zeros(4, np.float32)})
    assert list(GgufFile(path).tensors) == ["n" * 63]


def test_a_path_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ModelFileError, match="cannot open"):
        GgufFile("a\0b.gguf")


def test_a_truncation_says_what_is_missing(tmp_path: Path) -> None:
    sound = TinyLlama().to_bytes()
    path = tmp_path / "x.gguf"
    path.write_bytes(sound[:-1000])
    with pytest.raises(ModelFileError, match=rf"end at byte {len(sound)}, the file at"):
        GgufFile(path)


def test_a_name_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, {"n" * 64: np.zeros(4, np.float32)})
    with pytest.raises(ModelFileError):
        GgufFile(path)
