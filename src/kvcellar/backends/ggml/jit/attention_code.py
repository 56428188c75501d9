"""The attention kernel as LLVM IR: tokens over the cells of their own lists, a unit at a time.

A list is cut into units, whose size depends on its length alone; an item is one unit and one K/V
head. Where a token has several units, each item leaves its part in scratch memory, and the thread
that finishes the last of them adds the parts up, so that no thread waits for another.

1. Only cells in a token's list are read.
2. Results do not depend on how many threads there are: items are cut without regard to threads,
   and parts are added in their order.
3. The counters are zero before and after.
"""

from __future__ import annotations

from llvmlite import ir

from kvcellar.backends.ggml.binding import Tensor
from kvcellar.backends.ggml.jit.attention_item import LOG2_E, Item, ItemCode, KernelShape, sink_of
from kvcellar.backends.ggml.jit.ir import F32, I32, I64, POINTER, Value, Vectors

FUNCTION = "attend"
WORK = ir.LiteralStructType([POINTER] * 9 + [I64])  # attention.Work
TASK = ir.LiteralStructType([POINTER, F32, F32])  # attention.Task


def kernel_ir(shape: KernelShape, triple: str) -> str:
    """The module's text; its function is a ``ggml_custom_op_t``."""
    module = ir.Module("attention")
    module.triple = triple
    kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, POINTER])
    function = ir.Function(module, kind, FUNCTION)
    _Kernel(function, shape).emit()
    return str(module)


class _Tensor:
    """The fields of a ``ggml_tensor`` that are used, loaded once."""

    def __init__(self, x: Vectors, address: Value) -> None:
        self.data = x.scalar(POINTER, address, Tensor.data.offset)
        self.ne = [x.scalar(I64, address, Tensor.ne.offset + 8 * i) for i in range(3)]
        self.nb = [x.scalar(I64, address, Tensor.nb.offset + 8 * i) for i in range(3)]


