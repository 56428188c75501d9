"""The operations that need neither a plan nor a store: one formula each, tensors are f32."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi, sqrt

import numpy as np

from kvcellar.backends.numpy.experts import mixture
from kvcellar.backends.numpy.formulas import f32, sigmoid
from kvcellar.backends.operations import ROUTING, ExpertWeights, Routing
from kvcellar.types import Float32Array


class PlainOps:
    """That part of ``Ops[Float32Array]`` which only computes."""

    def linear(
        self, x: Float32Array, weight: Float32Array, bias: Float32Array | None = None
    ) -> Float32Array:
        """``x @ weight.T + bias``."""
        y = f32(x @ weight.T)
        return y if bias is None else y + bias

    def linear_heads(self, x: Float32Array, weight: Float32Array) -> Float32Array:
        """A product a head: ``[n, n_head, n_in]`` with ``[n_head, n_out, n_in]``."""
        return f32(np.einsum("nhi,hoi->nho", x, weight))

    def experts(
        self, x: Float32Array, weights: ExpertWeights[Float32Array], routing: Routing = ROUTING
    ) -> Float32Array:
        """The best ``n_used`` experts of each token, weighted."""
        return mixture(x, weights, routing)

    # -- norms and activations

    def rms_norm(self, x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
        """Root-mean-square normalisation over the last axis, times weight."""
        square = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
        return f32(x / np.sqrt(square + eps) * weight)

    def layer_norm(
        self, x: Float32Array, weight: Float32Array, bias: Float32Array, eps: float
    ) -> Float32Array:
        """Mean and variance normalisation over the last axis, times weight, plus bias."""
        wide = x.astype(np.float64)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        variance = np.mean(centred**2, axis=-1, keepdims=True)
        return f32(centred / np.sqrt(variance + eps) * weight + bias)

    def silu(self, x: Float32Array) -> Float32Array:
        """``x * sigmoid(x)``."""
        return f32(x * sigmoid(x))

    def gelu(self, x: Float32Array) -> Float32Array:
        """GELU by its tanh formula."""
        return f32(0.5 * x * (1.0 + np.tanh(sqrt(2.0 / pi) * (x + 0.044715 * x**3))))

    def swiglu(self, gate: Float32Array, up: Float32Array) -> Float32Array:
        """``silu(gate) * up``."""
        return self.silu(gate) * up

    def geglu(self, gate: Float32Array, up: Float32Array) -> Float32Array:
        """``gelu(gate) * up``."""
        return self.gelu(gate) * up

    def softcap(self, x: Float32Array, cap: float) -> Float32Array:
        """``cap * tanh(x / cap)``."""
        return f32(cap * np.tanh(x / cap))

    # -- sums, products and shapes

    def add(self, a: Float32Array, b: Float32Array) -> Float32Array:
        """Elementwise sum."""
        return a + b

    def mul(self, a: Float32Array, b: Float32Array) -> Float32Array:
        """Elementwise product."""
        return a * b

    def scale(self, x: Float32Array, factor: float) -> Float32Array:
        """Multiply by a number."""
        return f32(x * factor)

    def heads(self, x: Float32Array, n_head: int) -> Float32Array:
        """``[n, n_head * d]`` to ``[n, n_head, d]``."""
        return x.reshape(len(x), n_head, x.shape[1] // n_head)

    def merge(self, x: Float32Array) -> Float32Array:
        """``[n, n_head, d]`` to ``[n, n_head * d]``."""
        return x.reshape(len(x), x.shape[1] * x.shape[2])

    def split(self, x: Float32Array, sizes: Sequence[int]) -> list[Float32Array]:
        """Pieces of the last axis, of these sizes."""
        assert sum(sizes) == x.shape[-1]
        return np.split(x, np.cumsum(sizes)[:-1], axis=-1)

    def concat(self, parts: Sequence[Float32Array]) -> Float32Array:
        """Put side by side along the last axis."""
        return np.concatenate(parts, axis=-1)
