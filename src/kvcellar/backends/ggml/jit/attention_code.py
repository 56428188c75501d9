"""The attention kernel as LLVM IR: tokens over the cells of their own lists, a unit at a time.

A list is cut into units, whose size depends on its length alone; an item is one unit and one K/V
head. Where a token has several units, each item leaves its part in scratch memory, and the thread
that finishes the last of them adds the parts up, so that no thread waits for another.

Within an item: scores, then weights ``exp2(score - highest)``, then V rows by weight. Cells are
taken in blocks, heads inside, so that rows are read as they lie in memory; a row is widened once
for all heads of a group that fit the registers.

1. Only cells in a token's list are read.
2. Results do not depend on how many threads there are: items are cut without regard to threads,
   and parts are added in their order.
3. The counters are zero before and after, unless it is stopped: then what it leaves is undefined.
4. It looks before each unit whether it should stop, since a node of many tokens takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from math import e, log2
from typing import NamedTuple

from llvmlite import ir

from kvcellar.backends.ggml.binding import Tensor
from kvcellar.backends.ggml.jit.attention_shape import BLOCK, PREFETCHED, QUAD, KernelShape
from kvcellar.backends.ggml.jit.ir import (
    BYTE,
    F32,
    HALF,
    I32,
    I64,
    POINTER,
    Operand,
    Value,
    Vectors,
    custom_op,
)
from kvcellar.types import KVType

FUNCTION = "attend"
WORK = ir.LiteralStructType([POINTER] * 9 + [I64, POINTER])  # attention.Work
TASK = ir.LiteralStructType([POINTER, F32, F32])  # attention.Task


_AHEAD = PREFETCHED // BLOCK - 1
LOG2_E = log2(e)
"""Weights are powers of two, so scores are in these units."""
_MINUS_INF = float("-inf")
_SCALE_BYTES = 2


def kernel_ir(shape: KernelShape, triple: str) -> str:
    """The module's text; its function is a ``ggml_custom_op_t``."""
    function = custom_op("attention", FUNCTION, triple)
    _Kernel(function, shape).emit()
    return str(function.module)


