"""A one- or two-layer file of each family, as metadata and random tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcellar.models.blocks import Decoder
from kvcellar.models.registry import load_architecture
from kvcellar.types import Float32Array
from tests.models.helpers import ShapeWeights

N_VOCAB, N_EMBD, N_FF, N_HEAD, N_KV, D = 24, 16, 12, 4, 2, 8
Q, KV = N_HEAD * D, N_KV * D
Shapes = dict[str, tuple[int, ...]]

_ENDS: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD), "output_norm.weight": (N_EMBD,)}
_NORMS: Shapes = {"attn_norm.weight": (N_EMBD,), "ffn_norm.weight": (N_EMBD,)}
_OUT: Shapes = {"attn_output.weight": (N_EMBD, Q)}
_QKV: Shapes = {
    "attn_q.weight": (Q, N_EMBD),
    "attn_k.weight": (KV, N_EMBD),
    "attn_v.weight": (KV, N_EMBD),
}
_DENSE: Shapes = {
    "ffn_gate.weight": (N_FF, N_EMBD),
    "ffn_up.weight": (N_FF, N_EMBD),
    "ffn_down.weight": (N_EMBD, N_FF),
}
_HEAD_NORMS: Shapes = {"attn_q_norm.weight": (D,), "attn_k_norm.weight": (D,)}
_POST_NORMS: Shapes = {"post_attention_norm.weight": (N_EMBD,), "post_ffw_norm.weight": (N_EMBD,)}
_LLAMA: Shapes = {**_NORMS, **_QKV, **_OUT, **_DENSE}
_EXPERTS: Shapes = {
    "ffn_gate_inp.weight": (3, N_EMBD),
    "ffn_gate_exps.weight": (3, N_FF, N_EMBD),
    "ffn_up_exps.weight": (3, N_FF, N_EMBD),
    "ffn_down_exps.weight": (3, N_EMBD, N_FF),
}
_EXPERT_BIASES: Shapes = {
    "ffn_gate_inp.bias": (3,),
    "ffn_gate_exps.bias": (3, N_FF),
    "ffn_up_exps.bias": (3, N_FF),
    "ffn_down_exps.bias": (3, N_EMBD),
}
_RANK, _NOPE, _ROT, _N_V = 10, 6, 4, 5
_LATENT: Shapes = {
    "attn_q_a.weight": (7, N_EMBD),
    "attn_q_a_norm.weight": (7,),
    "attn_q_b.weight": (N_HEAD * (_NOPE + _ROT), 7),
    "attn_kv_a_mqa.weight": (_RANK + _ROT, N_EMBD),
    "attn_kv_a_norm.weight": (_RANK,),
    "attn_k_b.weight": (N_HEAD, _RANK, _NOPE),
    "attn_v_b.weight": (N_HEAD, _N_V, _RANK),
    "attn_output.weight": (N_EMBD, N_HEAD * _N_V),
}
_SHARED: Shapes = {
    "ffn_gate_shexp.weight": (2 * N_FF, N_EMBD),
    "ffn_up_shexp.weight": (2 * N_FF, N_EMBD),
    "ffn_down_shexp.weight": (N_EMBD, 2 * N_FF),
}
_GPT2: Shapes = {
    **_NORMS,
    "attn_norm.bias": (N_EMBD,),
    "ffn_norm.bias": (N_EMBD,),
    "attn_qkv.weight": (Q + 2 * KV, N_EMBD),
    "attn_output.weight": (N_EMBD, Q),
    "ffn_up.weight": (N_FF, N_EMBD),
    "ffn_down.weight": (N_EMBD, N_FF),
}
_GPT_OSS: Shapes = {
    "attn_norm.weight": (N_EMBD,),
    "post_attention_norm.weight": (N_EMBD,),
    "attn_sinks.weight": (N_HEAD,),
    **_QKV,
    **_OUT,
    **_EXPERTS,
    **_EXPERT_BIASES,
}
_PHI3: Shapes = {**_NORMS, **_QKV, **_OUT, "ffn_up.weight": (2 * N_FF, N_EMBD)}
_EXPERT_KEYS: dict[str, Any] = {"expert_count": 3, "expert_used_count": 2}


@dataclass(frozen=True, slots=True)
class Family:
    """What a family has beside llama's metadata: keys (None: not that one) and tensors."""

    keys: dict[str, Any]
    blocks: tuple[Shapes, ...]
    ends: Shapes