class _Kernel:
    """Emits the function: a thread's share of the items, one after the other."""

    def __init__(self, function: ir.Function, shape: KernelShape) -> None:
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        self.x = x = Vectors(self.b, shape.lanes)
        self.shape = shape
        dst, ith, nth, task = function.args
        self.ith, self.nth = x.i64(ith), x.i64(nth)
        self.dst = _Tensor(x, dst)
        sources = [
            _Tensor(x, x.scalar(POINTER, dst, Tensor.src.offset + 8 * i))
            for i in range(3 + shape.sinks)
        ]
        self.q, self.k, self.v = sources[:3]
        self.sinks = sources[3].data if shape.sinks else None
        work, scale, cap = self._fields(task, TASK)
        last = cap if shape.softcap else scale
        self.scale = x.splat(self.b.fmul(last, F32(LOG2_E)))
        self.into_cap = x.splat(self.b.fdiv(scale, cap)) if shape.softcap else None
        fields = self._fields(work, WORK)
        self.cells, self.starts, self.ends, self.units, self.first_unit, self.tokens = fields[:6]
        self.items, self.counters, threads, thread_bytes = fields[6:]
        self.n_head_kv = self.b.sdiv(self.dst.ne[1], I64(shape.group))
        self.partials = x.at(threads, self.b.mul(self.ith, thread_bytes))

    def emit(self) -> None:
        """Cut the items into equal shares."""
        b = self.b
        total = b.mul(self._number(self.first_unit, self.dst.ne[2]), self.n_head_kv)
        first = b.sdiv(b.mul(self.ith, total), self.nth)
        last = b.sdiv(b.mul(b.add(self.ith, I64(1)), total), self.nth)

        def unit(_: Value, number: list[Value]) -> list[Value]:
            return [b.add(number[0], self._unit(number[0], last))]

        with b.if_then(b.icmp_signed("<", first, last)):
            unit_of = [b.sdiv(number, self.n_head_kv) for number in (first, b.sub(last, I64(1)))]
            n_units = b.add(b.sub(unit_of[1], unit_of[0]), I64(1))
            self.x.loop(n_units, [first], unit)
        b.ret_void()

    def _unit(self, number: Value, last: Value) -> Value:
        """Items from a number on that belong to one unit; how many they are."""
        b, x, shape = self.b, self.x, self.shape
        unit, head = b.sdiv(number, self.n_head_kv), b.srem(number, self.n_head_kv)
        n_heads = x.smaller(b.sub(self.n_head_kv, head), b.sub(last, number))
        token = self._number(self.tokens, unit)
        following = b.add(token, I64(1))
        first_unit = self._number(self.first_unit, token)
        n_units = b.sub(self._number(self.first_unit, following), first_unit)
        begin = self._number(self.starts, token)
        size = self._number(self.units, token)
        begin = b.add(begin, b.mul(b.sub(unit, first_unit), size))
        row_of_items = self._times(self.n_head_kv, 4 * shape.item_floats)
        item = Item(
            head=head,
            n_heads=n_heads,
            q=x.at(self.q.data, b.mul(token, self.q.nb[2])),
            k=self.k.data,
            v=self.v.data,
            q_head=self.q.nb[1],
            k_row=self.k.nb[1],
            v_row=self.v.nb[1],
            cells=x.at(self.cells, self._times(begin, 4)),
            n=x.smaller(b.sub(self._number(self.ends, token), begin), size),
            row_of_scores=self._times(size, 4),
            scale=self.scale,
            into_cap=self.into_cap,
            sinks=self.sinks,
            partials=self.partials,
            scores=x.at(self.partials, 4 * shape.partial_floats),
            results=x.at(self.items, b.mul(unit, row_of_items)),
            out=x.at(self.dst.data, b.mul(token, self.dst.nb[2])),
            alone=b.icmp_signed("==", n_units, I64(1)),
        )
        ItemCode(x, shape, item).emit()
        with b.if_then(b.not_(item.alone)):
            results = x.at(self.items, b.mul(first_unit, row_of_items))

            def finish(i: Value, _: list[Value]) -> list[Value]:
                self._finish(token, b.add(head, i), n_units, results, item.out)
                return []

            x.loop(n_heads, [], finish)
        return n_heads

    def _finish(
        self, token: Value, head: Value, n_units: Value, results: Value, out: Value
    ) -> None:
        """Count an item as done, and combine if it was the last of its token and head."""
        b, x, shape = self.b, self.x, self.shape
        number = b.add(self._times(token, self.n_head_kv), head)
        counter = x.at(self.counters, self._times(number, 4))
        before = x.i64(b.atomic_rmw("add", counter, I32(1), "acq_rel"))
        with b.if_then(b.icmp_signed("==", before, b.sub(n_units, I64(1)))):
            x.store(I32(0), counter)
            base = x.at(results, self._times(head, 4 * shape.item_floats))
            own = x.at(out, self._times(head, 4 * shape.group * shape.head_dim_v))
            step = self._times(self.n_head_kv, 4 * shape.item_floats)
            for g in range(shape.group):
                first = sink_of(x, shape, self.sinks, head, g) if shape.sinks else None
                self._combine_head(g, base, step, n_units, own, first)

    def _combine_head(
        self, g: int, base: Value, step: Value, n_units: Value, out: Value, sink: Value | None
    ) -> None:
        b, x, group, d_v = self.b, self.x, self.shape.group, self.shape.head_dim_v
        at = 4 * (group * d_v + g)

        def largest(i: Value, seen: list[Value]) -> list[Value]:
            return [x.larger(x.splat(x.scalar(F32, x.at(base, b.mul(i, step)), at)), seen[0])]

        lowest = x.constant(float("-inf")) if sink is None else sink
        (top,) = x.loop(n_units, [lowest], largest)

        def add(i: Value, sums: list[Value]) -> list[Value]:
            place = x.at(base, b.mul(i, step))
            weight = x.exp2(b.fsub(x.splat(x.scalar(F32, place, at)), top))
            parts = [x.splat(x.scalar(F32, place, at + 4 * group))]
            parts += [x.load(place, 4 * (g * d_v + c)) for c in range(0, d_v, x.lanes)]
            return [x.fma(weight, p, s) for p, s in zip(parts, sums, strict=True)]

        zero = x.constant(0.0)
        at_first = zero if sink is None else x.exp2(b.fsub(sink, top))
        total, *sums = x.loop(n_units, [at_first, *[zero] * (d_v // x.lanes)], add)
        for c, value in enumerate(sums):
            x.store(b.fdiv(value, total), out, 4 * (g * d_v + c * x.lanes))

    # -- numbers and places

    def _times(self, value: Value, factor: Value | int) -> Value:
        return self.b.mul(value, self.x.i64(factor))

    def _number(self, pointer: Value, i: Value) -> Value:
        """An i32 of an array, widened."""
        return self.x.i64(self.x.scalar(I32, pointer, self._times(i, 4)))

    def _fields(self, pointer: Value, kind: ir.Type) -> list[Value]:
        places = [
            self.b.gep(pointer, [I32(0), I32(i)], source_etype=kind)
            for i in range(len(kind.elements))
        ]
        return [self.b.load(p, typ=t) for p, t in zip(places, kind.elements, strict=True)]
