"""LFM2: gated short convolutions, and now and then a layer that attends, q and k normalised.

Layers without heads of K and V are the convolutions. Where a file has a window, every layer that
attends has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from kvcellar.backends.operations import Weights
from kvcellar.models.blocks import Decoder, Embedding, Mixer
from kvcellar.models.reader import Reader
from kvcellar.models.ssm import ShortConvolution
from kvcellar.types import RopeSpec

T = TypeVar("T")


class Lfm2(Decoder[T]):
    """A loaded model of the family; raises as :class:`~kvcellar.models.llama.Llama` does."""

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        file = Reader(metadata, weights, all_attend=False)
        file.hp.absent(".expert_count")
        rope = file.rope("neox")
        blocks = [file.block(i, _mixer(file, i, rope), file.dense(i)) for i in file.layers]
        head = file.head(file.rms_norm("token_embd_norm"))
        super().__init__(file.spec(blocks), Embedding(file.embedding), blocks, head)


def _mixer(file: Reader[T], i: int, rope: RopeSpec) -> Mixer[T]:
    if not file.n_head_kv[i]:
        return _convolution(file, i)
    return replace(
        file.attention(i, rope, file.hp.count(".attention.sliding_window", 0)),
        q_norm=file.rms_norm(f"blk.{i}.attn_q_norm", file.head_dim_k),
        k_norm=file.rms_norm(f"blk.{i}.attn_k_norm", file.head_dim_k),
    )


def _convolution(file: Reader[T], i: int) -> ShortConvolution[T]:
    name, n, k = f"blk.{i}.shortconv", file.n_embd, file.hp.size(".shortconv.l_cache")
    return ShortConvolution(
        n_embd=n,
        k=k,
        project=file.linear(f"{name}.in_proj", 3 * n, n),
        weight=file.weights.vector(f"{name}.conv.weight", n, k),
        out=file.linear(f"{name}.out_proj", n, n),
    )
