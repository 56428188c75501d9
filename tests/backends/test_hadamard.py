"""The Hadamard matrix against its definition by the bits that row and column share."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.backends.hadamard import hadamard, transform


@pytest.mark.parametrize("size", [1, 2, 64, 128])
def test_signs_are_those_of_the_shared_bits(size: int) -> None:
    for i in range(0, size, 3):
        for j in range(size):
            sign = -1 if (i & j).bit_count() % 2 else 1
            assert hadamard(size)[i, j] == pytest.approx(sign / size**0.5)


def test_applied_twice_it_gives_the_rows_back() -> None:
    rows = np.random.default_rng(0).standard_normal((3, 128)).astype(np.float32)
    rounding = 64 * np.finfo(np.float32).eps  # two sums of 64 terms
    np.testing.assert_allclose(transform(transform(rows, 64), 64), rows, atol=rounding)
    assert transform(rows, 0) is rows
