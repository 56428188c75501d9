"""Gemma 3: five layers with a window, then one without; heads of q and k normalised, no caps.

Layers with a window rotate by a base of their own and are not stretched. The rest is Gemma 2's,
but embeddings given in place of tokens (those of images) are not multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import TypeVar

from kvcellar.backends.operations import Weights
from kvcellar.models.attention import Attention
from kvcellar.models.blocks import Block, Decoder, Embedding
from kvcellar.models.gemma2 import query_scale, sandwich
from kvcellar.models.reader import Reader
from kvcellar.models.windows import near_rope, read_windows, windowed

T = TypeVar("T")

_N_LAYER_27B = 62


class Gemma3(Decoder[T]):
    """A loaded model of the family; raises as :class:`~kvcellar.models.llama.Llama` does."""

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        file = Reader(metadata, weights)
        file.hp.absent(".expert_count")
        blocks = _blocks(file)
        super().__init__(
            file.spec(blocks),
            Embedding(file.embedding, scale=sqrt(file.n_embd), scales_given=False),
            blocks,
            file.head(softcap=file.hp.cap(".final_logit_softcapping", 0.0)),
        )


def _blocks(file: Reader[T]) -> list[Block[T]]:
    windows = read_windows(file.hp, file.n_layer, period=6, default=0)
    rope = file.rope("neox")
    near = replace(near_rope(file.hp, rope, 10000.0), freq_scale=1.0)
    attentions = windowed(file, windows, rope, near)
    return [sandwich(file, i, _normed(file, i, each)) for i, each in enumerate(attentions)]


def _normed(file: Reader[T], i: int, attention: Attention[T]) -> Attention[T]:
    return replace(
        attention,
        scale=query_scale(file, _N_LAYER_27B),
        q_norm=file.rms_norm(f"blk.{i}.attn_q_norm", file.head_dim_k),
        k_norm=file.rms_norm(f"blk.{i}.attn_k_norm", file.head_dim_k),
    )
