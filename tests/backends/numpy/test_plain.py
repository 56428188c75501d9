"""Operations that only compute, each against its definition written another way."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvcellar.backends.numpy.ops import NumpyOps
from kvcellar.testing.plans import causal_plan
from kvcellar.testing.rotation import random_rows
from kvcellar.types import Float32Array, MemorySpec

OPS = NumpyOps(causal_plan([0]), MemorySpec((), None, ()), ())
ROWS = random_rows(3, 8)
WEIGHT, BIAS = random_rows(2, 8, 1)
WIDE = np.array([-1e4, -30.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 30.0, 1e4], np.float32)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _gelu(x: float) -> float:
    return x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def test_layer_norm_has_the_mean_and_the_spread_that_it_is_given() -> None:
    got = OPS.layer_norm(ROWS, np.full(8, 3, np.float32), np.full(8, 2, np.float32), 0.0)
    np.testing.assert_allclose(got.mean(axis=1), 2, atol=1e-5)
    np.testing.assert_allclose(got.std(axis=1), 3, rtol=1e-5)


def test_layer_norm_weighs_each_value() -> None:
    for row, out in zip(ROWS.tolist(), OPS.layer_norm(ROWS, WEIGHT, BIAS, 0.5), strict=True):
        mean = sum(row) / 8
        spread = math.sqrt(sum((x - mean) ** 2 for x in row) / 8 + 0.5)
        wanted = [(x - mean) / spread * w + b for x, w, b in zip(row, WEIGHT, BIAS, strict=True)]
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


def test_rms_norm_weighs_each_value() -> None:
    for row, out in zip(ROWS.tolist(), OPS.rms_norm(ROWS, WEIGHT, 0.5), strict=True):
        size = math.sqrt(sum(x * x for x in row) / 8 + 0.5)
        wanted = [x / size * w for x, w in zip(row, WEIGHT, strict=True)]
        np.testing.assert_allclose(out, wanted, rtol=1e-5)


def test_silu_of_large_numbers_too() -> None:
    wanted = [x * _sigmoid(x) for x in WIDE.tolist()]
    np.testing.assert_allclose(OPS.silu(WIDE), wanted, rtol=1e-5, atol=1e-6)


def test_gelu_is_the_tanh_formula() -> None:
    x = WIDE[1:-1]
    np.testing.assert_allclose(OPS.gelu(x), [_gelu(v) for v in x.tolist()], rtol=1e-5, atol=1e-6)


def test_gates_multiply_up() -> None:
    gate, up = random_rows(2, 8, 2), random_rows(2, 8, 3)
    np.testing.assert_array_equal(OPS.swiglu(gate, up), OPS.silu(gate) * up)
    np.testing.assert_array_equal(OPS.geglu(gate, up), OPS.gelu(gate) * up)
    assert not np.allclose(OPS.geglu(gate, up), OPS.swiglu(gate, up), rtol=1e-2)


def test_a_cap_is_never_passed_and_hardly_felt_below() -> None:
    got = OPS.softcap(WIDE, 30.0)
    np.testing.assert_allclose(got[[0, -1]], [-30, 30])
    np.testing.assert_allclose(got[[2, 6]], [-1, 1], rtol=1e-3)
    assert np.all(np.diff(got) >= 0)


def test_merging_undoes_heads() -> None:
    split = OPS.heads(ROWS, 4)
    assert split.shape == (3, 4, 2)
    np.testing.assert_array_equal(split[1, 2], ROWS[1, 4:6])
    np.testing.assert_array_equal(OPS.merge(split), ROWS)


@pytest.mark.parametrize("rows", [ROWS, ROWS.reshape(3, 1, 8)])
def test_putting_side_by_side_undoes_splitting(rows: Float32Array) -> None:
    parts = OPS.split(rows, (1, 5, 2))
    assert [part.shape[-1] for part in parts] == [1, 5, 2]
    np.testing.assert_array_equal(parts[1], rows[..., 1:6])
    np.testing.assert_array_equal(OPS.concat(parts), rows)


def test_each_head_has_its_own_matrix() -> None:
    x, weight = ROWS.reshape(3, 2, 4), random_rows(2 * 5, 4, 4).reshape(2, 5, 4)
    got = OPS.linear_heads(x, weight)
    assert got.shape == (3, 2, 5)
    for head in (0, 1):
        wanted = OPS.linear(x[:, head], weight[head])
        np.testing.assert_allclose(got[:, head], wanted, rtol=1e-5, atol=1e-6)


def test_results_are_f32() -> None:
    x = ROWS.reshape(3, 2, 4)
    results = [
        OPS.layer_norm(ROWS, WEIGHT, BIAS, 1e-5),
        OPS.silu(ROWS),
        OPS.gelu(ROWS),
        OPS.softcap(ROWS, 3.0),
        OPS.linear_heads(x, random_rows(10, 4).reshape(2, 5, 4)),
        OPS.scale(ROWS, 0.3),
    ]
    assert {result.dtype for result in results} == {np.dtype(np.float32)}
