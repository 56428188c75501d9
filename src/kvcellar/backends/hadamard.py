"""The transform under which quantised K and V rows lie; see ``CacheSpec.hadamard_k``."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kvcellar.types import Float32Array


@lru_cache(maxsize=8)
def hadamard(size: int) -> Float32Array:
    """The symmetric orthogonal Hadamard matrix of a power of two; it is its own inverse."""
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.float32(size**0.5)
    matrix.setflags(write=False)
    return matrix


def transform(rows: Float32Array, size: int) -> Float32Array:
    """Rows with the transform applied to each run of ``size`` values; twice gives them back."""
    if size == 0:
        return rows
    mixed: Float32Array = (rows.reshape(-1, size) @ hadamard(size)).reshape(rows.shape)
    return mixed
