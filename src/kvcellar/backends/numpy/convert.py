"""Rows between f32 and how they are stored.

f32, f16 and bf16 are made here, blocks by the library ``gguf``, which cannot make ``iq4_nl``.
"""

from __future__ import annotations

import numpy as np

from kvcellar.backends.numpy.library import quants
from kvcellar.errors import OptionError
from kvcellar.types import AnyArray, ByteArray, Float32Array, KVType

NOT_MADE = frozenset({KVType.IQ4_NL})
"""Types that rows cannot be converted to."""


def check_made(option: str, kind: KVType) -> None:
    """See that rows can be stored as that type.

    Raises:
        OptionError: they cannot.
        LibraryError: they could, if the library were installed.
    """
    if kind in NOT_MADE:
        raise OptionError(f"{option}={kind.label}: the NumPy backend cannot make it; use q4_0")
    if kind.is_quantized:
        quants()


def to_rows(rows: Float32Array, kind: KVType) -> ByteArray:
    """Rows ``[n, width]`` of f32 as ``[n, row_bytes]`` of that type."""
    n, width = rows.shape
    source = np.ascontiguousarray(rows, dtype=np.float32)
    if source.size == 0:
        return np.empty((n, kind.row_bytes(width)), np.uint8)
    with np.errstate(all="ignore"):  # what is too large becomes infinite, as in ggml
        stored: AnyArray = source
        if kind is KVType.F16:
            stored = source.astype(np.float16)
        elif kind is KVType.BF16:
            stored = _upper_half(source)
        elif kind.is_quantized:
            stored = quants().quantize(source, kind)
    return np.array(stored.view(np.uint8))


def from_rows(rows: ByteArray, kind: KVType) -> Float32Array:
    """Rows ``[n, row_bytes]`` of that type as ``[n, width]`` of f32."""
    n, n_bytes = rows.shape
    source = np.ascontiguousarray(rows)
    if source.size == 0:
        return np.empty((n, n_bytes // kind.block_bytes * kind.block_size), np.float32)
    if kind is KVType.F32:
        return np.array(source.view(np.float32))
    if kind is KVType.F16:
        return source.view(np.float16).astype(np.float32)
    if kind is KVType.BF16:
        return (source.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return quants().dequantize(source, kind)


def _upper_half(rows: Float32Array) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """The upper 16 bits of each f32, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = rows.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(rows), (bits >> 16) | 0x40, rounded).astype(np.uint16)
