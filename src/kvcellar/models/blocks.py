"""What blocks are put together from: products, norms, feed-forwards, mixtures of experts.

Each is called with the ops and its input; what a file has beside its weights (biases, scales of
products) is applied in llama.cpp's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from kvcellar.backends.operations import ROUTING, ExpertWeights, Ops, Routing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Linear(Generic[T]):
    """A weight and, where the file has them, a scale of the product and a bias."""

    weight: T
    scale: T | None = None
    bias: T | None = None

    def __call__(self, ops: Ops[T], x: T) -> T:
        """``(x @ weight.T) * scale + bias``."""
        if self.scale is None:
            return ops.linear(x, self.weight, self.bias)
        y = ops.mul(ops.linear(x, self.weight), self.scale)
        return y if self.bias is None else ops.add(y, self.bias)

    def biased_first(self, ops: Ops[T], x: T) -> T:
        """``(x @ weight.T + bias) * scale``, the order that llama.cpp has in feed-forwards."""
        y = ops.linear(x, self.weight, self.bias)
        return y if self.scale is None else ops.mul(y, self.scale)


class Norm(Protocol[T]):
    """A normalisation of the last axis."""

    def __call__(self, ops: Ops[T], x: T) -> T:
        """The same shape."""


@dataclass(frozen=True, slots=True)
class RmsNorm(Generic[T]):
    """By the root of the mean square."""

    weight: T
    eps: float

    def __call__(self, ops: Ops[T], x: T) -> T:
        """The same shape."""
        return ops.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm(Generic[T]):
    """By mean and variance."""

    weight: T
    bias: T
    eps: float

    def __call__(self, ops: Ops[T], x: T) -> T:
        """The same shape."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class FeedForward(Protocol[T]):
    """What a block does to each token by itself."""

    def __call__(self, ops: Ops[T], x: T) -> T:
        """``[n, n_embd]`` to the same shape."""


@dataclass(frozen=True, slots=True)
class Dense(Generic[T]):
    """A gated feed-forward: SwiGLU, or GeGLU."""

    gate: Linear[T]
    up: Linear[T]
    down: Linear[T]
    activation: Literal["swiglu", "geglu"] = "swiglu"

    def __call__(self, ops: Ops[T], x: T) -> T:
        """``down(act(gate(x)) * up(x))``."""
        gate, up = self.gate.biased_first(ops, x), self.up.biased_first(ops, x)
        hidden = ops.swiglu(gate, up) if self.activation == "swiglu" else ops.geglu(gate, up)
        return self.down.biased_first(ops, hidden)


@dataclass(frozen=True, slots=True)
class FusedDense(Generic[T]):
    """A SwiGLU feed-forward whose gate rows lie before its up rows in one matrix."""

    gate_up: Linear[T]
    down: Linear[T]
    n_ff: int

    def __call__(self, ops: Ops[T], x: T) -> T:
        """``down(silu(gate(x)) * up(x))``."""
        gate, up = ops.split(self.gate_up.biased_first(ops, x), (self.n_ff, self.n_ff))
        return self.down.biased_first(ops, ops.swiglu(gate, up))


@dataclass(frozen=True, slots=True)
class Plain(Generic[T]):
    """A feed-forward without a gate."""

    up: Linear[T]
    down: Linear[T]

    def __call__(self, ops: Ops[T], x: T) -> T:
        """``down(gelu(up(x)))``."""
        return self.down.biased_first(ops, ops.gelu(self.up.biased_first(ops, x)))


@dataclass(frozen=True, slots=True)
class Experts(Generic[T]):
    """A mixture of gated feed-forwards, beside one that every token goes through if there is."""

    weights: ExpertWeights[T]
    routing: Routing = ROUTING
    shared: Dense[T] | None = None

    def __call__(self, ops: Ops[T], x: T) -> T:
        """The weighted sum of the chosen experts, and what the shared one gives."""
        y = ops.experts(x, self.weights, self.routing)
        return y if self.shared is None else ops.add(y, self.shared(ops, x))
