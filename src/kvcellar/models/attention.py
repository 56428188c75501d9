"""Attention as most families have it: rotary, grouped, perhaps windowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvcellar.backends.operations import Ops
from kvcellar.models.blocks import Linear, Norm
from kvcellar.types import LayerMemory, LayerSpec

T = TypeVar("T")


class Projections(Protocol[T]):
    """What makes queries, keys and values of a block's input."""

    def __call__(self, ops: Ops[T], x: T) -> Sequence[T]:
        """q, k and v, their heads side by side."""


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
class Attention(Generic[T]):
    """One layer's attention.

    Attributes:
        shape: what it keeps; how K is rotated, and the window.
        n_head: heads of q.
        scale: what scores are multiplied by.
        project: q, k and v.
        out: from the heads back to n_embd.
        q_norm: of each head of q, before it is rotated.
        k_norm: likewise of k.
        softcap: scores are bent to stay within it; 0: not.
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
