"""Tensors of a file as ggml tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.ggml.binding import tensor_at
from kvcellar.backends.ggml.gguf import GgmlWeights, GgufFile
from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.testing.gguf_writer import RawTensor, gguf_bytes, write_gguf

MATRIX = np.arange(96, dtype=np.float32).reshape(3, 32)


def _weights(path: Path, **tensors: Any) -> GgmlWeights:
    return GgmlWeights(GgufFile(write_gguf(path / "w.gguf", {}, tensors)))


def test_a_tensor_points_into_the_file(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=MATRIX)
    struct = tensor_at(weights.matrix("a", 3, 32))
    assert tuple(struct.ne) == (32, 3, 1, 1)
    assert struct.name == b"a"
    assert weights.matrix("a", 3, 32) == weights.matrix("a", 3, 32)
    weights.close()


def test_has_and_shape(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=MATRIX)
    assert weights.has("a")
    assert not weights.has("b")
    assert weights.shape("a") == (3, 32)
    weights.close()


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=MATRIX)
    with pytest.raises(UnsupportedModel, match="has no tensor b"):
        weights.matrix("b", 3, 32)
    with pytest.raises(UnsupportedModel, match="has no tensor b"):
        weights.shape("b")
    weights.close()


@pytest.mark.parametrize("shape", [(32, 3), (3, 31), (96,), (3, 32, 1), (0, 32)])
def test_another_shape_names_both(tmp_path: Path, shape: tuple[int, ...]) -> None:
    weights = _weights(tmp_path, a=MATRIX)
    with pytest.raises(ModelFileError, match=r"tensor a has shape \(3, 32\), expected"):
        weights.matrix("a", *shape)
    weights.close()


def test_an_empty_tensor_is_refused(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=np.empty((0, 32), np.float32))
    with pytest.raises(ModelFileError, match="tensor a has shape"):
        weights.matrix("a", 0, 32)
    weights.close()


def test_a_matrix_of_one_row_is_found_under_its_shape(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=MATRIX[:1])
    assert tuple(tensor_at(weights.matrix("a", 1, 32)).ne) == (32, 1, 1, 1)
    weights.close()


@pytest.mark.parametrize("dtype", ["f8", "i1", "i2", "i4"])
def test_types_without_a_product_are_refused(tmp_path: Path, dtype: str) -> None:
    weights = _weights(tmp_path, a=MATRIX.astype(dtype))
    with pytest.raises(UnsupportedModel, match="which has no product"):
        weights.matrix("a", 3, 32)
    weights.close()


def test_vectors_and_values_must_be_f32(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=np.ones(32, np.float16))
    for read in (weights.vector, weights.values):
        with pytest.raises(UnsupportedModel, match="tensor a has type f16, expected f32"):
            read("a", 32)
    weights.close()


def test_a_vector_may_have_more_than_one_axis(tmp_path: Path) -> None:
    halves = np.ones((4, 8), np.float16)
    weights = _weights(
        tmp_path, a=np.ones((4, 8), np.float32), b=np.ones((4, 1), np.float32), c=halves
    )
    for name, shape in (("a", (4, 8)), ("b", (4, 1))):
        assert weights.vector(name, *shape) is not None
        with pytest.raises(ModelFileError, match=f"tensor {name} has shape"):
            weights.vector(name, 4)
    with pytest.raises(UnsupportedModel, match="tensor c has type f16, expected f32"):
        weights.vector("c", 4, 8)
    weights.close()


def test_values_are_numbers(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=np.array([1.5, -2, 3], np.float32))
    assert weights.values("a", 3) == (1.5, -2.0, 3.0)
    with pytest.raises(ModelFileError, match="expected"):
        weights.values("a", 4)
    weights.close()


def test_a_file_of_another_alignment_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    tensors = {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}
    path.write_bytes(gguf_bytes({"general.alignment": np.uint32(8)}, tensors, alignment=8))
    with pytest.raises(UnsupportedModel, match=r"convert the file with general\.alignment = 32"):
        GgmlWeights(GgufFile(path))


def test_quantised_blocks_are_taken_as_they_are(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=RawTensor(8, (2, 64), bytes(2 * 2 * 34)))
    assert tensor_at(weights.matrix("a", 2, 64)).type == 8
    weights.close()


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=MATRIX)
    weights.close()
    weights.close()
