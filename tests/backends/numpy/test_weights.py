"""Tensors of a file as f32 arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.ggml import store as ggml
from kvcellar.backends.numpy.gguf import GgufTensors, NumpyWeights
from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.testing.gguf_writer import RawTensor, write_gguf
from kvcellar.testing.rotation import random_rows
from kvcellar.types import KVType

MATRIX = np.arange(96, dtype=np.float32).reshape(3, 32)


def _weights(path: Path, **tensors: Any) -> NumpyWeights:
    return NumpyWeights(GgufTensors(write_gguf(path / "w.gguf", {}, tensors)))


def test_f32_is_taken_as_it_lies_in_the_file(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=MATRIX)
    got = weights.matrix("a", 3, 32)
    np.testing.assert_array_equal(got, MATRIX)
    assert not got.flags.owndata
    assert np.shares_memory(got, weights.matrix("a", 3, 32))


def test_has_and_shape(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=MATRIX)
    assert weights.has("a")
    assert not weights.has("b")
    assert weights.shape("a") == (3, 32)


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=MATRIX)
    with pytest.raises(UnsupportedModel, match="has no tensor b"):
        weights.matrix("b", 3, 32)


@pytest.mark.parametrize("shape", [(32, 3), (3, 31), (96,), (3, 32, 1), (0, 32)])
def test_another_shape_names_both(tmp_path: Path, shape: tuple[int, ...]) -> None:
    weights = _weights(tmp_path, a=MATRIX)
    with pytest.raises(ModelFileError, match=r"tensor a has shape \(3, 32\), expected"):
        weights.matrix("a", *shape)


def test_an_empty_tensor_is_refused(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=np.empty((0, 32), np.float32))
    with pytest.raises(ModelFileError, match="tensor a has shape"):
        weights.matrix("a", 0, 32)


def test_a_matrix_of_one_row_is_found_under_its_shape(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=MATRIX[:1])
    assert weights.matrix("a", 1, 32).shape == (1, 32)
    assert weights.vector("a", 32).shape == (32,)


@pytest.mark.parametrize("kind", list(KVType), ids=lambda kind: kind.label)
def test_every_type_is_widened_as_ggml_does(tmp_path: Path, kind: KVType) -> None:
    rows = random_rows(6, 64)
    stored = ggml.to_rows(rows, kind)
    weights = _weights(tmp_path, a=RawTensor(kind.ggml_id, (3, 2, 64), stored.tobytes()))
    got = weights.matrix("a", 3, 2, 64)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.reshape(6, 64), ggml.from_rows(stored, kind))


@pytest.mark.parametrize("dtype", ["f8", "i1", "i2", "i4"])
def test_types_without_a_product_are_refused(tmp_path: Path, dtype: str) -> None:
    weights = _weights(tmp_path, a=MATRIX.astype(dtype))
    with pytest.raises(UnsupportedModel, match="which has no product"):
        weights.matrix("a", 3, 32)


def test_vectors_and_values_must_be_f32(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=np.ones(32, np.float16))
    for read in (weights.vector, weights.values):
        with pytest.raises(UnsupportedModel, match="tensor a has type f16, expected f32"):
            read("a", 32)


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


def test_values_are_numbers(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=np.array([1.5, -2, 3], np.float32))
    assert weights.values("a", 3) == (1.5, -2.0, 3.0)


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=MATRIX)
    weights.close()
    weights.close()
