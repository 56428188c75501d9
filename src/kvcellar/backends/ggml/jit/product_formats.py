"""How weights and activations of products lie in memory: blocks of 32 values with a scale.

A block of weights is unsigned bytes times a scale, plus a minimum or less an offset: ``d * q + m``
or ``d * (q - 2**shift)``. A block of activations, a record, is ``d * (256 * high + low)`` with
signed bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

VALUES = 32
"""Values of a block."""
LESS = (8, 12, 16)
"""Where a record has minus the sum of its values as i32: of all, of the first half, of the second.
Before them are its scale and scale times sum."""
HIGH, LOW = 20, 20 + VALUES
"""Where its bytes begin."""
RECORD = LOW + VALUES
"""Bytes of a record."""
LARGEST = 127 * 256
"""The largest value of a record in units of its scale: no low byte makes the high one overflow."""

TINY = 1e-33
"""Blocks without a larger value count as 0: the inverse of their scale would overflow."""
LANES = 16
"""Rows of weights that are read side by side."""
MOST = 8
"""Tokens that are computed at once."""


class Format(NamedTuple):
    """How weights lie in memory: a scale as f16, a minimum perhaps, then the values."""

    name: str
    block_bytes: int  # of a block, or of a superblock
    values_at: int  # where the values begin
    bits: int  # 8: signed values, a byte each; 4: the low halves of 16 bytes, then the high ones
    has_min: bool  # an f16 minimum follows the scale
    shift: int  # without a minimum, 2**shift is taken from each value
    fifth_at: int | None = None  # where bits lie that are worth 16, one a value
    n_blocks: int = 1  # blocks of a superblock
    together: int = 1  # how many of them are read together
    scale_at: int = 0
    halved: bool = False  # each half of a block has a scale


FORMATS: Mapping[int, Format] = MappingProxyType(
    {
        2: Format("q4_0", 18, 2, 4, has_min=False, shift=3),
        3: Format("q4_1", 20, 4, 4, has_min=True, shift=0),
        6: Format("q5_0", 22, 6, 4, has_min=False, shift=4, fifth_at=2),
        7: Format("q5_1", 24, 8, 4, has_min=True, shift=0, fifth_at=4),
        8: Format("q8_0", 34, 2, 8, has_min=False, shift=7),
        12: Format("q4_K", 144, 16, 4, has_min=True, shift=0, n_blocks=8, together=4),
        13: Format("q5_K", 176, 48, 4, has_min=True, shift=0, fifth_at=16, n_blocks=8, together=4),
        14: Format(
            "q6_K",
            210,
            0,
            4,
            has_min=False,
            shift=5,
            n_blocks=8,
            together=4,
            scale_at=208,
            halved=True,
        ),
    }
)
"""By ggml's number of the type."""


def unpacked_bytes(n_in: int) -> int:
    """Bytes of scratch memory for :data:`LANES` rows: values as bytes, two numbers a block."""
    return n_in // VALUES * (VALUES + 4 + 4) * LANES
