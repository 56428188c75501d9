"""gpt-oss: a mixture of experts with biases and a bounded SwiGLU; every other layer has a window.

Heads have a sink, which takes a share of the attention and gives nothing. Experts are weighted by a
softmax over those chosen. The norm before the feed-forward is called ``post_attention_norm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from kvcellar.backends.operations import Routing, Weights
from kvcellar.models.attention import Attention
from kvcellar.models.blocks import Block, Decoder, Embedding, Experts
from kvcellar.models.moe import read_experts
from kvcellar.models.reader import Reader
from kvcellar.models.windows import near_rope, read_windows, windowed

T = TypeVar("T")

_ROUTING = Routing(gating="softmax_chosen", normalised=False, activation="swiglu_oai")


class GptOss(Decoder[T]):
    """A loaded model of the family; raises as :class:`~kvcellar.models.llama.Llama` does."""

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        file = Reader(metadata, weights)
        file.hp.absent(".expert_shared_count")
        file.hp.only(".expert_gating_func", 0, 3)
        file.hp.only(".expert_weights_scale", 0.0, 1.0)
        rope = file.rope("neox")
        windows = read_windows(file.hp, file.n_layer, period=2)
        attentions = windowed(file, windows, rope, near_rope(file.hp, rope))
        blocks = [_block(file, i, each) for i, each in enumerate(attentions)]
        super().__init__(file.spec(blocks), Embedding(file.embedding), blocks, file.head())


def _block(file: Reader[T], i: int, attention: Attention[T]) -> Block[T]:
    sinks = file.weights.vector(f"blk.{i}.attn_sinks.weight", file.n_head[i])
    n_ff = file.hp.size(".expert_feed_forward_length")
    return Block(
        mixer_norm=file.rms_norm(f"blk.{i}.attn_norm"),
        mixer=replace(attention, sinks=sinks),
        ffn_norm=file.rms_norm(f"blk.{i}.post_attention_norm"),
        ffn=Experts(read_experts(file, i, n_ff), _ROUTING),
    )
