"""The code of one piece of work: some K/V heads over a unit of a list.

Scores, then weights ``exp2(score - highest)``, then V rows by weight. Cells are taken in blocks,
heads inside, so that rows are read as they lie in memory; a row is widened once for all heads of a
group that fit the registers.

Reading K and V rows as floats, whatever type they are stored as.

q8_0 and q4_0 are blocks of 32 values: a half that all are multiplied by, then 32 signed bytes, or
16 bytes whose low halves are the first 16 values and whose high halves are the others, plus 8. A
product of such a value and its scale is exact in f32.

What a kernel is made for, and the memory it needs; sizes that both sides have to agree on.
"""

from __future__ import annotations

from collections.abc import Callable
from math import e, log2
from typing import NamedTuple

from llvmlite import ir

from kvcellar.backends.ggml.jit.ir import BYTE, F32, HALF, I32, I64, Value, Vectors
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
    """What a kernel is made for."""

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

    def thread_bytes(self, n_head_kv: int, unit: int) -> int:
        """Bytes a thread needs: partial sums, then scores of all heads."""
        return 4 * (self.partial_floats + n_head_kv * self.group * unit)


def tiles(n: int, most: int) -> list[range]:
    """``range(n)`` in as few and as equal pieces of at most ``most`` as can be."""
    n_pieces = -(-n // most)
    edges = [n * i // n_pieces for i in range(n_pieces + 1)]
    return [range(edges[i], edges[i + 1]) for i in range(n_pieces)]


_AHEAD = PREFETCHED // BLOCK - 1
LOG2_E = log2(e)
"""Weights are powers of two, so scores are in these units."""
_MINUS_INF = float("-inf")


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
