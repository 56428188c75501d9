"""What every store refuses before it allocates: types that do not fit a cache's rows."""

from __future__ import annotations

from kvcellar.errors import OptionError
from kvcellar.types import CacheSpec, KVType, LayerSpec


def check_types(spec: CacheSpec) -> None:
    """See that blocks do not cross heads, nor cells, and that V which is part of K lies in it.

    Raises:
        OptionError: a type whose blocks do not divide a head, or quantised V that lies across; or
            V outside of K, or in what is rotated.
    """
    for i, layer in enumerate(spec.layers):
        _check_width("type_k", spec.type_k, layer.head_dim_k, i)
        if layer.v_offset is None:
            _check_width("type_v", spec.type_v, layer.head_dim_v, i)
        else:
            _check_inside(layer, layer.v_offset, i)
    if spec.v_trans and spec.type_v.is_quantized:
        raise OptionError(
            f"type_v={spec.type_v.label}: quantised V needs flash_attn=True, "
            "since blocks cannot be cut across cells"
        )


def _check_width(option: str, kind: KVType, head_dim: int, layer: int) -> None:
    if head_dim % kind.block_size:
        raise OptionError(
            f"{option}={kind.label}: heads of layer {layer} have {head_dim} values, which is not "
            f"a multiple of the block of {kind.block_size}; use f16"
        )


def _check_inside(layer: LayerSpec, offset: int, i: int) -> None:
    n_rot = 0 if layer.rope is None else layer.rope.n_rot
    if not n_rot <= offset <= layer.head_dim_k - layer.head_dim_v:
        raise OptionError(
            f"v_offset={offset} of layer {i}: V of {layer.head_dim_v} values must lie in a K head "
            f"of {layer.head_dim_k}, behind the {n_rot} that are rotated"
        )
