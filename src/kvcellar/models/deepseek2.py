"""DeepSeek V2 and V3, and what converts to ``deepseek2``: latent attention, many small experts.

The first layers are dense; in the others every token also goes through the shared experts. Files
must have K and V's matrices apart, as conversions since April 2025 do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log
from types import MappingProxyType
from typing import ClassVar, Literal, TypeVar

from kvcellar.backends.operations import Routing, Weights
from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.models.attention import LatentAttention, LowRank
from kvcellar.models.blocks import Decoder, Embedding, Experts, FeedForward, Linear
from kvcellar.models.moe import read_experts
from kvcellar.models.reader import Reader
from kvcellar.models.rope import read_rope
from kvcellar.types import RopeSpec

T = TypeVar("T")

_GATINGS: Mapping[int, Literal["softmax", "sigmoid"]] = MappingProxyType(
    {0: "softmax", 1: "softmax", 2: "sigmoid"}  # 0: files of V2 do not say
)
_LOG_MULTIPLIER = ".rope.scaling.yarn_log_multiplier"


class Deepseek2(Decoder[T]):
    """A loaded model of the family; raises as :class:`~kvcellar.models.llama.Llama` does."""

    unused: ClassVar[tuple[str, ...]] = ("blk.*.attn_kv_b.weight",)  # k_b and v_b again, joined

    def __init__(self, metadata: Mapping[str, object], weights: Weights[T]) -> None:
        _refuse_joined(weights)
        file = Reader(metadata, weights)
        file.hp.absent(".attention.sliding_window")
        file.hp.only(".attention.head_count_kv", 1)
        n_dense = file.hp.count(".leading_dense_block_count", 0)
        rope, scale = _rope(file)
        blocks = [
            file.block(
                i,
                _attention(file, i, rope, scale),
                file.dense(i) if i < n_dense else _experts(file, i),
            )
            for i in file.layers
        ]
        super().__init__(file.spec(blocks), Embedding(file.embedding), blocks, file.head())


def _refuse_joined(weights: Weights[T]) -> None:
    if weights.has("blk.0.attn_kv_b.weight") and not weights.has("blk.0.attn_k_b.weight"):
        raise UnsupportedModel(
            "the file has attn_kv_b where attn_k_b and attn_v_b are needed: convert the model again"
        )


def _rope(file: Reader[T]) -> tuple[RopeSpec, float]:
    """How heads are rotated, and what scores are multiplied by.

    YaRN makes attention the sharper the more positions are stretched. Files with a multiplier have
    the scores alone made sharper, others the rotated parts too.
    """
    hp = file.hp
    rope = read_rope(hp, file.weights, "normal", hp.size(".rope.dimension_count"))
    stretch = max(0.0, -log(rope.freq_scale))
    multiplier = hp.number(_LOG_MULTIPLIER, 0.0)
    if multiplier and rope.ext_factor:
        rope = replace(rope, attn_factor=rope.attn_factor / (1.0 + 0.1 * stretch))
    sharper = rope.attn_factor * (1.0 + 0.1 * stretch) * (1.0 + multiplier * stretch)
    return rope, sharper * sharper * hp.size(".attention.key_length_mla") ** -0.5


def _attention(file: Reader[T], i: int, rope: RopeSpec, scale: float) -> LatentAttention[T]:
    sizes, rank, n_embd = _sizes(file, rope.n_rot), _rank(file, rope.n_rot), file.n_embd
    n_head, n_v = file.n_head[i], file.hp.size(".attention.value_length_mla")
    matrix, name = file.weights.matrix, f"blk.{i}.attn"
    return LatentAttention(
        n_head=n_head,
        sizes=sizes,
        rank=rank,
        rope=rope,
        scale=scale,
        q=_queries(file, name, n_head * sum(sizes)),
        kv=file.linear(f"{name}_kv_a_mqa", rank + rope.n_rot, n_embd),
        kv_norm=file.rms_norm(f"{name}_kv_a_norm", rank),
        k_b=matrix(f"{name}_k_b.weight", n_head, rank, sizes[0]),
        v_b=matrix(f"{name}_v_b.weight", n_head, n_v, rank),
        out=file.linear(f"{name}_output", n_embd, n_head * n_v),
    )


def _sizes(file: Reader[T], n_rot: int) -> tuple[int, int]:
    """Of a head of q: the part that is not rotated, and the one that is."""
    whole = file.hp.size(".attention.key_length_mla")
    if whole <= n_rot:
        raise ModelFileError(
            f"{file.hp.arch}.attention.key_length_mla={whole}: must be above the {n_rot} values "
            "that are rotated"
        )
    return whole - n_rot, n_rot


def _rank(file: Reader[T], n_rot: int) -> int:
    """Values of a compressed row, which with the rotated part are a head of the cache."""
    rank = file.hp.size(".attention.kv_lora_rank")
    if (file.head_dim_k, file.head_dim_v) != (rank + n_rot, rank):
        raise ModelFileError(
            f"{file.hp.arch}.attention: heads of {file.head_dim_k} and {file.head_dim_v} values, "
            f"expected {rank + n_rot} and {rank}"
        )
    return rank


def _queries(file: Reader[T], name: str, n_out: int) -> Linear[T] | LowRank[T]:
    rank = file.hp.count(".attention.q_lora_rank", 0)
    if rank == 0:
        return file.linear(f"{name}_q", n_out, file.n_embd)
    return LowRank(
        down=file.linear(f"{name}_q_a", rank, file.n_embd),
        norm=file.rms_norm(f"{name}_q_a_norm", rank),
        up=file.linear(f"{name}_q_b", n_out, rank),
    )


def _experts(file: Reader[T], i: int) -> FeedForward[T]:
    hp, n_ff = file.hp, file.hp.size(".expert_feed_forward_length")
    gating = hp.count(".expert_gating_func", 0)
    if gating not in _GATINGS:
        raise UnsupportedModel(f"{hp.arch}.expert_gating_func={gating}: known are 1 and 2")
    routing = Routing(
        gating=_GATINGS[gating],
        normalised=hp.flag(".expert_weights_norm", False),
        factor=hp.number(".expert_weights_scale", 0.0) or 1.0,
    )
    shared = file.dense(i, n_ff=n_ff * hp.size(".expert_shared_count"), suffix="_shexp")
    return Experts(read_experts(file, i, n_ff), routing, shared)
