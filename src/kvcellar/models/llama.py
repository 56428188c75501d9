"""The llama family: Llama 1–3, Mistral, Mixtral, SmolLM and whatever converts to ``llama``.

Pre-norm blocks of rotary grouped-query attention and a SwiGLU feed-forward, dense or a mixture of
experts. Biases, scales of products (quantised files of today have one a matrix) and RoPE's factors
are used where the file has them; the output matrix may be the embedding's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from kvcellar.backends.operations import Weights
from kvcellar.models.blocks import Decoder, Embedding, Experts, FeedForward
from kvcellar.models.moe import read_experts
from kvcellar.models.reader import Reader

T = TypeVar("T")


class Llama(Decoder[T]):
    """A loaded model of the llama family.

    Raises:
        UnsupportedModel: a tensor or hyper-parameter is absent, or one is there that we lack.
        ModelFileError: sizes contradict each other.
    """

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        file = Reader(metadata, weights)
        file.hp.absent(".attention.sliding_window", ".expert_shared_count")
        file.hp.only(".expert_gating_func", 0, 1)
        file.hp.only(".expert_weights_scale", 0.0, 1.0)
        has_experts = file.hp.count(".expert_count", 0) > 0
        rope = file.rope("normal")
        blocks = [
            file.block(i, file.attention(i, rope), _feed_forward(file, i, has_experts))
            for i in file.layers
        ]
        super().__init__(file.spec(blocks), Embedding(file.embedding), blocks, file.head())


def _feed_forward(file: Reader[T], i: int, has_experts: bool) -> FeedForward[T]:
    if has_experts:
        return Experts(read_experts(file, i, file.n_ff(i), scaled=True))
    return file.dense(i, scaled=True)
