"""The llama family: Llama 1–3, Mistral, Mixtral, SmolLM and whatever converts to ``llama``.

Pre-norm blocks of rotary grouped-query attention and a SwiGLU feed-forward, dense or a mixture of
experts. Biases, scales of products (quantised files of today have one a matrix) and RoPE's factors
are used where the file has them; the output matrix may be the embedding's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcellar.backends.operations import ExpertWeights, Ops, Weights
from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.memory import LayerMemory
from kvcellar.models.base import ModelSpec
from kvcellar.models.hparams import HyperParams
from kvcellar.models.rope import read_rope
from kvcellar.types import LayerSpec, RopeSpec

T = TypeVar("T")

MAX_EXPERTS_USED = 32
"""Experts a token may use: a graph has room for so many in each layer."""


@dataclass(frozen=True, slots=True)
class Linear(Generic[T]):
    """A weight and, where the file has them, a scale of the product and a bias."""

    weight: T
    scale: T | None
    bias: T | None

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
class Dense(Generic[T]):
    """A SwiGLU feed-forward."""

    gate: Linear[T]
    up: Linear[T]
    down: Linear[T]

    def __call__(self, ops: Ops[T], x: T) -> T:
        """``down(silu(gate(x)) * up(x))``."""
        hidden = ops.swiglu(self.gate.biased_first(ops, x), self.up.biased_first(ops, x))
        return self.down.biased_first(ops, hidden)


@dataclass(frozen=True, slots=True)
class Experts(Generic[T]):
    """A mixture of SwiGLU feed-forwards."""

    weights: ExpertWeights[T]

    def __call__(self, ops: Ops[T], x: T) -> T:
        """The weighted sum of the chosen experts."""
        return ops.experts(x, self.weights)


@dataclass(frozen=True, slots=True)
class Block(Generic[T]):
    """One layer's weights and sizes."""

    n_head: int
    shape: LayerSpec
    rope: RopeSpec
    scale: float
    attn_norm: T
    q: Linear[T]
    k: Linear[T]
    v: Linear[T]
    out: Linear[T]
    ffn_norm: T
    ffn: Dense[T] | Experts[T]


class Llama(Generic[T]):
    """A loaded model of the llama family.

    Raises:
        UnsupportedModel: a tensor or hyper-parameter is absent.
        ModelFileError: sizes contradict each other.
    """

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        hp = HyperParams(metadata)
        self._eps = hp.positive(".attention.layer_norm_rms_epsilon")
        n_vocab, n_embd = _embedding_shape(hp, weights)
        self._embed = weights.matrix("token_embd.weight", n_vocab, n_embd)
        self._norm = weights.vector("output_norm.weight", n_embd)
        self._output = (
            weights.matrix("output.weight", n_vocab, n_embd)
            if weights.has("output.weight")
            else self._embed
        )
        self._blocks = _Loader(hp, weights, n_embd).blocks()
        self.spec = ModelSpec(
            arch=hp.arch,
            n_vocab=n_vocab,
            n_embd=n_embd,
            n_ctx_train=hp.size(".context_length"),
            layers=tuple(LayerMemory(block.shape) for block in self._blocks),
        )

    def forward(self, ops: Ops[T]) -> T:
        """Logits of the plan that ops carries."""
        x = ops.embed(self._embed)
        last = len(self._blocks) - 1
        for i, block in enumerate(self._blocks):
            mixed = self._attend(ops, i, block, x)
            if i == last:
                x, mixed = ops.outputs(x), ops.outputs(mixed)
            x = ops.add(mixed, x)
            x = ops.add(block.ffn(ops, ops.rms_norm(x, block.ffn_norm, self._eps)), x)
        return ops.linear(ops.rms_norm(x, self._norm, self._eps), self._output)

    def _attend(self, ops: Ops[T], i: int, block: Block[T], x: T) -> T:
        h = ops.rms_norm(x, block.attn_norm, self._eps)
        n_head_kv = block.shape.n_head_kv
        q = ops.rope(ops.heads(block.q(ops, h), block.n_head), block.rope)
        k = ops.rope(ops.heads(block.k(ops, h), n_head_kv), block.rope)
        v = ops.heads(block.v(ops, h), n_head_kv)
        return block.out(ops, ops.attention(i, q, k, v, block.scale))