class _Kernel:
    """Emits the function: a thread's share of the items, one after the other."""

    def __init__(self, function: ir.Function, shape: KernelShape) -> None:
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        self.x = x = Vectors(self.b, shape.lanes)
        self.shape = shape
        dst, ith, nth, task = function.args
        self.ith, self.nth = x.i64(ith), x.i64(nth)
        self.dst = Operand(x, dst, 3)
        sources = [
            Operand(x, x.scalar(POINTER, dst, Tensor.src.offset + 8 * i), 3)
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
        self.items, self.counters, threads, thread_bytes, self.stop = fields[6:]
        self.n_head_kv = self.b.sdiv(self.dst.ne[1], I64(shape.group))
        self.partials = x.at(threads, self.b.mul(self.ith, thread_bytes))

    def emit(self) -> None:
        """Cut the items into equal shares."""
        b = self.b
        total = b.mul(self._number(self.first_unit, self.dst.ne[2]), self.n_head_kv)
        first = b.sdiv(b.mul(self.ith, total), self.nth)
        last = b.sdiv(b.mul(b.add(self.ith, I64(1)), total), self.nth)

        def unit(_: Value, number: list[Value]) -> list[Value]:
            stop = b.load_atomic(self.stop, "monotonic", 1, typ=BYTE)
            before = b.block
            with b.if_then(b.icmp_unsigned("==", stop, BYTE(0)), likely=True):
                n_items = self._unit(number[0], last)
                after = b.block
            done = b.phi(I64)
            done.add_incoming(I64(0), before)
            done.add_incoming(n_items, after)
            return [b.add(number[0], done)]

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


class Item(NamedTuple):
    """What is worked on: addresses and 64-bit integers, but for the vectors and ``alone``."""

    head: Value  # the first K/V head
    n_heads: Value
    q: Value  # the token's first query head
    k: Value  # the first K row
    v: Value
    q_head: Value  # bytes from query head to query head
    k_row: Value  # bytes from row to row
    v_row: Value
    cells: Value  # the unit's part of the list
    n: Value  # cells in it
    row_of_scores: Value  # bytes of the scores of one query head
    scale: Value  # a vector, of what soft-capping does last where there is any
    into_cap: Value  # a vector, of what it does first
    sinks: Value  # the first query head's sink, if there are any
    partials: Value  # the thread's memory, see KernelShape
    scores: Value
    results: Value  # where weighted V, highest scores and sums are left, a head after the other
    out: Value  # where the token's attention belongs
    alone: Value  # whether there is no other unit for the token


def sink_of(x: Vectors, shape: KernelShape, sinks: Value, head: Value, g: int) -> Value:
    """The sink of a query head of a K/V head's group, in every lane, in the units of scores."""
    place = x.at(sinks, x.b.mul(head, I64(4 * shape.group)))
    return x.b.fmul(x.splat(x.scalar(F32, place, 4 * g)), x.constant(LOG2_E))


class ItemCode:
    """Emits the code of an item."""

    def __init__(self, x: Vectors, shape: KernelShape, item: Item) -> None:
        self.b = x.b
        self.x = x
        self.shape = shape
        self.item = item

    def emit(self) -> None:
        """Leave results, or attention itself where the unit is alone."""
        item, shape = self.item, self.shape
        self._each_block(item.k, item.k_row, shape.k_bytes, self._score)
        self._each_head(self._softmax)
        self._each_head(self._clear)
        self._each_block(item.v, item.v_row, shape.v_bytes, self._weigh)

    def _each_block(
        self, base: Value, stride: Value, head_bytes: int, body: Callable[[Value, Value], None]
    ) -> None:
        """Blocks outside, heads inside, while the rows of later blocks are on their way."""

        def run(block: Value, _: list[Value]) -> list[Value]:
            later = self.b.mul(self.b.add(block, I64(_AHEAD)), I64(BLOCK))
            self._prefetch(later, base, stride, head_bytes)
            return self._each_head(lambda head: body(block, head))

        self.x.loop(self._blocks(BLOCK), [], run)

    def _prefetch(self, first: Value, base: Value, stride: Value, head_bytes: int) -> None:
        """Ask for a block of rows from a place in the list on, even past the end of the unit."""
        b, x, item = self.b, self.x, self.item
        start = x.at(base, b.mul(item.head, I64(head_bytes)))

        def row(i: Value, _: list[Value]) -> list[Value]:
            place = self._place(start, stride, b.add(first, i))

            def head(j: Value, _: list[Value]) -> list[Value]:
                x.prefetch(x.at(place, b.mul(j, I64(head_bytes))), head_bytes)
                return []

            return x.loop(item.n_heads, [], head)

        x.loop(BLOCK, [], row)

    def _each_head(self, body: Callable[[Value], None]) -> list[Value]:
        def run(i: Value, _: list[Value]) -> list[Value]:
            body(self.b.add(self.item.head, i))
            return []

        return self.x.loop(self.item.n_heads, [], run)

    # -- scores

    def _score(self, block: Value, head: Value) -> None:
        """Scores of a block's cells, four K rows at a time."""
        b, x, item, shape = self.b, self.x, self.item, self.shape
        first = b.mul(block, I64(BLOCK))
        left = b.sub(item.n, first)
        keys = x.at(item.k, b.mul(head, I64(shape.k_bytes)))
        q = x.at(item.q, b.mul(b.mul(head, I64(shape.group)), item.q_head))
        last = b.sub(item.n, I64(1))

        def quad(i: Value, _: list[Value]) -> list[Value]:
            start = b.add(first, b.mul(i, I64(QUAD)))
            numbers = [x.smaller(b.add(start, I64(r)), last) for r in range(QUAD)]
            places = [self._place(keys, item.k_row, number) for number in numbers]
            place = x.at(item.partials, b.mul(i, I64(4 * x.lanes)))
            for heads in tiles(shape.group, max(1, shape.registers // QUAD)):
                self._products(q, places, heads, place)
            return []

        x.loop(BLOCK // QUAD, [], quad)
        for g in range(shape.group):
            self._fold_scores(g, left, self._scores_at(head, g, first))

    def _products(self, q: Value, places: list[Value], heads: range, place: Value) -> None:
        x = self.x
        rows = [Row(x, self.shape.type_k, at) for at in places]
        sums = [[x.constant(0.0)] * QUAD for _ in heads]
        queries = [x.at(q, self.b.mul(self.item.q_head, I64(g))) for g in heads]
        for start in range(0, self.shape.head_dim_k, x.lanes):
            parts = [x.load(query, 4 * start) for query in queries]
            for r, row in enumerate(rows):
                key = row.load(start)
                for own, part in zip(sums, parts, strict=True):
                    own[r] = x.fma(key, part, own[r])
        for g, own in zip(heads, sums, strict=True):
            (folded,) = x.fold(own, 2)
            x.store(folded, place, 4 * g * BLOCK // QUAD * x.lanes)

    def _fold_scores(self, g: int, left: Value, place: Value) -> None:
        """Add up the partial sums of a block; lanes that stand for no cell get -inf."""
        b, x = self.b, self.x
        n_parts = x.lanes // QUAD
        first = 4 * g * BLOCK // QUAD * x.lanes
        for at in range(0, BLOCK, x.lanes):
            parts = [
                x.load(self.item.partials, first + 4 * (at * n_parts + j * x.lanes))
                for j in range(n_parts)
            ]
            (folded,) = x.fold(parts, n_parts.bit_length() - 1, n_parts)
            score = x.in_order(folded)
            if self.shape.softcap:
                score = x.tanh(b.fmul(score, self.item.into_cap))
            score = b.fmul(score, self.item.scale)
            inside = x.in_front(b.sub(left, I64(at)))
            x.store(b.select(inside, score, x.constant(_MINUS_INF)), place, 4 * at)

    # -- weights

    def _softmax(self, head: Value) -> None:
        """Put weights in the place of scores; leave the highest score and the sum.

        A sink belongs to the token: a unit that is not alone leaves it to who adds up the parts.
        """
        b, x, shape, item = self.b, self.x, self.shape, self.item
        n_blocks = self._blocks(x.lanes)
        one, result = x.constant(1.0), self._result(head)
        for g in range(shape.group):
            scores = self._scores_at(head, g, I64(0))
            top = x.across(self._over(scores, n_blocks, _MINUS_INF, x.larger), x.larger)
            sink = self._sink(head, g)
            if sink is not None:
                top = b.select(item.alone, x.larger(sink, top), top)

            def weigh(
                i: Value, seen: list[Value], scores: Value = scores, top: Value = top
            ) -> list[Value]:
                place = x.at(scores, b.mul(i, I64(4 * x.lanes)))
                score = x.load(place)
                weight = x.exp2(b.fsub(score, top))
                hidden = b.fcmp_ordered("==", score, x.constant(_MINUS_INF))
                weight = b.select(hidden, x.constant(0.0), weight)
                x.store(weight, place)
                return [b.fadd(seen[0], weight)]

            (sums,) = x.loop(n_blocks, [x.constant(0.0)], weigh)
            total = x.across(sums, b.fadd)
            if sink is not None:
                more = b.fadd(total, x.exp2(b.fsub(sink, top)))
                total = b.select(item.alone, more, total)
            for i, value in enumerate((top, total)):
                at = 4 * (shape.group * (shape.head_dim_v + i) + g)
                x.store(b.extract_element(value, I32(0)), result, at)
            self._scale(scores, n_blocks, b.select(item.alone, b.fdiv(one, total), one))

    def _sink(self, head: Value, g: int) -> Value | None:
        return sink_of(self.x, self.shape, self.item.sinks, head, g) if self.shape.sinks else None

    def _over(
        self, place: Value, n: Value, start: float, combine: Callable[[Value, Value], Value]
    ) -> Value:
        x = self.x

        def step(i: Value, seen: list[Value]) -> list[Value]:
            return [combine(x.load(place, self.b.mul(i, I64(4 * x.lanes))), seen[0])]

        return x.loop(n, [x.constant(start)], step)[0]

    def _scale(self, place: Value, n: Value, factor: Value) -> None:
        x = self.x

        def step(i: Value, _: list[Value]) -> list[Value]:
            at = x.at(place, self.b.mul(i, I64(4 * x.lanes)))
            x.store(self.b.fmul(x.load(at), factor), at)
            return []

        x.loop(n, [], step)

    # -- values

    def _clear(self, head: Value) -> None:
        place = self._sums(head)
        for c in range(0, self.shape.group * self.shape.head_dim_v, self.x.lanes):
            self.x.store(self.x.constant(0.0), place, 4 * c)

    def _weigh(self, block: Value, head: Value) -> None:
        """Add a block's V rows by weight."""
        b, x, shape, item = self.b, self.x, self.shape, self.item
        first = b.mul(block, I64(BLOCK))
        n = x.smaller(b.sub(item.n, first), I64(BLOCK))
        values = x.at(item.v, b.mul(head, I64(shape.v_bytes)))
        weights = [self._scores_at(head, g, first) for g in range(shape.group)]
        place = self._sums(head)
        cells = x.at(item.cells, b.mul(first, I64(4)))
        most = 4 if shape.group > 1 else 8
        for part in tiles(shape.head_dim_v // x.lanes, min(shape.registers, most)):
            for heads in tiles(shape.group, max(1, shape.registers // len(part))):
                offsets = [4 * (g * shape.head_dim_v + c * x.lanes) for g in heads for c in part]
                sums = [x.load(place, offset) for offset in offsets]

                def cell(
                    i: Value, sums: list[Value], heads: range = heads, part: range = part
                ) -> list[Value]:
                    row = Row(x, shape.type_v, self._place(values, item.v_row, i, cells))
                    own = [x.scalar(F32, weights[g], b.mul(i, I64(4))) for g in heads]
                    return self._add_row(row, own, part, sums)

                for offset, value in zip(offsets, x.loop(n, sums, cell), strict=True):
                    x.store(value, place, offset)

    def _add_row(
        self, row: Row, weights: list[Value], part: range, sums: list[Value]
    ) -> list[Value]:
        x, n = self.x, len(part)
        values = [row.load(c * x.lanes) for c in part]
        result = []
        for j, weight in enumerate(weights):
            many, own = x.splat(weight), sums[j * n : (j + 1) * n]
            result += [x.fma(many, v, s) for v, s in zip(values, own, strict=True)]
        return result

    # -- places

    def _place(self, base: Value, stride: Value, i: Value, cells: Value = None) -> Value:
        cell = self.x.scalar(I32, cells or self.item.cells, self.b.mul(i, I64(4)))
        return self.x.at(base, self.b.mul(self.x.i64(cell), stride))

    def _scores_at(self, head: Value, g: int, cell: Value) -> Value:
        """Scores of a head of the group from a cell of the unit on."""
        b, item = self.b, self.item
        row = b.add(b.mul(b.sub(head, item.head), I64(self.shape.group)), I64(g))
        own = b.add(b.mul(row, item.row_of_scores), b.mul(cell, I64(4)))
        return self.x.at(item.scores, own)

    def _result(self, head: Value) -> Value:
        return self.x.at(self.item.results, self.b.mul(head, I64(4 * self.shape.item_floats)))

    def _sums(self, head: Value) -> Value:
        """Where a K/V head's weighted V is gathered."""
        own = self.b.mul(head, I64(4 * self.shape.group * self.shape.head_dim_v))
        return self.b.select(self.item.alone, self.x.at(self.item.out, own), self._result(head))

    def _blocks(self, size: int) -> Value:
        return self.b.sdiv(self.b.add(self.item.n, I64(size - 1)), I64(size))


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


def tiles(n: int, most: int) -> list[range]:
    """``range(n)`` in as few and as equal pieces of at most ``most`` as can be."""
    n_pieces = -(-n // most)
    edges = [n * i // n_pieces for i in range(n_pieces + 1)]
    return [range(edges[i], edges[i + 1]) for i in range(n_pieces)]
