"""What every store refuses before it allocates: types that do not fit a cache's rows."""

from __future__ import annotations

from kvcellar.errors import OptionError
from kvcellar.types import CacheSpec, KVType


def check_types(spec: CacheSpec) -> None:
    """See that blocks do not cross heads, nor cells.

    Raises:
        OptionError: a type whose blocks do not divide a head, or quantised V that lies across.
    """
    for i, layer in enumerate(spec.layers):
        _check_width("type_k", spec.type_k, layer.head_dim_k, i)
        _check_width("type_v", spec.type_v, layer.head_dim_v, i)
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
