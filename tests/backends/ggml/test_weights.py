"""Tensors of a file as ggml tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.ggml.binding import tensor_at
from kvcellar.backends.ggml.gguf import GgmlWeights, GgufFile
from kvcellar.errors import UnsupportedModel
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


def test_a_matrix_of_one_row_is_found_under_its_shape(tmp_path: Path) -> None:
    weights = _weights(tmp_path, a=MATRIX[:1])
    assert tuple(tensor_at(weights.matrix("a", 1, 32)).ne) == (32, 1, 1, 1)
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
