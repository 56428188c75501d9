"""GPT-2: learned positions instead of rotation, norms by mean and variance, a GELU feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from kvcellar.backends.operations import Weights
from kvcellar.models.blocks import Block, Decoder, Embedding, Plain
from kvcellar.models.reader import Reader

T = TypeVar("T")


class Gpt2(Decoder[T]):
    """A loaded model of the family; raises as :class:`~kvcellar.models.llama.Llama` does."""

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        file = Reader(metadata, weights)
        file.hp.absent(".attention.sliding_window", ".expert_count")
        n_positions = file.hp.size(".context_length")
        table = weights.matrix("position_embd.weight", n_positions, file.n_embd)
        blocks = [_block(file, i) for i in file.layers]
        super().__init__(
            file.spec(blocks, n_positions),
            Embedding(file.embedding, positions=table),
            blocks,
            file.head(file.layer_norm("output_norm")),
        )


def _block(file: Reader[T], i: int) -> Block[T]:
    n_ff, n_embd = file.n_ff(i), file.n_embd
    return Block(
        mixer_norm=file.layer_norm(f"blk.{i}.attn_norm"),
        mixer=file.attention(i, rope=None),
        ffn_norm=file.layer_norm(f"blk.{i}.ffn_norm"),
        ffn=Plain(
            up=file.linear(f"blk.{i}.ffn_up", n_ff, n_embd, scaled=False),
            down=file.linear(f"blk.{i}.ffn_down", n_embd, n_ff, scaled=False),
        ),
    )
