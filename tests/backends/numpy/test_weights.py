"""Tensors of a file as f32 arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.ggml import store as ggml
from kvcellar.backends.numpy.gguf import GgufTensors, NumpyWeights
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
