"""What an attention kernel is made for, and sizes that its code and its caller must agree on."""

from __future__ import annotations

from typing import NamedTuple

from kvcellar.types import KVType

UNIT = 64
"""Cells of a unit; a multiple of it where a list would have more than :data:`MANY` units."""
MANY = 32
BLOCK = 16
"""Cells whose scores are computed before the next K/V head has its turn."""
PREFETCHED = 48
"""How far behind a unit lists are looked at, to ask for rows early."""
QUAD = 4
"""Cells whose scores are computed at once."""
TYPES = (KVType.F16, KVType.Q8_0, KVType.Q4_0)
"""Types of K and V whose rows can be read."""


class KernelShape(NamedTuple):
    """The shape that a kernel is compiled for."""

    head_dim_k: int
    head_dim_v: int
    group: int  # query heads a K/V head
    lanes: int  # floats a vector, of which both head sizes are multiples
    registers: int  # vectors that accumulate at once
    type_k: KVType = KVType.F16
    type_v: KVType = KVType.F16
    softcap: bool = False
    sinks: bool = False

    @property
    def k_bytes(self) -> int:
        """Bytes of a K head of a cell."""
        return self.type_k.row_bytes(self.head_dim_k)

    @property
    def v_bytes(self) -> int:
        """Bytes of a V head of a cell."""
        return self.type_v.row_bytes(self.head_dim_v)

    @property
    def item_floats(self) -> int:
        """Floats an item leaves: weighted V, largest score and sum of weights of each head."""
        return -(-self.group * (self.head_dim_v + 2) // 16) * 16

    @property
    def partial_floats(self) -> int:
        """Floats of partial sums of products that a thread needs."""
        return self.group * BLOCK // QUAD * self.lanes
