"""Latent attention (MLA): keys and values of all heads are kept as one compressed row.

A cell holds one head: first the part that is rotated, then the compressed rest, which is V too.
Each query is carried into the compressed space (``k_b``), and what attention gives is carried out
of it (``v_b``), so that nothing is ever expanded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcellar.backends.operations import Ops
from kvcellar.models.blocks import Linear, Norm
from kvcellar.types import LayerMemory, LayerSpec, RopeSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LowRank(Generic[T]):
    """A product in two steps with a norm between them."""

    down: Linear[T]
    norm: Norm[T]
    up: Linear[T]

    def __call__(self, ops: Ops[T], x: T) -> T:
        """``up(norm(down(x)))``."""
        return self.up(ops, self.norm(ops, self.down(ops, x)))


@dataclass(frozen=True, slots=True)
class LatentAttention(Generic[T]):
    """One layer's attention.

    Attributes:
        n_head: heads of q, which share what is kept.
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
        plain, turned = ops.split(ops.heads(self.q(ops, x), self.n_head), self.sizes)
        inside = ops.linear_heads(plain, self.k_b)
        q = ops.concat([ops.rope(turned, self.rope), inside])
        compressed, k_turned = ops.split(self.kv(ops, x), (self.rank, self.sizes[1]))
        row = ops.heads(self.kv_norm(ops, compressed), 1)
        k = ops.concat([ops.rope(ops.heads(k_turned, 1), self.rope), row])
        mixed = ops.heads(ops.attention(layer, q, k, None, self.scale), self.n_head)
        return self.out(ops, ops.merge(ops.linear_heads(mixed, self.v_b)))