FAMILIES: dict[str, Family] = {
    "llama": Family({}, (_LLAMA,), {"output.weight": (N_VOCAB, N_EMBD)}),
    "qwen2": Family({}, (_LLAMA,), {}),
    "qwen3": Family({}, ({**_LLAMA, **_HEAD_NORMS},), {}),
    "gemma2": Family({"attention.sliding_window": 5}, ({**_LLAMA, **_POST_NORMS},) * 2, {}),
    "gemma3": Family(
        {"attention.sliding_window": 5, "attention.sliding_window_pattern": 2},
        ({**_LLAMA, **_POST_NORMS, **_HEAD_NORMS},) * 2,
        {},
    ),
    "phi3": Family(
        {},
        ({**_PHI3, "ffn_down.weight": (N_EMBD, N_FF)},),
        {"rope_factors_long.weight": (D // 2,)},
    ),
    "gpt2": Family(
        {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None},
        (_GPT2,),
        {"position_embd.weight": (40, N_EMBD), "output_norm.bias": (N_EMBD,)},
    ),
    "gpt-oss": Family(
        {
            **_EXPERT_KEYS,
            "expert_feed_forward_length": N_FF,
            "feed_forward_length": None,
            "attention.sliding_window": 5,
        },
        (_GPT_OSS,) * 2,
        {},
    ),
    "deepseek2": Family(
        {
            **_EXPERT_KEYS,
            "leading_dense_block_count": 1,
            "expert_feed_forward_length": N_FF,
            "expert_shared_count": 2,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "attention.head_count_kv": 1,
            "attention.key_length": _RANK + _ROT,
            "attention.value_length": _RANK,
            "attention.key_length_mla": _NOPE + _ROT,
            "attention.value_length_mla": _N_V,
            "attention.kv_lora_rank": _RANK,
            "attention.q_lora_rank": 7,
            "rope.dimension_count": _ROT,
        },
        (
            {**_NORMS, **_LATENT, **_DENSE},
            {**_NORMS, **_LATENT, **_EXPERTS, **_SHARED, "exp_probs_b.bias": (3,)},
        ),
        {},
    ),
}


def metadata(arch: str, /, **edits: Any) -> dict[str, Any]:
    """A family's hyper-parameters with changed ones: ``__`` stands for a dot, None drops one."""
    family = FAMILIES[arch]
    keys: dict[str, Any] = {
        "block_count": len(family.blocks),
        "context_length": 40,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_KV,
        "attention.key_length": D,
        "attention.value_length": D,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **family.keys,
        **{key.replace("__", "."): value for key, value in edits.items()},
    }
    named = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": arch, **named}


def tensors(arch: str, seed: int = 0) -> dict[str, Float32Array]:
    """The tensors of a family."""
    family, rng = FAMILIES[arch], np.random.default_rng(seed)
    shapes = {**_ENDS, **family.ends}
    for i, block in enumerate(family.blocks):
        shapes.update({f"blk.{i}.{name}": shape for name, shape in block.items()})
    return {
        name: rng.uniform(0.5, 1.5, shape).astype(np.float32)
        if len(shape) == 1
        else (rng.standard_normal(shape) * 1.5 / shape[-1] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


def load(arch: str, more: Mapping[str, Any] | None = None, /, **edits: Any) -> Decoder[Any]:
    """A family's model with ``more`` tensors (None drops one) and changed hyper-parameters."""
    found = {**tensors(arch), **(more or {})}
    weights = ShapeWeights({name: t for name, t in found.items() if t is not None})
    return load_architecture(metadata(arch, **edits), weights)
