"""A model: a stack of pre-norm blocks between an embedding and an output matrix; its parts.

Parts are products, norms, feed-forwards, mixtures of experts and mixers, each called with the ops
and its input. What a file has beside its weights (biases, scales of products) is applied in
llama.cpp's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

from kvcellar.backends.operations import ROUTING, ExpertWeights, Ops, Routing
from kvcellar.types import LayerMemory, LayerSpec

T = TypeVar("T")

Norm = Callable[[Ops[T], T], T]
"""A normalisation of the last axis; the same shape."""
FeedForward = Callable[[Ops[T], T], T]
"""A block's function of each token by itself: ``[n, n_embd]`` to the same shape."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The numbers that caches and callers need of a model.

    ``n_positions`` is how many positions a model has learned: a token must stand below it. None
    where positions are computed.
    """

    arch: str
    n_vocab: int
    n_embd: int
    n_ctx_train: int
    layers: tuple[LayerMemory, ...]
    n_positions: int | None = None

    @property
    def attention_layers(self) -> tuple[LayerSpec, ...]:
        """K and V of the layers that attend."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)


class Decoder(Generic[T]):
    """A loaded model: embedding, blocks, head; every architecture is one.

    Attributes:
        spec: its shape.
        unused: tensors that files of the architecture may have and that change no logits, ``*`` for
            the number of a layer. Files with others that were not read are refused.
    """

    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Embedding[T],
        blocks: Iterable[Block[T]],
        head: Head[T],
    ) -> None:
        self._embedding = embedding
        self._blocks = tuple(blocks)
        self._head = head
        self.spec = spec

    def forward(self, ops: Ops[T]) -> T:
        """Logits of the plan that ops carries."""
        x = self._embedding(ops)
        last = len(self._blocks) - 1
        for i, block in enumerate(self._blocks):
            x = block(ops, i, x, is_last=i == last)
        return self._head(ops, x)


def _normed(ops: Ops[T], norm: Norm[T] | None, x: T) -> T:
    return x if norm is None else norm(ops, x)


@dataclass(frozen=True, slots=True)
class Block(Generic[T]):
    """One layer; the norms called post are of what a part gives, before it is added."""

    mixer_norm: Norm[T]
    mixer: Mixer[T]
    ffn_norm: Norm[T] | None = None
    ffn: FeedForward[T] | None = None  # None: the mixer is all there is
    mixer_post_norm: Norm[T] | None = None
    ffn_post_norm: Norm[T] | None = None

    def __call__(self, ops: Ops[T], layer: int, x: T, *, is_last: bool) -> T:
        """``[n, n_embd]`` to the same; of the last layer only rows whose logits are wanted."""
        mixed = self.mixer(ops, layer, self.mixer_norm(ops, x))
        if is_last:
            x, mixed = ops.outputs(x), ops.outputs(mixed)
        x = ops.add(_normed(ops, self.mixer_post_norm, mixed), x)
        if self.ffn is None:
            return x
        y = self.ffn(ops, _normed(ops, self.ffn_norm, x))
        return ops.add(_normed(ops, self.ffn_post_norm, y), x)


class Mixer(Protocol[T]):
    """The part of a block in which a token sees others: attention, a state, or both."""

    @property
    def memory(self) -> LayerMemory:
        """What it keeps between decodes."""

    def __call__(self, ops: Ops[T], layer: int, x: T) -> T:
        """``[n, n_embd]`` to the same shape."""


@dataclass(frozen=True, slots=True)
class Embedding(Generic[T]):
    """The first layer's input.

    Attributes:
        table: a row a token.
        scale: what rows are multiplied by.
        scales_given: whether embeddings that come in place of tokens are multiplied too.
        positions: learned, a row a position; added.
    """

    table: T
    scale: float = 1.0
    scales_given: bool = True
    positions: T | None = None

    def __call__(self, ops: Ops[T]) -> T:
        """``[n, n_embd]``."""
        x = ops.embed(self.table)
        if self.scale != 1.0 and (self.scales_given or ops.plan.micro.tokens is not None):
            x = ops.scale(x, self.scale)
        return x if self.positions is None else ops.add(x, ops.embed_positions(self.positions))


@dataclass(frozen=True, slots=True)
class Head(Generic[T]):
    """From the last layer's output to logits, which ``softcap`` bends to stay within it if set."""

    norm: Norm[T]
    output: Linear[T]
    softcap: float = 0.0

    def __call__(self, ops: Ops[T], x: T) -> T:
        """``[n, n_vocab]``."""
        logits = self.output(ops, self.norm(ops, x))
        return ops.softcap(logits, self.softcap) if self.softcap else logits


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
