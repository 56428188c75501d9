"""The code of one item: the query heads of a group over at most :data:`UNIT` cells of a list.

Scores, then weights ``exp2(score - highest)``, then V rows by weight. A row is read and widened
once for all heads that fit the registers.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcellar.backends.ggml.kernel.shape import QUAD, UNIT, KernelShape, tiles
from kvcellar.backends.ggml.kernel.vectors import F32, I32, I64, Value, Vectors

_MINUS_INF = float("-inf")
_PARTS = UNIT // QUAD


class Item(NamedTuple):
    """What an item works on: addresses and 64-bit integers, but for ``scale``, a vector."""

    q: Value  # the group's first query head
    k: Value  # the head's values in the first K row
    v: Value
    q_head: Value  # bytes from query head to query head
    k_row: Value  # bytes from row to row
    v_row: Value
    cells: Value  # the item's part of the list
    n: Value  # cells in it
    scale: Value
    partials: Value  # the thread's memory, see KernelShape
    scores: Value
    result: Value  # where weighted V, highest scores and sums are left
    out: Value  # where attention's result belongs
    alone: Value  # whether there is no other item for the same token and heads


class ItemCode:
    """Emits the code of an item."""

    def __init__(self, x: Vectors, shape: KernelShape, item: Item) -> None:
        self.b = x.b
        self.x = x
        self.shape = shape
        self.item = item

    def emit(self) -> None:
        """Leave the result, or attention itself where the item is alone."""
        self._score()
        self._weigh(self._softmax())

    # -- scores

    def _score(self) -> None:
        """Products of the group's heads with each K row, four rows at a time."""
        b, x, item = self.b, self.x, self.item
        last = b.sub(item.n, I64(1))

        def quad(i: Value, _: list[Value]) -> list[Value]:
            numbers = [x.smaller(b.add(b.mul(i, I64(QUAD)), I64(r)), last) for r in range(QUAD)]
            rows = [self._row(item.k, item.k_row, number) for number in numbers]
            place = x.at(item.partials, b.mul(i, I64(4 * x.lanes)))
            for heads in tiles(self.shape.group, max(1, self.shape.registers // QUAD)):
                self._products(rows, heads, place)
            return []

        x.loop(self._blocks(QUAD), [], quad)

    def _products(self, rows: list[Value], heads: range, place: Value) -> None:
        x, item = self.x, self.item
        sums = [[x.constant(0.0)] * QUAD for _ in heads]
        queries = [x.at(item.q, self.b.mul(item.q_head, I64(g))) for g in heads]
        for start in range(0, self.shape.head_dim_k, x.lanes):
            parts = [x.load(query, 4 * start) for query in queries]
            for r, row in enumerate(rows):
                key = x.load_half(row, 2 * start)
                for own, part in zip(sums, parts, strict=True):
                    own[r] = x.fma(key, part, own[r])
        for g, own in zip(heads, sums, strict=True):
            (folded,) = x.fold(own, 2)
            x.store(folded, place, 4 * g * _PARTS * x.lanes)

    # -- weights

    def _softmax(self) -> list[Value]:
        """Put weights in the place of scores, leave highest scores and sums; gives the sums."""
        x, shape, item = self.x, self.shape, self.item
        n_blocks = self._blocks(x.lanes)
        low = [x.constant(_MINUS_INF)] * shape.group
        highest = [x.across(v, x.larger) for v in x.loop(n_blocks, low, self._block_scores)]
        zero = [x.constant(0.0)] * shape.group
        sums = x.loop(n_blocks, zero, lambda i, seen: self._block_weights(i, highest, seen))
        totals = [x.across(value, self.b.fadd) for value in sums]
        at = 4 * shape.group * shape.head_dim_v
        for i, value in enumerate((*highest, *totals)):
            x.store(self.b.extract_element(value, I32(0)), item.result, at + 4 * i)
        return totals

    def _block_scores(self, i: Value, seen: list[Value]) -> list[Value]:
        b, x, item = self.b, self.x, self.item
        inside = self._inside(i)
        n_parts = x.lanes // QUAD
        block = x.at(item.partials, b.mul(i, I64(4 * x.lanes * n_parts)))
        result = []
        for g, highest in enumerate(seen):
            first = 4 * g * _PARTS * x.lanes
            parts = [x.load(block, first + 4 * x.lanes * j) for j in range(n_parts)]
            (folded,) = x.fold(parts, n_parts.bit_length() - 1, n_parts)
            score = b.fmul(x.in_order(folded), item.scale)
            score = b.select(inside, score, x.constant(_MINUS_INF))
            x.store(score, self._scores_at(g, i))
            result.append(x.larger(score, highest))
        return result

    def _block_weights(self, i: Value, highest: list[Value], seen: list[Value]) -> list[Value]:
        b, x = self.b, self.x
        inside = self._inside(i)
        result = []
        for g, (top, total) in enumerate(zip(highest, seen, strict=True)):
            place = self._scores_at(g, i)
            weight = x.exp2(b.fsub(x.load(place), top))
            weight = b.select(inside, weight, x.constant(0.0))
            x.store(weight, place)
            result.append(b.fadd(total, weight))
        return result

    # -- values

    def _weigh(self, totals: list[Value]) -> None:
        """Sum V rows by weight; divided by the sum of weights where the item is alone."""
        b, x, shape, item = self.b, self.x, self.shape, self.item
        place, one = b.select(item.alone, item.out, item.result), x.constant(1.0)
        factors = [b.select(item.alone, b.fdiv(one, total), one) for total in totals]
        most = 4 if shape.group > 1 else 8
        for part in tiles(shape.head_dim_v // x.lanes, min(shape.registers, most)):
            for heads in tiles(shape.group, max(1, shape.registers // len(part))):
                sums = iter(self._weighted(heads, part))
                for g in heads:
                    for c in part:
                        at = 4 * (g * shape.head_dim_v + c * x.lanes)
                        x.store(b.fmul(next(sums), factors[g]), place, at)

    def _weighted(self, heads: range, part: range) -> list[Value]:
        b, x, n, item = self.b, self.x, len(part), self.item

        def cell(i: Value, sums: list[Value]) -> list[Value]:
            row = self._row(item.v, item.v_row, i)
            weights = x.at(item.scores, b.mul(i, I64(4)))
            values = [x.load_half(row, 2 * c * x.lanes) for c in part]
            result = []
            for j, g in enumerate(heads):
                weight = x.splat(x.scalar(F32, weights, 4 * g * UNIT))
                own = sums[j * n : (j + 1) * n]
                result += [x.fma(weight, v, s) for v, s in zip(values, own, strict=True)]
            return result

        return x.loop(item.n, [x.constant(0.0)] * (n * len(heads)), cell)

    # -- places

    def _row(self, base: Value, stride: Value, i: Value) -> Value:
        cell = self.x.scalar(I32, self.item.cells, self.b.mul(i, I64(4)))
        return self.x.at(base, self.b.mul(self.x.i64(cell), stride))

    def _scores_at(self, g: int, block: Value) -> Value:
        own = self.x.at(self.item.scores, 4 * g * UNIT)
        return self.x.at(own, self.b.mul(block, I64(4 * self.x.lanes)))

    def _inside(self, block: Value) -> Value:
        """Which lanes of a block stand for a cell."""
        return self.x.in_front(self.b.sub(self.item.n, self.b.mul(block, I64(self.x.lanes))))

    def _blocks(self, size: int) -> Value:
        return self.b.sdiv(self.b.add(self.item.n, I64(size - 1)), I64(size))
