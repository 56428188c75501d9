"""Rows to the K/V types and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.backends.ggml.store import from_rows, to_rows
from kvcellar.backends.hadamard import hadamard, transform
from kvcellar.types import KVType

# The largest error as a share of the largest value of a block.
TOLERANCE = {
    KVType.F32: 0.0,
    KVType.F16: 2**-11,
    KVType.BF16: 2**-8,
    KVType.Q8_0: 1 / 200,
    KVType.Q5_1: 1 / 28,
    KVType.Q5_0: 1 / 14,
    KVType.Q4_1: 1 / 14,
    KVType.Q4_0: 1 / 7,
    KVType.IQ4_NL: 1 / 6,
}


def test_every_type_has_a_tolerance() -> None:
    assert set(TOLERANCE) == set(KVType)


@pytest.mark.parametrize("kind", KVType, ids=lambda kind: kind.label)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 4), exponent=st.integers(-8, 8))
def test_a_round_trip_stays_within_the_type(kind: KVType, seed: int, n: int, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.asarray(rng.uniform(-1, 1, (n, 64)) * 2.0**exponent, np.float32)
    stored = to_rows(rows, kind)
    assert stored.shape == (n, kind.row_bytes(64))
    largest = np.abs(rows.reshape(n, 2, 32)).max(axis=2, keepdims=True)
    error = np.abs(from_rows(stored, kind) - rows).reshape(n, 2, 32)
    assert (error <= TOLERANCE[kind] * largest + 1e-7 * largest).all()


@pytest.mark.parametrize("kind", KVType, ids=lambda kind: kind.label)
def test_zero_bytes_are_zeros(kind: KVType) -> None:
    zeros = from_rows(np.zeros((2, kind.row_bytes(32)), np.uint8), kind)
    np.testing.assert_array_equal(zeros, np.zeros((2, 32)))


@pytest.mark.parametrize("kind", KVType, ids=lambda kind: kind.label)
def test_no_rows_are_no_rows(kind: KVType) -> None:
    stored = to_rows(np.empty((0, 64), np.float32), kind)
    assert from_rows(stored, kind).shape == (0, 64)


def test_rows_that_are_not_contiguous() -> None:
    rows = np.arange(256, dtype=np.float32).reshape(4, 64)
    np.testing.assert_array_equal(from_rows(to_rows(rows[::2], KVType.F32), KVType.F32), rows[::2])


@pytest.mark.parametrize("size", [1, 2, 32, 128])
def test_the_transform_is_its_own_inverse(size: int) -> None:
    matrix = hadamard(size)
    np.testing.assert_allclose(matrix @ matrix, np.eye(size), atol=1e-5)
    rows = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    np.testing.assert_allclose(transform(transform(rows, size), size), rows, atol=1e-5)


def test_a_transform_of_size_zero_does_nothing() -> None:
    rows = np.ones((2, 8), np.float32)
    assert transform(rows, 0) is rows
