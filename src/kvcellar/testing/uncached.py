"""A plain forward pass over a whole text: no cache, no cells, no stored K and V.

What a cached decode must equal whatever was done to the cache, as long as the text is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from kvcellar.backends.numpy.ops import NumpyOps, attend, f32
from kvcellar.models.blocks import Decoder
from kvcellar.testing.plans import causal_plan
from kvcellar.types import Float32Array, LayerMemory, MemorySpec


class UncachedOps(NumpyOps):
    """Tokens attend to each other's K and V as they were just computed."""

    def __init__(self, tokens: Sequence[int], layers: Sequence[LayerMemory]) -> None:
        n = len(tokens)
        super().__init__(causal_plan(tokens, n_kv=n), MemorySpec((), None, ()), ())
        self._layers = layers

    def attention(
        self,
        layer: int,
        q: Float32Array,
        k: Float32Array,
        v: Float32Array | None,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Float32Array | None = None,
    ) -> Float32Array:
        """Each token attends to itself and to those before it, as far as the window reaches."""
        shape = self._layers[layer].attention
        assert shape is not None
        if v is None:
            assert shape.v_offset is not None
            v = k[..., shape.v_offset : shape.v_offset + shape.head_dim_v]
        i, j = np.ogrid[: len(q), : len(q)]
        hidden = (j > i) | (j <= i - (shape.window or len(q)))
        mask = np.where(hidden, np.float32(-inf), np.float32(0))
        return attend(q, k, v, mask, scale, softcap=softcap, sinks=sinks)

    def short_conv(
        self,
        layer: int,  # noqa: ARG002
        x: Float32Array,
        weight: Float32Array,
    ) -> Float32Array:
        """Each token sees itself and those before it; before the first there are zeros."""
        k = weight.shape[1]
        padded = np.concatenate([np.zeros((k - 1, x.shape[1]), np.float32), x])
        seen = np.lib.stride_tricks.sliding_window_view(padded, k, axis=0)
        return f32(np.einsum("ndk,dk->nd", seen, weight))

    def ssm_scan(
        self,
        layer: int,  # noqa: ARG002
        x: Float32Array,
        dt: Float32Array,
        a: Float32Array,
        b: Float32Array,
        c: Float32Array,
    ) -> Float32Array:
        """Each token sums what all up to it have left, by now decayed: there is no state."""
        b, c = (np.repeat(part, x.shape[1] // part.shape[1], axis=1) for part in (b, c))
        step = np.logaddexp(0, dt.astype(np.float64))
        time = np.cumsum(step, axis=0)
        left = step[:, :, np.newaxis] * x
        out = np.zeros(x.shape)
        for i in range(len(x)):
            decay = np.exp((time[i] - time[: i + 1])[:, :, np.newaxis] * a)
            shares = (decay * b[: i + 1] * c[i]).sum(axis=2)
            out[i] = np.einsum("jh,jhd->hd", shares, left[: i + 1])
        return f32(out)


def uncached_logits(model: Decoder[Float32Array], tokens: Sequence[int]) -> Float32Array:
    """Logits of every token of a text, ``[n, n_vocab]``, by a NumPy model's forward pass."""
    return model.forward(UncachedOps(tokens, model.spec.layers))
