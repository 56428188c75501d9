"""Which raw rows are finite, by their bits, against what their values are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.backends.ggml.store import from_rows
from kvcellar.types import MAX_VALUE, BoolArray, ByteArray, KVType, all_finite, finite_rows

KINDS = pytest.mark.parametrize("kind", KVType, ids=lambda kind: kind.label)
N_BLOCKS = 3


def by_value(rows: ByteArray, kind: KVType) -> BoolArray:
    """The same by the values that ggml makes of them; an infinite scale may make 0 a NaN."""
    with np.errstate(all="ignore"):
        finite: BoolArray = np.all(np.abs(from_rows(rows, kind)) < MAX_VALUE, axis=1)
    return finite


def random_rows(kind: KVType, seed: int, n: int = 4) -> ByteArray:
    """Bytes of any kind, many with a full exponent at a random place."""
    rng = np.random.default_rng(seed)
    n_blocks = N_BLOCKS if kind.is_quantized else 8
    rows = rng.integers(0, 256, (n, n_blocks * kind.block_bytes), np.uint8)
    if kind.is_quantized:  # a block without values of 0, which infinity would make NaN
        rows[rows == 0] = 1
    for last in (1, 3) if kind.is_quantized else (kind.block_bytes - 1,):
        rows[:, last :: kind.block_bytes] &= 0b1011_1111
    for row in rows[rng.integers(0, 2, n).astype(bool)]:
        at = int(rng.integers(n_blocks)) * kind.block_bytes
        start = at if kind.is_quantized else at + kind.block_bytes - 2
        row[start + 1] |= 0x7C if kind.limit == 0x7C00 else 0x7F
        row[start] |= 0x80
    return rows


@KINDS
@given(st.integers(0, 2**32 - 1))
def test_bits_tell_what_values_are(kind: KVType, seed: int) -> None:
    rows = random_rows(kind, seed)
    wanted = by_value(rows, kind)
    assert finite_rows(rows, kind).tolist() == wanted.tolist()
    for n in range(len(rows) + 1):
        assert all_finite(kind.numbers(rows[:n]), kind) == bool(wanted[:n].all())


@pytest.mark.parametrize("kind", [KVType.F32, KVType.F16, KVType.BF16])
def test_every_pattern_of_the_upper_16_bits(kind: KVType) -> None:
    upper = np.arange(2**16, dtype=np.uint16)
    rows = np.zeros((2**16, kind.block_bytes), np.uint8)
    rows[:, -2:] = upper[:, np.newaxis].view(np.uint8)
    wanted = by_value(rows, kind)
    assert np.array_equal(finite_rows(rows, kind), wanted)
    assert [all_finite(kind.numbers(rows[i : i + 1]), kind) for i in range(0, 2**16, 37)] == (
        wanted[::37].tolist()
    )
    assert 0 < wanted.sum() < 2**16


@KINDS
def test_rows_of_no_bytes_are_finite(kind: KVType) -> None:
    for shape in ((0, 4 * kind.block_bytes), (3, 0), (0, 0)):
        rows = np.empty(shape, np.uint8)
        assert finite_rows(rows, kind).tolist() == [True] * shape[0]
        assert all_finite(kind.numbers(rows), kind)


@KINDS
def test_numbers_are_a_view_of_rows_that_are_no_neighbours(kind: KVType) -> None:
    rows = np.zeros((6, N_BLOCKS * kind.block_bytes), np.uint8)
    every = kind.numbers(rows[::2])
    assert np.shares_memory(every, rows)
    rows[2, kind.block_bytes : kind.block_bytes + 2] = 0xFF
    assert np.argwhere(every)[0, :2].tolist() == [1, 1]
