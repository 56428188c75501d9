"""What every backend refuses.

Types that do not fit, unlearned positions, too many threads, and rows that are not finite: others
than their owners look at them too, and a mask hides no NaN (invariants 8 and 9).
"""

from __future__ import annotations

import numpy as np

from kvcellar.backends.base import Part
from kvcellar.errors import ComputeError, OptionError, PositionError, check_range
from kvcellar.types import (
    ByteArray,
    CacheSpec,
    Float32Array,
    Int32Array,
    KVType,
    all_finite,
    finite_rows,
)

MAX_THREADS = 512  # GGML_MAX_N_THREADS


def check_threads(n_threads: int | None) -> int | None:
    """The number of threads as an int; None stays.

    Raises:
        OptionError: no whole number, or outside [1, 512].
    """
    return None if n_threads is None else check_range("n_threads", n_threads, 1, MAX_THREADS)


def check_learned(positions: Int32Array, n_positions: int) -> None:
    """Check that a model has learned all positions of a plan.

    Raises:
        PositionError: one is not below ``n_positions``.
    """
    last = int(positions.max(initial=-1))
    if last >= n_positions:
        raise PositionError(
            f"position {last}: the model has learned {n_positions} positions, and no text can be "
            "longer; start a new sequence"
        )


def check_types(spec: CacheSpec) -> None:
    """Check that blocks do not cross heads, nor cells.

    Raises:
        OptionError: a type whose blocks do not divide a head, or transposed V that is quantised.
    """
    for i, layer in enumerate(spec.layers):
        _check_width("type_k", spec.type_k, layer.head_dim_k, i)
        if layer.v_offset is None:
            _check_width("type_v", spec.type_v, layer.head_dim_v, i)
        else:
            _check_v_in_k(spec, i, layer.v_offset)
    has_v = any(layer.v_offset is None for layer in spec.layers)
    if spec.v_trans and spec.type_v.is_quantized and has_v:
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


def _check_v_in_k(spec: CacheSpec, i: int, offset: int) -> None:
    """V that is part of K must lie in what is not rotated, in whole blocks and transforms."""
    layer, run = spec.layers[i], max(spec.hadamard_k(i), spec.type_k.block_size)
    n_rot = 0 if layer.rope is None else layer.rope.n_rot
    if not n_rot <= offset <= layer.head_dim_k - layer.head_dim_v:
        raise OptionError(
            f"v_offset={offset}: V of layer {i} is {layer.head_dim_v} of the "
            f"{layer.head_dim_k} values of K, behind the {n_rot} that are rotated"
        )
    if offset % run or layer.head_dim_v % run:
        raise OptionError(
            f"type_k={spec.type_k.label}: V of layer {i} is {layer.head_dim_v} values of K from "
            f"{offset} on, which are no whole runs of {run}; use f16"
        )


def check_rows(
    spec: CacheSpec, layer: int, part: Part, values: Float32Array, rows: ByteArray
) -> None:
    """Check rows of K or V before they are stored.

    Args:
        spec: the shape of the store.
        layer: which of its layers.
        part: K or V.
        values: ``[n, width]``; blocks may hide a NaN.
        rows: the same as they are stored, ``[n, row_bytes]``.

    Raises:
        ComputeError: one is not finite; says which, why, and which types would hold it.
    """
    kind = spec.type_k if part == "k" else spec.type_v
    bits = np.ascontiguousarray(values).view(np.uint32)
    if all_finite(kind.numbers(rows), kind) and all_finite(bits, KVType.F32):
        return
    is_sound = finite_rows(bits.view(np.uint8), KVType.F32)
    row = int(np.argmin(is_sound & finite_rows(rows, kind)))
    raise not_finite(spec, layer, part, row, overflows=bool(is_sound[row]))


def not_finite(
    spec: CacheSpec, layer: int, part: Part, row: int, *, overflows: bool
) -> ComputeError:
    """Return the error of a row that is not finite: its type is too small for it, or it never was.

    ``row`` counts the tokens of the microbatch.
    """
    kind = spec.type_k if part == "k" else spec.type_v
    what = f"{part.upper()} of {spec.layer_name(layer)} for token {row} of the microbatch"
    if not overflows:
        return ComputeError(f"{what} is not finite: the weights or the embeddings are damaged")
    hint = f"use type_{part}='bf16' or 'f32', which hold larger values"
    return ComputeError(f"{what} overflows {kind.label}: {hint}")


def check_states(states: Float32Array, layer: int) -> None:
    """Check what a recurrent layer leaves.

    Raises:
        ComputeError: it is not finite.
    """
    if not np.isfinite(states).all():
        raise ComputeError(f"a state of layer {layer} is not finite: the weights are damaged")
