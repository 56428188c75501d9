"""Falcon-H1: in every layer attention and Mamba 2's mixer side by side, then a feed-forward.

The multipliers that the family is known for are part of a file's weights. The norm inside the mixer
is there in some sizes only; that of the feed-forward may be called without ``.weight``. As in
llama.cpp, frequency factors and the bias of attention's output are not used where a file has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from kvcellar.backends.operations import Ops, Weights
from kvcellar.models.attention import Attention
from kvcellar.models.blocks import Block, Decoder, Embedding, RmsNorm
from kvcellar.models.reader import Reader
from kvcellar.models.ssm import Mamba2, read_mamba2
from kvcellar.types import LayerMemory, RopeSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SideBySide(Generic[T]):
    """The sum of what both give for the same input."""

    attention: Attention[T]
    mamba: Mamba2[T]

    @property
    def memory(self) -> LayerMemory:
        """What the layer keeps: both kinds."""
        return LayerMemory(self.attention.shape, self.mamba.state)

    def __call__(self, ops: Ops[T], layer: int, x: T) -> T:
        """``[n, n_embd]`` to the same shape."""
        return ops.add(self.attention(ops, layer, x), self.mamba(ops, layer, x))


class FalconH1(Decoder[T]):
    """A loaded model of the family; raises as :class:`~kvcellar.models.llama.Llama` does."""

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        file = Reader(metadata, weights)
        file.hp.absent(".attention.sliding_window", ".expert_count")
        rope = replace(file.rope("neox"), factors=None)
        blocks = [_block(file, i, rope) for i in file.layers]
        super().__init__(file.spec(blocks), Embedding(file.embedding), blocks, file.head())


def _block(file: Reader[T], i: int, rope: RopeSpec) -> Block[T]:
    attention = file.attention(i, rope)
    attention = replace(attention, out=replace(attention.out, bias=None))
    mixer = SideBySide(attention, read_mamba2(file, i, may_lack_norm=True))
    norm = file.rms_norm(f"blk.{i}.attn_norm")
    name = f"blk.{i}.ffn_norm"
    weight = file.weights.vector(name if file.weights.has(name) else f"{name}.weight", file.n_embd)
    return Block(norm, mixer, RmsNorm(weight, norm.eps), file.dense(i))
