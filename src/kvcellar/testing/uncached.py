"""A plain forward pass over a whole text: no cache, no cells, no stored K and V.

What a cached decode must equal whatever was done to the cache, as long as the text is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from kvcellar.backends.numpy.formulas import attend
from kvcellar.backends.numpy.ops import NumpyOps
from kvcellar.memory import LayerMemory, MemorySpec
from kvcellar.models.base import Architecture
from kvcellar.testing.plans import causal_plan
from kvcellar.types import Float32Array


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


def uncached_logits(model: Architecture[Float32Array], tokens: Sequence[int]) -> Float32Array:
    """Logits of every token of a text, ``[n, n_vocab]``, by a NumPy model's forward pass."""
    return model.forward(UncachedOps(tokens, model.spec.layers))
