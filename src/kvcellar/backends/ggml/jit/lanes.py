"""Vectors of 16 integers beside those of floats: bytes four to a lane, and products of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from kvcellar.backends.ggml.jit.ir import BYTE, F32, HALF, I32, Value, Vectors
from kvcellar.backends.ggml.jit.product_formats import LANES

INTS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(F32, LANES)
_QUARTER = ir.VectorType(I32, 4)
_SHORT = ir.IntType(16)
_DOT = "llvm.x86.avx512.vpdpbusd.512"
_LOOK_UP = "llvm.x86.avx512.permvar.si.512"
_FIFTHS = [sum((i >> bit & 1) << 8 * bit + 4 for bit in range(4)) for i in range(LANES)]


class Lanes(Vectors):
    """Emits into a builder, for processors with AVX-512 and VNNI."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        super().__init__(builder, LANES)

    def ints(self, value: int) -> Value:
        """The number in every lane."""
        return ir.Constant(INTS, [I32(value)] * LANES)

    def load_ints(self, pointer: Value, offset: Value | int = 0) -> Value:
        """Load 16 integers."""
        return self.b.load(self.at(pointer, offset), typ=INTS, align=4)

    def splat_int(self, scalar: Value) -> Value:
        """An integer in every lane."""
        one = self.b.insert_element(ir.Constant(INTS, ir.Undefined), scalar, I32(0))
        return self._shuffle(one, one, [0] * LANES)

    def dot(self, sums: Value, unsigned: Value, signed: Value) -> Value:
        """To each sum add the products of the four bytes of its lane."""
        return self._on_ints(_DOT, sums, unsigned, signed)

    def fifths(self, bits: Value) -> Value:
        """The four lowest bits of each lane, each as the fifth bit of a byte."""
        table = ir.Constant(INTS, [I32(value) for value in _FIFTHS])
        return self._on_ints(_LOOK_UP, table, bits)

    def turn(self, places: Sequence[Value]) -> list[Value]:
        """Four integers at each of 16 places as four vectors, a lane a place."""
        rows = [self.b.load(place, typ=_QUARTER, align=1) for place in places]
        fourths = [self._join(rows[i::4]) for i in range(4)]
        low, high = (
            [self._by_quarter(x, y, half) for x, y in (fourths[:2], fourths[2:])]
            for half in ((0, 4, 1, 5), (2, 6, 3, 7))
        )
        return [
            self._by_quarter(a, b, half)
            for a, b in (low, high)
            for half in ((0, 1, 4, 5), (2, 3, 6, 7))
        ]

    def part(self, x: Value, shift: int, mask: int) -> Value:
        """Bits of each byte: those under the mask, after a shift to the right."""
        return self.b.and_(self.b.lshr(x, self.ints(shift)), self.ints(mask * 0x01010101))

    def signed_byte(self, x: Value, which: int) -> Value:
        """A byte of each lane as a float."""
        first = self.b.shl(x, self.ints(24 - 8 * which))
        return self.b.sitofp(self.b.ashr(first, self.ints(24)), FLOATS)

    def halves(self, places: Sequence[Value]) -> Value:
        """The f16 at each of 16 places, widened."""
        found = ir.Constant(ir.VectorType(_SHORT, LANES), ir.Undefined)
        for i, place in enumerate(places):
            found = self.b.insert_element(found, self.b.load(place, typ=_SHORT, align=2), I32(i))
        return self.b.fpext(self.b.bitcast(found, ir.VectorType(HALF, LANES)), FLOATS)

    def words(self, places: Sequence[Value]) -> Value:
        """The integer at each of 16 places."""
        found = ir.Constant(INTS, ir.Undefined)
        for i, place in enumerate(places):
            found = self.b.insert_element(found, self.b.load(place, typ=I32, align=2), I32(i))
        return found

    def pairs(self, places: Sequence[Value]) -> list[Value]:
        """Two f16 beside each other at each of 16 places, widened: the first, the second."""
        return self.two_halves(self.words(places))

    def two_halves(self, found: Value) -> list[Value]:
        """The two f16 of each lane, widened: the first, the second."""
        narrow, half = ir.VectorType(_SHORT, LANES), ir.VectorType(HALF, LANES)
        parts = (found, self.b.lshr(found, self.ints(16)))
        return [self.b.fpext(self.b.bitcast(self.b.trunc(p, narrow), half), FLOATS) for p in parts]

    def bytes(self, x: Value) -> Value:
        """The lowest byte of each lane."""
        return self.b.trunc(x, ir.VectorType(BYTE, LANES))

    def _on_ints(self, name: str, *args: Value) -> Value:
        module, kind = self.b.module, ir.FunctionType(INTS, [INTS] * len(args))
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self.b.call(function, args)

    def _join(self, quarters: Sequence[Value]) -> Value:
        a, b = (self._shuffle(quarters[i], quarters[i + 1], [*range(8)]) for i in (0, 2))
        return self._shuffle(a, b, [*range(LANES)])

    def _by_quarter(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Pick from each four lanes of a (0 to 3) and of b (4 to 7)."""
        picked = [lane % 4 + (LANES if lane > 3 else 0) for lane in lanes]
        return self._shuffle(a, b, [q + lane for q in range(0, LANES, 4) for lane in picked])
