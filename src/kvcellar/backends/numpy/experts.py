"""A mixture of experts, token by token and expert by expert."""

from __future__ import annotations

import numpy as np

from kvcellar.backends.numpy.formulas import f32, sigmoid, softmax
from kvcellar.backends.operations import ExpertWeights, Routing
from kvcellar.types import AnyArray, Float32Array

LEAST_SUM = 2.0**-14
"""Shares are divided by at least this when they are made to sum to 1, as in llama.cpp."""

OAI_ALPHA = 1.702
OAI_LIMIT = 7.0


def mixture(
    x: Float32Array, weights: ExpertWeights[Float32Array], routing: Routing
) -> Float32Array:
    """The best ``n_used`` experts of each token of ``[n, n_embd]``, weighted."""
    out = np.zeros_like(x)
    for i, row in enumerate(x):
        scores = _biased(weights.router @ row, weights.router_bias)
        chosen, shares = route(scores, weights, routing)
        for expert, share in zip(chosen.tolist(), shares, strict=True):
            out[i] += share * _expert(row, weights, expert, routing)
    return out


def route(
    scores: Float32Array, weights: ExpertWeights[Float32Array], routing: Routing
) -> tuple[AnyArray, AnyArray]:
    """Which experts a token uses, the best first, and the share of each."""
    if routing.gating == "sigmoid":
        shares = sigmoid(scores)
    else:
        shares = softmax(scores) if routing.gating == "softmax" else scores
    order = _biased(shares, weights.choice_bias)
    chosen = np.argsort(-order, kind="stable")[: weights.n_used]
    shares = shares[chosen]
    if routing.gating == "softmax_chosen":
        shares = softmax(shares)
    if routing.normalised:
        shares = shares / max(shares.sum(), LEAST_SUM)
    return chosen, shares * routing.factor


def _expert(
    x: Float32Array, weights: ExpertWeights[Float32Array], i: int, routing: Routing
) -> Float32Array:
    if weights.gate_up is not None:
        both = _scaled(weights.gate_up[i] @ x, weights.gate_up_scale, i)
        gate, up = np.split(both, 2)
    else:
        assert weights.gate is not None
        assert weights.up is not None
        gate = _scaled(weights.gate[i] @ x, weights.gate_scale, i)
        up = _scaled(weights.up[i] @ x, weights.up_scale, i)
    gate = _biased(gate, None if weights.gate_bias is None else weights.gate_bias[i])
    up = _biased(up, None if weights.up_bias is None else weights.up_bias[i])
    hidden = _swiglu_oai(gate, up) if routing.activation == "swiglu_oai" else _swiglu(gate, up)
    out = _scaled(weights.down[i] @ hidden, weights.down_scale, i)
    return _biased(out, None if weights.down_bias is None else weights.down_bias[i])


def _swiglu(gate: Float32Array, up: Float32Array) -> Float32Array:
    return f32(gate * sigmoid(gate) * up)


def _swiglu_oai(gate: Float32Array, up: Float32Array) -> Float32Array:
    """gpt-oss's: bounded, a steeper sigmoid, and one more than up."""
    gate, up = np.minimum(gate, OAI_LIMIT), np.clip(up, -OAI_LIMIT, OAI_LIMIT)
    return f32(gate * sigmoid(OAI_ALPHA * gate) * (up + 1.0))


def _scaled(x: Float32Array, scales: Float32Array | None, i: int) -> Float32Array:
    return x if scales is None else x * scales[i]


def _biased(x: AnyArray, bias: Float32Array | None) -> AnyArray:
    return x if bias is None else x + bias
