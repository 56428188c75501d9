"""Rows between f32 and how they are stored.

ggml's own kernels make the K/V types; quantised rows lie under a Hadamard transform.
"""

from __future__ import annotations

import numpy as np

from kvcellar.backends.ggml.library import load
from kvcellar.types import ByteArray, Float32Array, KVType


def to_rows(rows: Float32Array, kind: KVType) -> ByteArray:
    """Rows ``[n, width]`` of f32 as ``[n, row_bytes]`` of that type."""
    n, width = rows.shape
    if width == 0:  # ggml divides by it
        return np.empty((n, 0), np.uint8)
    source = np.ascontiguousarray(rows, dtype=np.float32)
    out = np.empty((n, kind.row_bytes(width)), dtype=np.uint8)
    load().api.ggml_quantize_chunk(
        kind.ggml_id, source.ctypes.data, out.ctypes.data, 0, n, width, None
    )
    return out


def from_rows(rows: ByteArray, kind: KVType) -> Float32Array:
    """Rows ``[n, row_bytes]`` of that type as ``[n, width]`` of f32."""
    n, n_bytes = rows.shape
    if n_bytes == 0:
        return np.empty((n, 0), np.float32)
    width = n_bytes // kind.block_bytes * kind.block_size
    source = np.ascontiguousarray(rows)
    if kind is KVType.F32:
        return np.array(source.view(np.float32))
    out = np.empty((n, width), dtype=np.float32)
    traits = load().api.ggml_get_type_traits(kind.ggml_id).contents
    traits.to_float(source.ctypes.data, out.ctypes.data, n * width)
    return out
