"""Attention and the functions that several operations share, as the formulas say."""

from __future__ import annotations

import numpy as np

from kvcellar.types import AnyArray, Float32Array


def attend(
    q: Float32Array,
    keys: Float32Array,
    values: Float32Array,
    mask: AnyArray,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: Float32Array | None = None,
) -> Float32Array:
    """Softmax attention: q ``[n, n_head, d]`` over ``[n_kv, n_head_kv, d]`` with ``[n, n_kv]``.

    Neighbouring heads of q share a head of K and V. A sink takes its share of the weights and gives
    nothing.
    """
    n_group = q.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, n_group, axis=1), np.repeat(values, n_group, axis=1)
    scores = scale * np.einsum("ihd,jhd->hij", q, keys)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = scores + mask
    if sinks is not None:
        column = np.broadcast_to(sinks[:, np.newaxis, np.newaxis], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, column], axis=2)
    weights = softmax(scores)[:, :, : len(keys)]
    out = np.einsum("hij,jhd->ihd", weights, values)
    return f32(out.reshape(len(q), -1))


def softmax(x: AnyArray) -> AnyArray:
    """Shares over the last axis that sum to 1."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: AnyArray = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def sigmoid(x: AnyArray) -> AnyArray:
    """The logistic function, written so that nothing overflows."""
    share: AnyArray = 0.5 + 0.5 * np.tanh(0.5 * x)
    return share


def f32(x: AnyArray) -> Float32Array:
    """The same numbers as f32."""
    return x.astype(np.float32, copy=False)
