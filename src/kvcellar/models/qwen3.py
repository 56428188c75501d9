"""Qwen3, dense: as Qwen2, and each head of q and k is normalised before it is rotated.

The matrix ``cls.output`` of files that rank texts is not needed for logits, and not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, TypeVar

from kvcellar.backends.operations import Weights
from kvcellar.models.attention import Attention
from kvcellar.models.blocks import Decoder, Embedding
from kvcellar.models.reader import Reader
from kvcellar.types import RopeSpec

T = TypeVar("T")


class Qwen3(Decoder[T]):
    """A loaded model of the family; raises as :class:`~kvcellar.models.llama.Llama` does."""

    unused: ClassVar[tuple[str, ...]] = ("cls.output.weight",)

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        file = Reader(metadata, weights)
        file.hp.absent(".attention.sliding_window", ".expert_count")
        rope = file.rope("neox")
        blocks = [
            file.block(i, _attention(file, i, rope), file.dense(i, scaled=True))
            for i in file.layers
        ]
        super().__init__(file.spec(blocks), Embedding(file.embedding), blocks, file.head())


def _attention(file: Reader[T], i: int, rope: RopeSpec) -> Attention[T]:
    return replace(
        file.attention(i, rope),
        q_norm=file.rms_norm(f"blk.{i}.attn_q_norm", file.head_dim_k),
        k_norm=file.rms_norm(f"blk.{i}.attn_k_norm", file.head_dim_k),
    )
