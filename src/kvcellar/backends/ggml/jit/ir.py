"""Vectors and loops on top of llvmlite's IR builder.

Values are SSA values: a loop carries what changes between iterations. Floats are f32; half rows are
widened where they are loaded. Sums are in a fixed order, so that results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import e, log, log2
from typing import Any

from llvmlite import ir

from kvcellar.backends.ggml.binding import Tensor

BYTE, HALF, F32, I32, I64 = (
    ir.IntType(8),
    ir.HalfType(),
    ir.FloatType(),
    ir.IntType(32),
    ir.IntType(64),
)
POINTER = ir.PointerType()
_EXP2 = [log(2.0) ** 6 / 720, log(2.0) ** 5 / 120, log(2.0) ** 4 / 24]
_EXP2 += [log(2.0) ** 3 / 6, log(2.0) ** 2 / 2, log(2.0), 1.0]
_TANH = [62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0]
_SMALL = 0.25  # below it these terms of the series of tanh are exact to half a bit
_LINE = 64  # bytes that memory is read in
_SMALLEST = -126.0  # the exponent of the smallest normal f32

Value = Any  # an ir.Value; llvmlite has no types
Labels = list[int]


def custom_op(module_name: str, name: str, triple: str) -> ir.Function:
    """An empty ``ggml_custom_op_t`` in a module of its own: ``(dst, ith, nth, task)``."""
    module = ir.Module(module_name)
    module.triple = triple
    kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, POINTER])
    return ir.Function(module, kind, name)


class Vectors:
    """Emits into a builder; ``lanes`` floats a vector."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.b = builder
        self.lanes = lanes
        self.type = ir.VectorType(F32, lanes)
        self._half = ir.VectorType(HALF, lanes)
        self._byte = ir.VectorType(BYTE, lanes)

    # -- scalars and memory

    def at(self, pointer: Value, offset: Value | int) -> Value:
        """The address ``offset`` bytes further."""
        return self.b.gep(pointer, [self.i64(offset)], source_etype=BYTE)

    def i64(self, value: Value | int) -> Value:
        """A 64-bit integer from a number or a narrower integer."""
        if isinstance(value, int):
            return I64(value)
        return value if value.type == I64 else self.b.sext(value, I64)

    def scalar(self, kind: ir.Type, pointer: Value, offset: Value | int = 0) -> Value:
        """Load one value."""
        return self.b.load(self.at(pointer, offset), typ=kind)

    def load(self, pointer: Value, offset: Value | int = 0) -> Value:
        """Load ``lanes`` floats."""
        return self.b.load(self.at(pointer, offset), typ=self.type, align=4)

    def load_half(self, pointer: Value, offset: Value | int = 0) -> Value:
        """Load ``lanes`` halves as floats."""
        halves = self.b.load(self.at(pointer, offset), typ=self._half, align=2)
        return self.b.fpext(halves, self.type)

    def load_bytes(self, pointer: Value, offset: Value | int = 0) -> Value:
        """Load ``lanes`` bytes."""
        return self.b.load(self.at(pointer, offset), typ=self._byte, align=1)

    def floats(self, values: Value) -> Value:
        """Signed bytes as floats."""
        wide = self.b.sext(values, ir.VectorType(I32, self.lanes))
        return self.b.sitofp(wide, self.type)

    def store(self, value: Value, pointer: Value, offset: Value | int = 0) -> None:
        """Store a vector or a scalar."""
        self.b.store(value, self.at(pointer, offset), align=4)

    def prefetch(self, pointer: Value, n_bytes: int) -> None:
        """Ask for memory that will be read soon, into the second cache; any address will do."""
        module, name = self.b.module, "llvm.prefetch.p0"
        kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
        function = module.globals.get(name) or ir.Function(module, kind, name)
        for offset in range(0, n_bytes, _LINE):
            self.b.call(function, [self.at(pointer, offset), I32(0), I32(2), I32(1)])

    def smaller(self, a: Value, b: Value) -> Value:
        """The smaller of two signed integers."""
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def loop(
        self,
        n: Value | int,
        carried: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
    ) -> list[Value]:
        """Run ``body(i, carried)`` for i in ``range(n)``, n at least 1; what the last returned."""
        b, before = self.b, self.b.block
        head, after = b.append_basic_block("loop"), b.append_basic_block("done")
        b.branch(head)
        b.position_at_end(head)
        phis = [b.phi(value.type) for value in (I64(0), *carried)]
        results = [*body(phis[0], phis[1:])]
        following = b.add(phis[0], I64(1))
        b.cbranch(b.icmp_signed("<", following, self.i64(n)), head, after)
        for phi, first, later in zip(phis, (I64(0), *carried), (following, *results), strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, b.block)
        b.position_at_end(after)
        return results

    # -- vectors

    def constant(self, value: float) -> Value:
        """The number in every lane."""
        return ir.Constant(self.type, [F32(value)] * self.lanes)

    def splat(self, scalar: Value) -> Value:
        """A scalar in every lane."""
        one = self.b.insert_element(ir.Constant(self.type, ir.Undefined), scalar, I32(0))
        return self._shuffle(one, one, [0] * self.lanes)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """``a * b + c``, rounded once."""
        return self._intrinsic("llvm.fma", a, b, c)

    def rint(self, x: Value) -> Value:
        """The nearest whole number, of two the even one."""
        return self._intrinsic("llvm.rint", x)

    def larger(self, a: Value, b: Value) -> Value:
        """The larger in each lane."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def in_front(self, n: Value) -> Value:
        """Which lanes are below n (an i64)."""
        kind = ir.VectorType(I32, self.lanes)
        narrow = self.b.trunc(n, I32)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), narrow, I32(0))
        many = self._shuffle(one, one, [0] * self.lanes)
        return self.b.icmp_signed("<", ir.Constant(kind, [*map(I32, range(self.lanes))]), many)

    def exp2(self, x: Value) -> Value:
        """Two to the power of x, at most 0; NaN stays NaN. Six terms of the series."""
        b, bits = self.b, ir.VectorType(I32, self.lanes)
        low = self.constant(_SMALLEST)
        x = b.select(b.fcmp_ordered("<", x, low), low, x)
        whole = self.rint(x)
        rest = b.fsub(x, whole)
        result = self.constant(_EXP2[0])
        for factor in _EXP2[1:]:
            result = self.fma(result, rest, self.constant(factor))
        biased = b.add(b.fptosi(whole, bits), ir.Constant(bits, [I32(127)] * self.lanes))
        power = b.shl(biased, ir.Constant(bits, [I32(23)] * self.lanes))
        return b.fmul(result, b.bitcast(power, self.type))

    def tanh(self, x: Value) -> Value:
        """The hyperbolic tangent, as exact for small x as for large; NaN stays NaN."""
        b, one = self.b, self.constant(1.0)
        size = self._intrinsic("llvm.fabs", x)
        power = self.exp2(b.fmul(size, self.constant(-2 * log2(e))))
        large = b.fdiv(b.fsub(one, power), b.fadd(one, power))
        square, series = b.fmul(x, x), self.constant(_TANH[0])
        for factor in _TANH[1:]:
            series = self.fma(series, square, self.constant(factor))
        small = b.fcmp_ordered("<", size, self.constant(_SMALL))
        large = self._intrinsic("llvm.copysign", large, x)
        return b.select(small, b.fmul(series, x), large)

    def across(self, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """All lanes combined into one, which is then in every lane."""
        step = self.lanes // 2
        while step:
            x = combine(x, self._shuffle(x, x, [i ^ step for i in range(self.lanes)]))
            step //= 2
        return x

    # -- sums of many vectors

    def fold(self, vectors: Sequence[Value], levels: int, first: int | None = None) -> list[Value]:
        """Add the lanes of many vectors, two vectors into one a level.

        At first each vector is one group of ``first`` lanes that are to be added (all lanes when
        None); a level halves the groups and puts twice as many into a vector. The order of groups
        is that of :meth:`order`.
        """
        found, size = list(vectors), first or self.lanes
        for _ in range(levels):
            low, high = (
                _halves(self.lanes, size, 0),
                _halves(self.lanes, size, size // 2),
            )
            found = [
                self.b.fadd(self._shuffle(x, y, low), self._shuffle(x, y, high))
                for x, y in zip(found[::2], found[1::2], strict=True)
            ]
            size //= 2
        return found

    def in_order(self, folded: Value) -> Value:
        """Sums of ``lanes`` vectors that were folded to the end, in the vectors' order."""
        labels = [[i] * self.lanes for i in range(self.lanes)]
        size = self.lanes
        while size > 1:
            low = _halves(self.lanes, size, 0)
            labels = [
                [(x + y)[i] for i in low] for x, y in zip(labels[::2], labels[1::2], strict=True)
            ]
            size //= 2
        places = [labels[0].index(i) for i in range(self.lanes)]
        return self._shuffle(folded, folded, places)

    def _shuffle(self, a: Value, b: Value, lanes: Labels) -> Value:
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), [I32(lane) for lane in lanes])
        return self.b.shuffle_vector(a, b, mask)

    def _intrinsic(self, name: str, *args: Value) -> Value:
        kind = ir.FunctionType(self.type, [self.type] * len(args))
        full = f"{name}.v{self.lanes}f32"
        module = self.b.module
        function = module.globals.get(full) or ir.Function(module, kind, full)
        return self.b.call(function, args)


class Operand:
    """The fields of a ``ggml_tensor`` that are used, loaded once."""

    def __init__(self, x: Vectors, address: Value, n_dims: int) -> None:
        self.data = x.scalar(POINTER, address, Tensor.data.offset)
        self.ne = [x.scalar(I64, address, Tensor.ne.offset + 8 * i) for i in range(n_dims)]
        self.nb = [x.scalar(I64, address, Tensor.nb.offset + 8 * i) for i in range(n_dims)]


def _halves(lanes: int, size: int, start: int) -> Labels:
    """Where half of each group lies in x and y together; cheap shuffles on x86 and ARM.

    Groups of more than four lanes are put one after the other; smaller ones stay in their block
    of four, x's before y's.
    """
    block = lanes if size > 4 else 4
    return [
        base + source * lanes + group + i
        for base in range(0, lanes, block)
        for source in (0, 1)
        for group in range(start, block, size)
        for i in range(size // 2)
    ]
