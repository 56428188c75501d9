"""Qwen2 and Qwen2.5: llama with biases of q, k and v, and halves of a head as RoPE's pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from kvcellar.backends.operations import Weights
from kvcellar.models.blocks import Decoder, Embedding
from kvcellar.models.reader import Reader

T = TypeVar("T")


class Qwen2(Decoder[T]):
    """A loaded model of the family; raises as :class:`~kvcellar.models.llama.Llama` does."""

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        file = Reader(metadata, weights)
        file.hp.absent(".attention.sliding_window", ".expert_count")
        rope = file.rope("neox")
        blocks = [file.block(i, file.attention(i, rope), file.dense(i)) for i in file.layers]
        super().__init__(file.spec(blocks), Embedding(file.embedding), blocks, file.head())
