"""Jamba: Mamba's mixers with norms inside, and now and then a layer that attends without rotation.

Each is followed by a feed-forward, dense or, where the layer has a router, a mixture of experts
whose shares are used as they are. Layers without heads of K and V are the recurrent ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from kvcellar.backends.operations import Routing, Weights
from kvcellar.models.blocks import Decoder, Embedding, Experts, FeedForward, Mixer
from kvcellar.models.moe import read_experts
from kvcellar.models.reader import Reader
from kvcellar.models.ssm import read_mamba

T = TypeVar("T")


class Jamba(Decoder[T]):
    """A loaded model of the family; raises as :class:`~kvcellar.models.llama.Llama` does."""

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        file = Reader(metadata, weights, all_attend=False)
        file.hp.absent(".attention.sliding_window", ".expert_shared_count")
        blocks = [file.block(i, _mixer(file, i), _feed_forward(file, i)) for i in file.layers]
        super().__init__(file.spec(blocks), Embedding(file.embedding), blocks, file.head())


def _mixer(file: Reader[T], i: int) -> Mixer[T]:
    if file.n_head_kv[i]:
        return file.attention(i, rope=None)
    return read_mamba(file, i, normed=True)


def _feed_forward(file: Reader[T], i: int) -> FeedForward[T]:
    if file.weights.has(f"blk.{i}.ffn_gate_inp.weight"):
        return Experts(read_experts(file, i, file.n_ff(i)), Routing(normalised=False))
    return file.dense(i)
