"""Reading K and V rows as floats, whatever type they are stored as.

q8_0 and q4_0 are blocks of 32 values: a half that all are multiplied by, then 32 signed bytes, or
16 bytes whose low halves are the first 16 values and whose high halves are the others, plus 8. A
product of such a value and its scale is exact in f32.
"""

from __future__ import annotations

from llvmlite import ir

from kvcellar.backends.ggml.kernel.vectors import BYTE, F32, HALF, Value, Vectors
from kvcellar.types import KVType

_SCALE_BYTES = 2


class Row:
    """One head of a row, read a vector at a time.

    A block's scale is loaded where it is first used: all of a row's loads lie on one path.
    """

    def __init__(self, x: Vectors, kind: KVType, place: Value) -> None:
        self._x = x
        self._kind = kind
        self._place = place
        self._scales: dict[int, Value] = {}

    def load(self, start: int) -> Value:
        """``lanes`` values from ``start`` on, a multiple of ``lanes``."""
        if self._kind is KVType.F16:
            return self._x.load_half(self._place, 2 * start)
        block, i = divmod(start, self._kind.block_size)
        values = block * self._kind.block_bytes + _SCALE_BYTES
        read = self._bytes if self._kind is KVType.Q8_0 else self._nibbles
        return self._x.b.fmul(read(values, i), self._scale(block))

    def _scale(self, block: int) -> Value:
        if block not in self._scales:
            half = self._x.scalar(HALF, self._place, block * self._kind.block_bytes)
            self._scales[block] = self._x.splat(self._x.b.fpext(half, F32))
        return self._scales[block]

    def _bytes(self, values: int, i: int) -> Value:
        return self._x.floats(self._x.load_bytes(self._place, values + i))

    def _nibbles(self, values: int, i: int) -> Value:
        x, b, n = self._x, self._x.b, self._kind.block_size // 2
        pairs = x.load_bytes(self._place, values + i % n)
        kind, high = pairs.type, i >= n
        mask = ir.Constant(kind, [BYTE(4 if high else 15)] * x.lanes)
        nibbles = b.lshr(pairs, mask) if high else b.and_(pairs, mask)
        return x.floats(b.sub(nibbles, ir.Constant(kind, [BYTE(8)] * x.lanes)))
