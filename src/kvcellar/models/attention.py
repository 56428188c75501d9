"""Attention as most families have it (rotary, grouped, perhaps windowed), and latent attention.

Latent attention (MLA) stores keys and values of all heads as one compressed row. A cell holds one
head: first the part that is rotated, then the compressed rest, which is V too. Each query is
projected into the compressed space (``k_b``), and what attention gives out of it (``v_b``), so that
nothing is ever expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcellar.backends.operations import Ops
from kvcellar.models.blocks import Linear, Norm
from kvcellar.types import LayerMemory, LayerSpec, RopeSpec

T = TypeVar("T")

Projections = Callable[[Ops[T], T], Sequence[T]]
"""From a block's input to q, k and v, their heads side by side."""


@dataclass(frozen=True, slots=True)
class Attention(Generic[T]):
    """One layer's attention.

    Attributes:
        shape: what it stores of a cell; how K is rotated, and the window.
        n_head: heads of q.
        scale: what scores are multiplied by.
        project: q, k and v.
        out: from the heads back to n_embd.
        q_norm: of each head of q, before it is rotated.
        k_norm: likewise of k.
        softcap: scores are capped softly at it; 0: not.
        sinks: a score a head of a cell that gives nothing.
    """

    shape: LayerSpec
    n_head: int
    scale: float
    project: Projections[T]
    out: Linear[T]
    q_norm: Norm[T] | None = None
    k_norm: Norm[T] | None = None
    softcap: float = 0.0
    sinks: T | None = None

    @property
    def memory(self) -> LayerMemory:
        """What the layer keeps."""
        return LayerMemory(self.shape)

    def __call__(self, ops: Ops[T], layer: int, x: T) -> T:
        """``[n, n_embd]`` to the same shape; K and V are stored on the way."""
        flat_q, flat_k, flat_v = self.project(ops, x)
        q = self._prepared(ops, flat_q, self.n_head, self.q_norm)
        k = self._prepared(ops, flat_k, self.shape.n_head_kv, self.k_norm)
        v = ops.heads(flat_v, self.shape.n_head_kv)
        mixed = ops.attention(layer, q, k, v, self.scale, softcap=self.softcap, sinks=self.sinks)
        return self.out(ops, mixed)

    def _prepared(self, ops: Ops[T], flat: T, n_head: int, norm: Norm[T] | None) -> T:
        x = ops.heads(flat, n_head)
        if norm is not None:
            x = norm(ops, x)
        return x if self.shape.rope is None else ops.rope(x, self.shape.rope)


@dataclass(frozen=True, slots=True)
class Separate(Generic[T]):
    """A matrix each."""

    q: Linear[T]
    k: Linear[T]
    v: Linear[T]

    def __call__(self, ops: Ops[T], x: T) -> Sequence[T]:
        """q, k and v."""
        return self.q(ops, x), self.k(ops, x), self.v(ops, x)


@dataclass(frozen=True, slots=True)
class Fused(Generic[T]):
    """One matrix: the rows of q, then those of k, then those of v."""

    qkv: Linear[T]
    sizes: tuple[int, int, int]

    def __call__(self, ops: Ops[T], x: T) -> Sequence[T]:
        """q, k and v."""
        return ops.split(self.qkv(ops, x), self.sizes)


@dataclass(frozen=True, slots=True)
class LatentAttention(Generic[T]):
    """One layer's latent attention.

    Attributes:
        n_head: heads of q, which share what is stored.
        sizes: of a head of q: the part that is not rotated, and the one that is.
        rank: values of a compressed row.
        rope: how the second part is rotated.
        scale: what scores are multiplied by.
        q: heads side by side.
        kv: the compressed row, then the part of k that is rotated.
        kv_norm: of the compressed row.
        k_b: ``[n_head, rank, sizes[0]]``.
        v_b: ``[n_head, n_v, rank]``.
        out: from the heads back to n_embd.
    """

    n_head: int
    sizes: tuple[int, int]
    rank: int
    rope: RopeSpec
    scale: float
    q: Linear[T] | LowRank[T]
    kv: Linear[T]
    kv_norm: Norm[T]
    k_b: T
    v_b: T
    out: Linear[T]

    @property
    def memory(self) -> LayerMemory:
        """One head a cell, whose V is its K behind what is rotated."""
        n_rot = self.sizes[1]
        return LayerMemory(LayerSpec(1, n_rot + self.rank, self.rank, self.rope, v_offset=n_rot))

    def __call__(self, ops: Ops[T], layer: int, x: T) -> T:
        """``[n, n_embd]`` to the same shape; the row is stored on the way."""
        plain, rotary = ops.split(ops.heads(self.q(ops, x), self.n_head), self.sizes)
        inside = ops.linear_heads(plain, self.k_b)
        q = ops.concat([ops.rope(rotary, self.rope), inside])
        compressed, k_rotary = ops.split(self.kv(ops, x), (self.rank, self.sizes[1]))
        row = ops.heads(self.kv_norm(ops, compressed), 1)
        k = ops.concat([ops.rope(ops.heads(k_rotary, 1), self.rope), row])
        mixed = ops.heads(ops.attention(layer, q, k, None, self.scale), self.n_head)
        return self.out(ops, ops.merge(ops.linear_heads(mixed, self.v_b)))


@dataclass(frozen=True, slots=True)
class LowRank(Generic[T]):
    """A product in two steps with a norm between them."""

    down: Linear[T]
    norm: Norm[T]
    up: Linear[T]

    def __call__(self, ops: Ops[T], x: T) -> T:
        """``up(norm(down(x)))``."""
        return self.up(ops, self.norm(ops, self.down(ops, x)))
