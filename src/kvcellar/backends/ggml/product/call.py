"""The frame of a ``ggml_custom_op_t`` as LLVM IR: operands, and a thread's share of the work."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from kvcellar.backends.ggml.binding import Tensor
from kvcellar.backends.ggml.kernel.vectors import I32, I64, POINTER, Value
from kvcellar.backends.ggml.product.lanes import Lanes

FUNCTION = "run"


class Operand:
    """The fields of a ``ggml_tensor`` that are used, loaded once."""

    def __init__(self, x: Lanes, address: Value) -> None:
        self.data = x.scalar(POINTER, address, Tensor.data.offset)
        self.ne = [x.scalar(I64, address, Tensor.ne.offset + 8 * i) for i in range(2)]
        self.nb = [x.scalar(I64, address, Tensor.nb.offset + 8 * i) for i in range(2)]


class Call:
    """What a ``ggml_custom_op_t`` is called with."""

    def __init__(self, x: Lanes, function: ir.Function) -> None:
        self.x = x
        self._dst, ith, nth, self._task = function.args
        self.ith, self.nth = x.i64(ith), x.i64(nth)
        self.dst = Operand(x, self._dst)

    def source(self, i: int) -> Operand:
        """A source of the node."""
        return Operand(self.x, self.x.scalar(POINTER, self._dst, Tensor.src.offset + 8 * i))

    def scratch(self) -> Value:
        """The thread's own memory."""
        x, b = self.x, self.x.b
        start, size = x.scalar(POINTER, self._task), x.scalar(I64, self._task, 8)
        return x.at(start, b.mul(self.ith, size))

    def share(self, total: Value, body: Callable[[Value], None]) -> None:
        """Run the body for this thread's equal share of the numbers below total, and return."""
        b = self.x.b
        first = b.sdiv(b.mul(self.ith, total), self.nth)
        last = b.sdiv(b.mul(b.add(self.ith, I64(1)), total), self.nth)

        def each(i: Value, _: list[Value]) -> list[Value]:
            body(b.add(first, i))
            return []

        with b.if_then(b.icmp_signed("<", first, last)):
            self.x.loop(b.sub(last, first), [], each)
        b.ret_void()


def begin(triple: str) -> tuple[ir.Function, Lanes]:
    """An empty function, and what emits into it."""
    module = ir.Module("product")
    module.triple = triple
    kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, POINTER])
    made = ir.Function(module, kind, FUNCTION)
    return made, Lanes(ir.IRBuilder(made.append_basic_block("entry")))