class _Loader(Generic[T]):
    """Reads the blocks of a file."""

    def __init__(self, hp: HyperParams, weights: Weights[T], n_embd: int) -> None:
        self._hp = hp
        self._weights = weights
        self._n_embd = n_embd
        self._n_layer = _layer_count(hp, weights)
        self._n_head = hp.per_layer(".attention.head_count", self._n_layer)
        n_head_kv = hp.per_layer(".attention.head_count_kv", self._n_layer, self._n_head[0])
        self._n_head_kv = n_head_kv
        self._n_ff = hp.per_layer(".feed_forward_length", self._n_layer)
        self._check_heads()
        self._head_dim_k = hp.size(".attention.key_length", n_embd // self._n_head[0])
        self._head_dim_v = hp.size(".attention.value_length", n_embd // self._n_head[0])
        self._rope = read_rope(hp, weights, "normal", self._head_dim_k)

    def blocks(self) -> tuple[Block[T], ...]:
        """All layers in order."""
        return tuple(self._block(i) for i in range(self._n_layer))

    def _check_heads(self) -> None:
        for i, (n, n_kv) in enumerate(zip(self._n_head, self._n_head_kv, strict=True)):
            if n % n_kv:
                raise ModelFileError(
                    f"layer {i} has {n} heads over {n_kv} K/V heads: not a whole multiple"
                )

    def _block(self, i: int) -> Block[T]:
        n_embd, n_head, n_kv = self._n_embd, self._n_head[i], self._n_head_kv[i]
        shape = LayerSpec(n_kv, self._head_dim_k, self._head_dim_v, self._rope)
        scale = self._hp.number(".attention.scale", 0.0) or self._head_dim_k**-0.5
        return Block(
            n_head=n_head,
            shape=shape,
            rope=self._rope,
            scale=scale,
            attn_norm=self._weights.vector(f"blk.{i}.attn_norm.weight", n_embd),
            q=self._linear(f"blk.{i}.attn_q", n_head * self._head_dim_k, n_embd),
            k=self._linear(f"blk.{i}.attn_k", shape.n_embd_k, n_embd),
            v=self._linear(f"blk.{i}.attn_v", shape.n_embd_v, n_embd),
            out=self._linear(f"blk.{i}.attn_output", n_embd, n_head * self._head_dim_v),
            ffn_norm=self._weights.vector(f"blk.{i}.ffn_norm.weight", n_embd),
            ffn=self._feed_forward(i),
        )

    def _feed_forward(self, i: int) -> Dense[T] | Experts[T]:
        n_embd, n_ff = self._n_embd, self._n_ff[i]
        n_expert = self._hp.count(".expert_count", 0)
        if n_expert == 0:
            return Dense(
                gate=self._linear(f"blk.{i}.ffn_gate", n_ff, n_embd),
                up=self._linear(f"blk.{i}.ffn_up", n_ff, n_embd),
                down=self._linear(f"blk.{i}.ffn_down", n_embd, n_ff),
            )
        return Experts(self._experts(i, n_expert, n_ff))

    def _experts(self, i: int, n_expert: int, n_ff: int) -> ExpertWeights[T]:
        n_used, n_embd = self._hp.size(".expert_used_count"), self._n_embd
        if n_used > n_expert:
            raise ModelFileError(f"expert_used_count={n_used}: the file has {n_expert} experts")
        if n_used > MAX_EXPERTS_USED:
            raise UnsupportedModel(f"expert_used_count={n_used}: at most {MAX_EXPERTS_USED} run")
        matrix, block = self._weights.matrix, f"blk.{i}"
        return ExpertWeights(
            router=matrix(f"{block}.ffn_gate_inp.weight", n_expert, n_embd),
            gate=matrix(f"{block}.ffn_gate_exps.weight", n_expert, n_ff, n_embd),
            up=matrix(f"{block}.ffn_up_exps.weight", n_expert, n_ff, n_embd),
            down=matrix(f"{block}.ffn_down_exps.weight", n_expert, n_embd, n_ff),
            gate_scale=self._optional(f"{block}.ffn_gate_exps.scale", n_expert),
            up_scale=self._optional(f"{block}.ffn_up_exps.scale", n_expert),
            down_scale=self._optional(f"{block}.ffn_down_exps.scale", n_expert),
            n_used=n_used,
        )

    def _linear(self, name: str, n_out: int, n_in: int) -> Linear[T]:
        return Linear(
            weight=self._weights.matrix(f"{name}.weight", n_out, n_in),
            scale=self._optional(f"{name}.scale", 1),
            bias=self._optional(f"{name}.bias", n_out),
        )

    def _optional(self, name: str, n: int) -> T | None:
        return self._weights.vector(name, n) if self._weights.has(name) else None


def _embedding_shape(hp: HyperParams, weights: Weights[T]) -> tuple[int, int]:
    shape = weights.shape("token_embd.weight")
    n_embd = hp.size(".embedding_length")
    if len(shape) != 2 or shape[1] != n_embd or shape[0] == 0:
        raise ModelFileError(f"token_embd.weight has shape {shape}, expected (n_vocab, {n_embd})")
    return shape[0], shape[1]


def _layer_count(hp: HyperParams, weights: Weights[T]) -> int:
    """``block_count``, if the last of so many layers is there: no work for an absurd number."""
    n_layer = hp.size(".block_count")
    weights.shape(f"blk.{n_layer - 1}.attn_norm.weight")
    return n_layer
