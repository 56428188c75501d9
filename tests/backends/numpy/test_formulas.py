"""Attention, computed a token and a head at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.numpy.ops import attend, softmax
from kvcellar.testing.rotation import random_rows
from kvcellar.types import Float32Array

Q = random_rows(3, 4 * 8).reshape(3, 4, 8)
KEYS = random_rows(5, 2 * 8, 1).reshape(5, 2, 8)
VALUES = random_rows(5, 2 * 6, 2).reshape(5, 2, 6)
MASK = np.array(
    [[0, -np.inf, 0, -np.inf, 0], [0, 0, 0, 0, 0], [-np.inf, -np.inf, -np.inf, 0, -np.inf]],
    np.float16,
)
SINKS = np.array([0.5, -2.0, 3.0, 0.0], np.float32)


def _naive(scale: float, softcap: float = 0.0, sinks: Float32Array | None = None) -> Any:
    out = np.zeros((3, 4, 6))
    for i in range(3):
        for h in range(4):
            total = 0.0 if sinks is None else math.exp(sinks[h])
            for j in np.flatnonzero(MASK[i] == 0):
                score = scale * float(Q[i, h] @ KEYS[j, h // 2])
                weight = math.exp(softcap * math.tanh(score / softcap) if softcap else score)
                total += weight
                out[i, h] += weight * VALUES[j, h // 2]
            out[i, h] /= total
    return out.reshape(3, 24)


@pytest.mark.parametrize("scale", [0.1, 0.4])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_attention_by_its_definition(
    scale: float, softcap: float, sinks: Float32Array | None
) -> None:
    got = attend(Q, KEYS, VALUES, MASK, scale, softcap=softcap, sinks=sinks)
    np.testing.assert_allclose(got, _naive(scale, softcap, sinks), rtol=1e-4, atol=1e-5)


def test_a_large_sink_leaves_nothing() -> None:
    sinks = np.full(4, 1e4, np.float32)
    np.testing.assert_array_equal(attend(Q, KEYS, VALUES, MASK, 0.3, sinks=sinks), 0)


def test_shares_of_large_scores_sum_to_one() -> None:
    shares = softmax(np.array([[1e4, 0, -np.inf], [-1e4, -1e4, -1e4]], np.float32))
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    assert shares[0, 2] == 0
