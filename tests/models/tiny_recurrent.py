"""The smallest files of the recurrent and hybrid families: what each must have, of ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcellar.models.blocks import Decoder
from kvcellar.models.registry import load_architecture
from tests.models.helpers import ShapeWeights

N_EMBD = 8
SSM_KEYS = {
    "ssm.inner_size": 16,
    "ssm.state_size": 4,
    "ssm.conv_kernel": 4,
    "ssm.time_step_rank": 2,
}
MAMBA = {
    "attn_norm.weight": (8,),
    "ssm_in.weight": (32, 8),
    "ssm_conv1d.weight": (16, 4),
    "ssm_x.weight": (10, 16),
    "ssm_dt.weight": (16, 2),
    "ssm_dt.bias": (16,),
    "ssm_a": (16, 4),
    "ssm_d": (16,),
    "ssm_out.weight": (8, 16),
}
MAMBA2 = {  # two heads in a group
    "attn_norm.weight": (8,),
    "ssm_in.weight": (42, 8),
    "ssm_conv1d.weight": (24, 4),
    "ssm_dt.bias": (2,),
    "ssm_a": (2, 1),
    "ssm_d": (2, 1),
    "ssm_out.weight": (8, 16),
}
ATTENTION = {
    "attn_norm.weight": (8,),
    "attn_q.weight": (8, 8),
    "attn_k.weight": (4, 8),
    "attn_v.weight": (4, 8),
    "attn_output.weight": (8, 8),
}
DENSE = {
    "ffn_norm.weight": (8,),
    "ffn_gate.weight": (6, 8),
    "ffn_up.weight": (6, 8),
    "ffn_down.weight": (8, 6),
}
HEADS = {"attention.head_count": 2, "feed_forward_length": 6}


@dataclass(frozen=True)
class Tiny:
    """A file of one family; ``norm`` is what it calls the last norm."""

    arch: str
    keys: dict[str, Any]
    layers: tuple[dict[str, tuple[int, ...]], ...]
    norm: str = "output_norm"

    def metadata(self, **changes: Any) -> dict[str, Any]:
        """What the file says; names of changes have ``__`` for a dot."""
        common = {
            "embedding_length": N_EMBD,
            "context_length": 64,
            "block_count": len(self.layers),
            "attention.layer_norm_rms_epsilon": 1e-5,
        }
        changed = {name.replace("__", "."): value for name, value in changes.items()}
        keys = {**common, **self.keys, **changed}
        full = {f"{self.arch}.{key}": value for key, value in keys.items()}
        return {"general.architecture": self.arch, **full}

    def tensors(self, **more: tuple[int, ...]) -> dict[str, Any]:
        """Its arrays; ``more`` of them in the last layer, their names with ``__`` for a dot."""
        shapes = {"token_embd.weight": (10, N_EMBD), f"{self.norm}.weight": (N_EMBD,)}
        for i, layer in enumerate(self.layers):
            shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
        last = f"blk.{len(self.layers) - 1}"
        shapes |= {f"{last}.{name.replace('__', '.')}": shape for name, shape in more.items()}
        return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}

    def random(self, **more: tuple[int, ...]) -> dict[str, Any]:
        """The same with random numbers; rates of decay are negative."""
        rng = np.random.default_rng(1)
        drawn = {name: rng.normal(size=x.shape) for name, x in self.tensors(**more).items()}
        return {
            name: (-abs(x) if name.endswith("ssm_a") else x).astype(np.float32)
            for name, x in drawn.items()
        }

    def load(self, **changes: Any) -> Decoder[Any]:
        """The model, some of its keys changed."""
        return load(self.metadata(**changes), self.tensors())


def load(metadata: dict[str, Any], tensors: dict[str, Any]) -> Decoder[Any]:
    """The model that these describe."""
    return load_architecture(metadata, ShapeWeights(tensors))


TINY_MAMBA = Tiny("mamba", SSM_KEYS, (MAMBA,))
TINY_MAMBA2 = Tiny(
    "mamba2", SSM_KEYS | {"ssm.group_count": 1}, (MAMBA2 | {"ssm_norm.weight": (1, 16)},)
)
TINY_JAMBA = Tiny(
    "jamba",
    SSM_KEYS | HEADS | {"attention.head_count_kv": np.array([1, 0], np.int32)},
    (
        ATTENTION | DENSE,
        MAMBA
        | DENSE
        | {"ssm_dt_norm.weight": (2,), "ssm_b_norm.weight": (4,), "ssm_c_norm.weight": (4,)},
    ),
)
TINY_FALCON = Tiny(
    "falcon-h1",
    SSM_KEYS | HEADS | {"ssm.group_count": 1, "attention.head_count_kv": 1},
    (ATTENTION | MAMBA2 | DENSE,),
)
TINY_LFM2 = Tiny(
    "lfm2",
    HEADS | {"shortconv.l_cache": 3, "attention.head_count_kv": np.array([1, 0], np.int32)},
    (
        ATTENTION | DENSE | {"attn_q_norm.weight": (4,), "attn_k_norm.weight": (4,)},
        DENSE
        | {
            "attn_norm.weight": (8,),
            "shortconv.in_proj.weight": (24, 8),
            "shortconv.conv.weight": (8, 3),
            "shortconv.out_proj.weight": (8, 8),
        },
    ),
    norm="token_embd_norm",
)
FILES = (TINY_MAMBA, TINY_MAMBA2, TINY_JAMBA, TINY_FALCON, TINY_LFM2)
