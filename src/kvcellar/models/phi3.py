"""Phi-3 and Phi-4: gate and up in one matrix, q, k and v often too, and RoPE stretched by factors.

Two things are as in llama.cpp, or nearly so. A sliding window in the file is not applied. Of the
two sets of RoPE's factors, one is for contexts up to the original length and one for longer ones: a
file is read before there is a context, so the long ones are always used, with which a model that
has them was trained last. llama.cpp takes the short ones for a context that is short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeVar

from kvcellar.backends.operations import Weights
from kvcellar.models.blocks import Decoder, Embedding, FusedDense
from kvcellar.models.reader import Reader

T = TypeVar("T")


class Phi3(Decoder[T]):
    """A loaded model of the family; raises as :class:`~kvcellar.models.llama.Llama` does."""

    unused: ClassVar[tuple[str, ...]] = ("rope_factors_short.weight",)

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        file = Reader(metadata, weights)
        file.hp.absent(".expert_count")
        rope = file.rope("neox", "rope_factors_long.weight")
        blocks = [file.block(i, file.attention(i, rope), _dense(file, i)) for i in file.layers]
        super().__init__(file.spec(blocks), Embedding(file.embedding), blocks, file.head())


def _dense(file: Reader[T], i: int) -> FusedDense[T]:
    n_ff, n_embd = file.n_ff(i), file.n_embd
    return FusedDense(
        gate_up=file.linear(f"blk.{i}.ffn_up", 2 * n_ff, n_embd, scaled=False),
        down=file.linear(f"blk.{i}.ffn_down", n_embd, n_ff, scaled=False),
        n_ff=n_ff,
    )
