"""Types of weights that are read: how the 32 values of a block become bytes, and with what scale.

A block's values are unsigned bytes times a scale, plus a minimum or less an offset: ``d * q + m``
or ``d * (q - 2**shift)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

VALUES = 32
"""Values of a block."""
RECORD = 12 + VALUES
"""Bytes of a block of activations: scale, scale times sum, minus the sum as i32, the values."""


class Format(NamedTuple):
    """How a block of weights lies in memory: a scale as f16, a minimum perhaps, then the values."""

    name: str
    block_bytes: int
    values_at: int  # where the values begin
    bits: int  # 8: signed values, a byte each; 4: the low halves of 16 bytes, then the high ones
    has_min: bool  # an f16 minimum follows the scale
    shift: int  # without a minimum, 2**shift is taken from each value


FORMATS: Mapping[int, Format] = MappingProxyType(
    {
        2: Format("q4_0", 18, 2, 4, has_min=False, shift=3),
        3: Format("q4_1", 20, 4, 4, has_min=True, shift=0),
        8: Format("q8_0", 34, 2, 8, has_min=False, shift=7),
    }
)
"""By ggml's number of the type."""
