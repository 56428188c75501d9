"""A stack of pre-norm blocks between an embedding and an output matrix: what all families are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvcellar.backends.operations import Ops
from kvcellar.models.base import ModelSpec
from kvcellar.models.blocks import FeedForward, Linear, Norm
from kvcellar.types import LayerMemory

T = TypeVar("T")


class Mixer(Protocol[T]):
    """The part of a block in which a token sees others."""

    @property
    def memory(self) -> LayerMemory:
        """What it keeps between decodes."""

    def __call__(self, ops: Ops[T], layer: int, x: T) -> T:
        """``[n, n_embd]`` to the same shape."""


@dataclass(frozen=True, slots=True)
class Block(Generic[T]):
    """One layer; the norms called post are of what a part gives, before it is added."""

    mixer_norm: Norm[T]
    mixer: Mixer[T]
    ffn_norm: Norm[T] | None = None
    ffn: FeedForward[T] | None = None  # None: the mixer is all there is
    mixer_post_norm: Norm[T] | None = None
    ffn_post_norm: Norm[T] | None = None


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


class Decoder(Generic[T]):
    """Embedding, blocks, head. Implements :class:`~kvcellar.models.base.Architecture`.

    Attributes:
        spec: its shape.
    """

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
            x = _applied(ops, i, block, x, i == last)
        return self._head(ops, x)


def _applied(ops: Ops[T], layer: int, block: Block[T], x: T, is_last: bool) -> T:
    """The output of a block; behind the last attention only rows whose logits are wanted go on."""
    mixed = block.mixer(ops, layer, block.mixer_norm(ops, x))
    if is_last:
        x, mixed = ops.outputs(x), ops.outputs(mixed)
    x = ops.add(_normed(ops, block.mixer_post_norm, mixed), x)
    if block.ffn is None:
        return x
    y = block.ffn(ops, _normed(ops, block.ffn_norm, x))
    return ops.add(_normed(ops, block.ffn_post_norm, y), x)


def _normed(ops: Ops[T], norm: Norm[T] | None, x: T) -> T:
    return x if norm is None else norm(ops, x)
