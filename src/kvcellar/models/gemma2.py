"""Gemma 2: every other layer sees a window, scores and logits are softly capped.

Embeddings are multiplied by the root of their length, the feed-forward is GeGLU, and what attention
and feed-forward give is normalised before it is added. Norm weights of GGUF files have the 1 added
that the paper adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import TypeVar

from kvcellar.backends.operations import Weights
from kvcellar.models.attention import Attention
from kvcellar.models.blocks import Block, Decoder, Embedding
from kvcellar.models.reader import Reader
from kvcellar.models.windows import near_rope, read_windows, windowed

T = TypeVar("T")

_N_LAYER_27B = 46


class Gemma2(Decoder[T]):
    """A loaded model of the family; raises as :class:`~kvcellar.models.llama.Llama` does."""

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        file = Reader(metadata, weights)
        file.hp.absent(".expert_count")
        softcap = file.hp.cap(".attn_logit_softcapping", 50.0)
        rope, scale = file.rope("neox"), query_scale(file, _N_LAYER_27B)
        windows = read_windows(file.hp, file.n_layer, period=2, default=4096)
        blocks = [
            sandwich(file, i, replace(attention, scale=scale, softcap=softcap))
            for i, attention in enumerate(windowed(file, windows, rope, near_rope(file.hp, rope)))
        ]
        super().__init__(
            file.spec(blocks),
            Embedding(file.embedding, scale=sqrt(file.n_embd)),
            blocks,
            file.head(softcap=file.hp.cap(".final_logit_softcapping", 30.0)),
        )


def query_scale(file: Reader[T], wide_at: int) -> float:
    """What scores are multiplied by; the model of ``wide_at`` layers has its own rule."""
    size = file.n_embd // file.n_head[0] if file.n_layer == wide_at else file.head_dim_k
    return float(size**-0.5)


def sandwich(file: Reader[T], i: int, attention: Attention[T]) -> Block[T]:
    """Layer i with norms before and behind each of its parts."""
    return replace(
        file.block(i, attention, file.dense(i, "geglu")),
        mixer_post_norm=file.rms_norm(f"blk.{i}.post_attention_norm"),
        ffn_post_norm=file.rms_norm(f"blk.{i}.post_ffw_norm"),
    )
