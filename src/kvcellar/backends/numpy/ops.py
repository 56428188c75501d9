"""The operations of model files, each computed at once and in the plainest way; tensors are f32.

This is the oracle of the other backend: every operation is the formula that its docstring says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, log, pi, sqrt

import numpy as np
import numpy.typing as npt

from kvcellar.backends.base import GraphTimes, KVStore
from kvcellar.backends.checks import check_learned, check_states
from kvcellar.backends.numpy.states import NumpyStateStore, short_conv, ssm_scan
from kvcellar.backends.operations import ROUTING, ExpertWeights, Forward, Routing
from kvcellar.errors import ClosedError, NotSupported
from kvcellar.plan import Plan, StatePlan
from kvcellar.types import AnyArray, Float32Array, Int32Array, MemorySpec, RopeSpec

Float64Array = npt.NDArray[np.float64]


class NumpyExecutor:
    """Runs a model's forward pass over any store. Implements ``Executor``."""

    takes_lists = ()
    compile_seconds = 0.0

    def __init__(
        self,
        spec: MemorySpec,
        groups: Sequence[KVStore],
        forward: Forward[Float32Array],
        states: NumpyStateStore | None = None,
    ) -> None:
        self._spec = spec
        self._groups = groups
        self._forward: Forward[Float32Array] | None = forward
        self._states = states

    def run(self, plan: Plan) -> Float32Array:
        """Compute a plan; see ``Executor.run``. What is not finite shows in the logits."""
        if self._forward is None:
            raise ClosedError("the weights are closed with their context")
        with np.errstate(all="ignore"):
            return self._forward(NumpyOps(plan, self._spec, self._groups, self._states))

    def watch(self, watcher: Callable[[GraphTimes], None]) -> None:  # noqa: ARG002
        """Refuse: NumPy has no graphs; see ``Executor.watch``."""
        raise NotSupported("this backend cannot be profiled: use backend='ggml'")

    def close(self) -> None:
        """Refer to the weights no more: there are no graphs and buffers."""
        self._forward = None


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

    def embed_positions(self, table: Float32Array) -> Float32Array:
        """Rows of the table for the plan's positions."""
        positions = self.plan.micro.positions
        check_learned(positions, len(table))
        return f32(table[positions])

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
        store, plan, index = self._groups[place.group], self.plan.groups[place.group], place.index
        shape = store.spec.layers[index]
        assert (v is None) == (shape.v_offset is not None)
        rows = np.empty((len(k), 0), np.float32) if v is None else v.reshape(len(v), -1)
        store.write(index, plan.cells, k.reshape(len(k), -1), rows)
        seen = np.flatnonzero((plan.mask > -inf).any(axis=0))
        keys = store.read(index, "k", seen).reshape(len(seen), *k.shape[1:])
        if shape.v_offset is None:
            values = store.read(index, "v", seen).reshape(len(seen), -1, shape.head_dim_v)
        else:
            values = keys[..., shape.v_offset : shape.v_offset + shape.head_dim_v]
        mask = plan.mask[:, seen]
        return attend(q, keys, values, mask, scale, softcap=softcap, sinks=sinks)

    # -- products

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

    # -- recurrent layers

    def short_conv(self, layer: int, x: Float32Array, weight: Float32Array) -> Float32Array:
        """Causal convolution of each channel along each sequence."""
        states, plan = self._recurrent()
        rows = states.conv(self._spec.places[layer].state)
        y = short_conv(plan, rows, x, weight)
        check_states(rows[plan.targets], layer)
        return y

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
        states, plan = self._recurrent()
        rows = states.ssm(self._spec.places[layer].state)
        y = ssm_scan(plan, rows, x, dt, a, b, c)
        check_states(rows[plan.targets], layer)
        return y

    def outputs(self, x: Float32Array) -> Float32Array:
        """The rows whose logits are wanted."""
        return x[self.plan.micro.outputs]

    def _recurrent(self) -> tuple[NumpyStateStore, StatePlan]:
        if self._states is None or self.plan.states is None:
            raise NotSupported("a recurrent layer, but a plan or a memory without states")
        return self._states, self.plan.states


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


def rotated(
    x: Float32Array, positions: Int32Array, rope: RopeSpec, scale: float = 1.0
) -> Float32Array:
    """Heads ``[n, n_head, d]`` rotated by n positions and scaled; the rest behind n_rot is kept.

    Each pair of values is rotated by ``position * frequency``, in f64. With YaRN a pair's frequency
    is between the stretched one and the original; pairs that turn often within the original context
    keep theirs.
    """
    angles = positions[:, np.newaxis] * frequencies(rope)  # [n, n_rot / 2]
    cos = scale * np.cos(angles)[:, np.newaxis]
    sin = scale * np.sin(angles)[:, np.newaxis]
    first, second = _pairs(rope)
    a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
    out: Float32Array = np.array(x, np.float32)
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def frequencies(rope: RopeSpec) -> Float64Array:
    """The angle by which each pair turns a position, ``[n_rot / 2]``."""
    pairs = np.arange(rope.n_rot // 2)
    original = np.power(float(rope.freq_base), -2.0 * pairs / rope.n_rot)
    if rope.factors is not None:
        original = original / np.asarray(rope.factors, np.float64)
    kept = _kept(rope)
    blended: Float64Array = original * (rope.freq_scale * (1.0 - kept) + kept)
    return blended


def magnitude(rope: RopeSpec) -> float:
    """What YaRN and the model scale rotated heads by when they are computed."""
    if rope.ext_factor == 0.0:
        return rope.attn_factor
    return rope.attn_factor * (1.0 + 0.1 * log(1.0 / rope.freq_scale))


def _kept(rope: RopeSpec) -> Float64Array:
    """How much of each pair's original frequency YaRN keeps."""
    pairs = np.arange(rope.n_rot // 2)
    if rope.ext_factor == 0.0:
        return np.zeros(len(pairs))
    with np.errstate(all="ignore"):  # absurd settings give NaN, and that shows in the logits
        low = np.maximum(0, np.floor(_pair_of(rope.beta_fast, rope)))
        high = np.minimum(rope.n_rot - 1, np.ceil(_pair_of(rope.beta_slow, rope)))
        ramp = np.clip((pairs - low) / np.maximum(0.001, high - low), 0.0, 1.0)
        kept: Float64Array = rope.ext_factor * (1.0 - ramp)
    return kept


def _pair_of(turns: float, rope: RopeSpec) -> np.float64:
    """Which pair, not a whole number, turns so often within the original context."""
    wave = np.float64(rope.n_ctx_orig) / (turns * 2.0 * pi)
    pair: np.float64 = rope.n_rot * np.log(wave) / (2.0 * np.log(np.float64(rope.freq_base)))
    return pair


def _pairs(rope: RopeSpec) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the first and the second value of each pair are."""
    half = np.arange(rope.n_rot // 2)
    return (2 * half, 2 * half + 1) if rope.mode == "normal" else (half, half + rope.n_rot // 2)


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
