"""Mixtures of experts: who is chosen, with which share, and what each computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.numpy.ops import mixture, route
from kvcellar.backends.operations import ExpertWeights, Routing
from kvcellar.types import Float32Array

N_EXPERT, N_EMBD, N_FF = 4, 3, 5
SCORES = np.array([1.0, -0.5, 2.0, 0.5], np.float32)
SOFTMAX = np.exp(SCORES) / np.exp(SCORES).sum()
SIGMOID = 1 / (1 + np.exp(-SCORES))


def _random(*shape: int, seed: int = 0) -> Float32Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


WEIGHTS = ExpertWeights(
    router=_random(N_EXPERT, N_EMBD, seed=1),
    down=_random(N_EXPERT, N_EMBD, N_FF, seed=2),
    n_used=2,
    gate=_random(N_EXPERT, N_FF, N_EMBD, seed=3),
    up=_random(N_EXPERT, N_FF, N_EMBD, seed=4),
)
X = _random(3, N_EMBD, seed=5)


def _shares(routing: Routing, **more: Any) -> dict[int, float]:
    chosen, shares = route(SCORES, replace(WEIGHTS, **more), routing)
    return dict(zip(chosen.tolist(), shares.tolist(), strict=True))


def _only(i: int, **more: Any) -> ExpertWeights[Float32Array]:
    """Weights of which everybody uses expert i alone."""
    bias = np.where(np.arange(N_EXPERT) == i, 100, 0).astype(np.float32)
    return replace(WEIGHTS, n_used=1, router_bias=bias, **more)


@pytest.mark.parametrize(
    ("routing", "wanted"),
    [
        (Routing(normalised=False), {2: SOFTMAX[2], 0: SOFTMAX[0]}),
        (Routing(), {2: 1 / (1 + np.exp(-1)), 0: 1 / (1 + np.e)}),
        (Routing("softmax_chosen", normalised=False), {2: 1 / (1 + np.exp(-1)), 0: 1 / (1 + np.e)}),
        (Routing("sigmoid", normalised=False), {2: SIGMOID[2], 0: SIGMOID[0]}),
        (
            Routing("sigmoid", factor=2.5),
            {
                2: 2.5 * SIGMOID[2] / (SIGMOID[2] + SIGMOID[0]),
                0: 2.5 * SIGMOID[0] / (SIGMOID[2] + SIGMOID[0]),
            },
        ),
    ],
)
def test_the_best_two_have_these_shares(routing: Routing, wanted: dict[int, float]) -> None:
    assert _shares(routing) == pytest.approx(wanted)
    assert list(_shares(routing)) == [2, 0]


def test_a_bias_for_choosing_is_not_in_the_shares() -> None:
    bias = np.array([0, 5, 0, 0], np.float32)
    got = _shares(Routing("sigmoid", normalised=False), choice_bias=bias)
    assert got == pytest.approx({1: SIGMOID[1], 2: SIGMOID[2]})


def test_shares_that_vanish_are_no_nan() -> None:
    _, shares = route(np.full(4, -200, np.float32), WEIGHTS, Routing("sigmoid"))
    np.testing.assert_array_equal(shares, 0)


def test_the_bounded_swiglu_is_bounded() -> None:
    """A gate of at most 7, an up within 7, both only then multiplied."""
    huge = {"gate_bias": np.full((4, 5), 1e3, np.float32), "up_bias": np.full((4, 5), -1e3)}
    weights = _only(1, **huge)
    got = mixture(X, weights, Routing(activation="swiglu_oai"))
    wanted = np.full(N_FF, 7 / (1 + np.exp(-1.702 * 7)) * -6) @ weights.down[1].T
    np.testing.assert_allclose(got, np.tile(wanted, (3, 1)), rtol=1e-4)
