"""Tensors of a file, as both backends give them to a model, or refuse them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from kvcellar.backends.ggml.gguf import GgmlWeights, GgufFile
from kvcellar.backends.numpy.gguf import GgufTensors, NumpyWeights
from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.testing.gguf_writer import write_gguf

MATRIX = np.arange(96, dtype=np.float32).reshape(3, 32)
Open: TypeAlias = Callable[..., "GgmlWeights | NumpyWeights"]


@pytest.fixture(params=["ggml", "numpy"])
def weights_of(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Open]:
    """The weights of a file that has these tensors; closed in the end."""
    made: list[GgmlWeights | NumpyWeights] = []

    def opened(**tensors: Any) -> GgmlWeights | NumpyWeights:
        path = write_gguf(tmp_path / "w.gguf", {}, tensors)
        is_ggml = request.param == "ggml"
        made.append(GgmlWeights(GgufFile(path)) if is_ggml else NumpyWeights(GgufTensors(path)))
        return made[-1]

    yield opened
    for weights in made:
        weights.close()


def test_has_and_shape(weights_of: Open) -> None:
    weights = weights_of(a=MATRIX)
    assert weights.has("a")
    assert not weights.has("b")
    assert weights.shape("a") == (3, 32)


def test_an_absent_tensor_is_named(weights_of: Open) -> None:
    weights = weights_of(a=MATRIX)
    with pytest.raises(UnsupportedModel, match="has no tensor b"):
        weights.matrix("b", 3, 32)
    with pytest.raises(UnsupportedModel, match="has no tensor b"):
        weights.shape("b")


@pytest.mark.parametrize("shape", [(32, 3), (3, 31), (96,), (3, 32, 1), (0, 32)])
def test_another_shape_names_both(weights_of: Open, shape: tuple[int, ...]) -> None:
    weights = weights_of(a=MATRIX)
    with pytest.raises(ModelFileError, match=r"tensor a has shape \(3, 32\), expected"):
        weights.matrix("a", *shape)


def test_an_empty_tensor_is_refused(weights_of: Open) -> None:
    weights = weights_of(a=np.empty((0, 32), np.float32))
    with pytest.raises(ModelFileError, match="tensor a has shape"):
        weights.matrix("a", 0, 32)


@pytest.mark.parametrize("dtype", ["f8", "i1", "i2", "i4"])
def test_types_without_a_product_are_refused(weights_of: Open, dtype: str) -> None:
    weights = weights_of(a=MATRIX.astype(dtype))
    with pytest.raises(UnsupportedModel, match="which has no product"):
        weights.matrix("a", 3, 32)


def test_vectors_and_values_must_be_f32(weights_of: Open) -> None:
    weights = weights_of(a=np.ones(32, np.float16))
    for read in (weights.vector, weights.values):
        with pytest.raises(UnsupportedModel, match="tensor a has type f16, expected f32"):
            read("a", 32)


def test_a_vector_may_have_more_than_one_axis(weights_of: Open) -> None:
    halves = np.ones((4, 8), np.float16)
    weights = weights_of(a=np.ones((4, 8), np.float32), b=np.ones((4, 1), np.float32), c=halves)
    for name, shape in (("a", (4, 8)), ("b", (4, 1))):
        assert weights.vector(name, *shape) is not None
        with pytest.raises(ModelFileError, match=f"tensor {name} has shape"):
            weights.vector(name, 4)
    with pytest.raises(UnsupportedModel, match="tensor c has type f16, expected f32"):
        weights.vector("c", 4, 8)


def test_values_are_numbers(weights_of: Open) -> None:
    weights = weights_of(a=np.array([1.5, -2, 3], np.float32))
    assert weights.values("a", 3) == (1.5, -2.0, 3.0)
    with pytest.raises(ModelFileError, match="expected"):
        weights.values("a", 4)


def test_closing_twice_is_fine(weights_of: Open) -> None:
    weights = weights_of(a=MATRIX)
    weights.close()
    weights.close()
