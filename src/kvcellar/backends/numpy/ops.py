"""The operations of model files, each computed at once and in the plainest way; tensors are f32."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from kvcellar.backends.base import KVStore
from kvcellar.backends.numpy.rope import magnitude, rotated
from kvcellar.backends.numpy.states import NumpyStateStore, short_conv, ssm_scan
from kvcellar.backends.operations import ExpertWeights, Forward
from kvcellar.memory import MemorySpec
from kvcellar.plan import Plan
from kvcellar.types import AnyArray, Float32Array, RopeSpec


class NumpyOps:
    """Computes a plan over any store. Implements ``Ops[Float32Array]``.

    Attributes:
        plan: the microbatch that is computed.
    """

    def __init__(
        self,
        plan: Plan,
        spec: MemorySpec,
        groups: Sequence[KVStore],
        states: NumpyStateStore | None = None,
    ) -> None:
        self.plan = plan
        self._spec = spec
        self._groups = groups
        self._states = states

    def embed(self, table: Float32Array) -> Float32Array:
        """Rows of the table for the plan's tokens, or its embeddings."""
        micro = self.plan.micro
        if micro.embeddings is not None:
            return micro.embeddings
        return f32(table[micro.tokens])

    def linear(
        self, x: Float32Array, weight: Float32Array, bias: Float32Array | None = None
    ) -> Float32Array:
        """``x @ weight.T + bias``."""
        y = f32(x @ weight.T)
        return y if bias is None else y + bias

    def rms_norm(self, x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
        """Root-mean-square normalisation over the last axis, times weight."""
        square = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
        return f32(x / np.sqrt(square + eps) * weight)

    def heads(self, x: Float32Array, n_head: int) -> Float32Array:
        """``[n, n_head * d]`` to ``[n, n_head, d]``."""
        return x.reshape(len(x), n_head, x.shape[1] // n_head)

    def rope(self, x: Float32Array, spec: RopeSpec) -> Float32Array:
        """Rotate ``[n, n_head, d]`` by the plan's positions."""
        return rotated(x, self.plan.micro.positions, spec, magnitude(spec))

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
        """Store k and v in the plan's cells, then attend over those that any token may see."""
        place = self._spec.places[layer]
        store, plan, layer = self._groups[place.group], self.plan.groups[place.group], place.index
        assert v is not None
        store.write(layer, plan.cells, k.reshape(len(k), -1), v.reshape(len(v), -1))
        seen = np.flatnonzero((plan.mask > -inf).any(axis=0))
        keys = store.read(layer, "k", seen).reshape(len(seen), *k.shape[1:])
        values = store.read(layer, "v", seen).reshape(len(seen), *v.shape[1:])
        return attend(q, keys, values, plan.mask[:, seen], scale)

    def add(self, a: Float32Array, b: Float32Array) -> Float32Array:
        """Elementwise sum."""
        return a + b

    def mul(self, a: Float32Array, b: Float32Array) -> Float32Array:
        """Elementwise product."""
        return a * b

    def scale(self, x: Float32Array, factor: float) -> Float32Array:
        """Multiply by a number."""
        return f32(x * factor)

    def swiglu(self, gate: Float32Array, up: Float32Array) -> Float32Array:
        """``silu(gate) * up``; the logistic function written so that nothing overflows."""
        return f32(gate * (0.5 + 0.5 * np.tanh(0.5 * gate)) * up)

    def experts(self, x: Float32Array, weights: ExpertWeights[Float32Array]) -> Float32Array:
        """The best ``n_used`` SwiGLU experts of each token, weighted."""
        shares = softmax(self.linear(x, weights.router))
        out = np.zeros_like(x)
        for i, row in enumerate(x):
            chosen = np.argsort(-shares[i], kind="stable")[: weights.n_used]
            for expert in chosen:
                part = shares[i, expert] / shares[i, chosen].sum()
                out[i] += part * self._expert(row, weights, int(expert))
        return out

    def short_conv(self, layer: int, x: Float32Array, weight: Float32Array) -> Float32Array:
        """Causal convolution of each channel along each sequence."""
        assert self._states is not None
        assert self.plan.states is not None
        rows = self._states.conv(self._spec.places[layer].state)
        return short_conv(self.plan.states, rows, x, weight)

    def ssm_scan(
        self,
        layer: int,
        x: Float32Array,
        dt: Float32Array,
        a: Float32Array,
        b: Float32Array,
        c: Float32Array,
    ) -> Float32Array:
        """Mamba's recurrence."""
        assert self._states is not None
        assert self.plan.states is not None
        rows = self._states.ssm(self._spec.places[layer].state)
        return ssm_scan(self.plan.states, rows, x, dt, a, b, c)

    def outputs(self, x: Float32Array) -> Float32Array:
        """The rows whose logits are wanted."""
        return x[self.plan.micro.outputs]

    def _expert(
        self, x: Float32Array, weights: ExpertWeights[Float32Array], i: int
    ) -> Float32Array:
        assert weights.gate is not None
        assert weights.up is not None
        gate = _scaled(weights.gate[i] @ x, weights.gate_scale, i)
        up = _scaled(weights.up[i] @ x, weights.up_scale, i)
        return _scaled(weights.down[i] @ self.swiglu(gate, up), weights.down_scale, i)


class NumpyExecutor:
    """Runs a model's forward pass over any store. Implements ``Executor``."""

    lists_up_to = ()

    def __init__(
        self,
        spec: MemorySpec,
        groups: Sequence[KVStore],
        forward: Forward[Float32Array],
        states: NumpyStateStore | None = None,
    ) -> None:
        self._spec = spec
        self._groups = groups
        self._forward = forward
        self._states = states

    def run(self, plan: Plan) -> Float32Array:
        """Compute a plan; see ``Executor.run``. What is not finite shows in the logits."""
        with np.errstate(all="ignore"):
            return self._forward(NumpyOps(plan, self._spec, self._groups, self._states))

    def close(self) -> None:
        """Nothing to give back."""


def attend(
    q: Float32Array, keys: Float32Array, values: Float32Array, mask: AnyArray, scale: float
) -> Float32Array:
    """Softmax attention: q ``[n, n_head, d]`` over ``[n_kv, n_head_kv, d]`` with ``[n, n_kv]``.

    Neighbouring heads of q share a head of K and V.
    """
    n_group = q.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, n_group, axis=1), np.repeat(values, n_group, axis=1)
    scores = scale * np.einsum("ihd,jhd->hij", q, keys) + mask
    out = np.einsum("hij,jhd->ihd", softmax(scores), values)
    return f32(out.reshape(len(q), -1))


def softmax(x: AnyArray) -> AnyArray:
    """Shares over the last axis that sum to 1."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: AnyArray = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def f32(x: AnyArray) -> Float32Array:
    """The same numbers as f32."""
    return x.astype(np.float32, copy=False)


def _scaled(x: Float32Array, scales: Float32Array | None, i: int) -> Float32Array:
    return x if scales is None else x * scales[i]
