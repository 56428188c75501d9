"""Reading mixtures of experts."""

from __future__ import annotations

from typing import TypeVar

from kvcellar.backends.operations import ExpertWeights
from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.models.reader import Reader

T = TypeVar("T")

MAX_EXPERTS_USED = 32
"""How many experts a token may use: a graph has room for these in each layer."""


def read_experts(file: Reader[T], i: int, n_ff: int, *, scaled: bool = False) -> ExpertWeights[T]:
    """Layer i's experts, with the biases and, if they count, the scales that the file has.

    Raises:
        ModelFileError: more are used than there are.
        UnsupportedModel: a token uses more than we can.
    """
    hp, n_embd, name = file.hp, file.n_embd, f"blk.{i}.ffn"
    n_expert, n_used = hp.size(".expert_count"), hp.size(".expert_used_count")
    if n_used > n_expert:
        raise ModelFileError(f"expert_used_count={n_used}: the file has {n_expert} experts")
    if n_used > MAX_EXPERTS_USED:
        raise UnsupportedModel(f"expert_used_count={n_used}: at most {MAX_EXPERTS_USED} run")
    matrix, is_fused = file.weights.matrix, file.weights.has(f"{name}_gate_up_exps.weight")

    def experts(kind: str, n_out: int, n_in: int) -> T:
        full = f"{name}_{kind}_exps"
        file.ignore_scales(full, scaled=scaled)
        return matrix(f"{full}.weight", n_expert, n_out, n_in)

    def scale(kind: str) -> T | None:
        return file.optional(f"{name}_{kind}_exps.scale", n_expert) if scaled else None

    def bias(kind: str, n: int) -> T | None:
        full = f"{name}_{kind}_exps.bias"
        return matrix(full, n_expert, n) if file.weights.has(full) else None

    return ExpertWeights(
        router=matrix(f"{name}_gate_inp.weight", n_expert, n_embd),
        down=experts("down", n_embd, n_ff),
        n_used=n_used,
        gate=None if is_fused else experts("gate", n_ff, n_embd),
        up=None if is_fused else experts("up", n_ff, n_embd),
        gate_up=experts("gate_up", 2 * n_ff, n_embd) if is_fused else None,
        gate_scale=scale("gate"),
        up_scale=scale("up"),
        gate_up_scale=scale("gate_up"),
        down_scale=scale("down"),
        router_bias=file.optional(f"{name}_gate_inp.bias", n_expert),
        gate_bias=bias("gate", n_ff),
        up_bias=bias("up", n_ff),
        down_bias=bias("down", n_embd),
        choice_bias=file.optional(f"blk.{i}.exp_probs_b.bias", n_expert),
    )
