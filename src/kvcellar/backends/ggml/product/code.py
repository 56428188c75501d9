"""Products of quantised weights and activations as LLVM IR: 16 rows of weights at a time.

Activations become two bytes each first (``records.py``), with a scale a block of 32 values. A
lane is a row of weights: four consecutive values of 16 rows meet the same four values of a token,
their high bytes and, apart from them, their low ones.

1. Activations keep 15 bits, where ggml's have 7: 3e-5 of a product is lost in place of 9e-3.
2. A token's results do not depend on which tokens are computed beside it, nor on threads: sums
   are in one order, whatever the number of tokens.
3. What is not finite stays so.
4. No byte is read outside of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvcellar.backends.ggml.kernel.vectors import F32, I32, I64, Value
from kvcellar.backends.ggml.product.blocks import Block, read_blocks
from kvcellar.backends.ggml.product.call import Call, Operand, begin
from kvcellar.backends.ggml.product.format import (
    HIGH,
    LANES,
    LESS,
    LOW,
    MOST,
    RECORD,
    VALUES,
    Format,
    unpacked_bytes,
)
from kvcellar.backends.ggml.product.lanes import FLOATS, Lanes

AHEAD = 2**14
"""Bytes between the end of 16 rows and what is asked for meanwhile; measured."""
_WORDS = VALUES // 4


def product_ir(form: Format, tokens: int, triple: str) -> str:
    """``[n, n_out]`` from weights and records; a ``ggml_custom_op_t``.

    Args:
        form: the type of the weights.
        tokens: that n is this, at most :data:`MOST`; any number when 0.
        triple: for which machine.
    """
    function, x = begin(triple)
    b, task = x.b, Call(x, function)
    rows, records = task.source(0), task.source(1)
    kernel = _Product(x, form, b.sdiv(rows.ne[0], I64(VALUES)), rows.nb[1], records.nb[1])

    def tile(i: Value) -> None:
        first = b.mul(i, I64(LANES))
        weights = x.at(rows.data, b.mul(first, rows.nb[1]))
        out = x.at(task.dst.data, b.mul(first, I64(4)))
        if tokens:
            kernel.directly(weights, records.data, out, task.dst.nb[1], tokens)
        else:
            scratch = task.scratch()
            kernel.unpack(weights, scratch)
            kernel.many(scratch, records, out, task.dst.nb[1])

    task.share(b.sdiv(rows.ne[1], I64(LANES)), tile)
    return str(function.module)


Blocks = Callable[[Value], Iterator[Block]]
"""From the number of a group of blocks."""


class _Product:
    def __init__(self, x: Lanes, form: Format, n_blocks: Value, row: Value, token: Value) -> None:
        self.x, self.b, self.form, self.n_blocks, self.token = x, x.b, form, n_blocks, token
        self.ahead = self.b.add(self.b.mul(I64(LANES), row), I64(AHEAD))
        self.starts = [self.b.mul(I64(i), row) for i in range(LANES)]

    def read(self, weights: Value, k: Value) -> Iterator[Block]:
        """Blocks of 16 rows as they lie in the file, as many as are read together."""
        x, b, form = self.x, self.b, self.form
        n_groups = form.n_blocks // form.together
        n_bytes = LANES * form.block_bytes // n_groups
        x.prefetch(x.at(x.at(weights, self.ahead), b.mul(k, I64(n_bytes))), n_bytes)
        base = x.at(weights, b.mul(b.sdiv(k, I64(n_groups)), I64(form.block_bytes)))
        places = [x.at(base, start) for start in self.starts]
        return read_blocks(x, form, places, b.srem(k, I64(n_groups)))

    def unpack(self, weights: Value, scratch: Value) -> None:
        """All blocks into scratch memory."""
        together = self.form.together

        def group(k: Value, _: list[Value]) -> list[Value]:
            at = self._place(scratch, self.b.mul(k, I64(together)))
            for i, (words, scale, other) in enumerate(self.read(weights, k)):
                start = self.x.at(at, i * unpacked_bytes(VALUES))
                for j, value in enumerate([*words, scale, other]):
                    self.x.store(value, start, 4 * LANES * j)
            return []

        self.x.loop(self.b.sdiv(self.n_blocks, I64(together)), [], group)

    def _place(self, scratch: Value, k: Value) -> Value:
        return self.x.at(scratch, self.b.mul(k, I64(unpacked_bytes(VALUES))))

    def _stored(self, scratch: Value, k: Value) -> Iterator[Block]:
        at, x = self._place(scratch, k), self.x
        words = [x.load_ints(at, 4 * LANES * i) for i in range(_WORDS)]
        yield Block(words, *(x.load(at, 4 * LANES * (_WORDS + i)) for i in range(2)))

    def directly(self, weights: Value, records: Value, out: Value, row: Value, n: int) -> None:
        """Few tokens, without scratch memory."""
        self._tokens(partial(self.read, weights), self.form.together, records, out, row, n)

    def many(self, scratch: Value, records: Operand, out: Value, row: Value) -> None:
        """Any number of tokens: as many eights as there are, then four, two and one."""
        b, x, n = self.b, self.x, records.ne[1]
        block = partial(self._stored, scratch)

        def group(first: Value, n_tokens: int) -> None:
            at = x.at(records.data, b.mul(first, self.token))
            self._tokens(block, 1, at, x.at(out, b.mul(first, row)), row, n_tokens)

        def eight(i: Value, _: list[Value]) -> list[Value]:
            group(b.mul(i, I64(MOST)), MOST)
            return []

        eights = b.sdiv(n, I64(MOST))
        with b.if_then(b.icmp_signed(">", eights, I64(0))):
            x.loop(eights, [], eight)
        size = MOST // 2
        while size:
            with b.if_then(b.icmp_signed("!=", b.and_(n, I64(size)), I64(0))):
                group(b.and_(n, I64(-2 * size)), size)
            size //= 2

    def _tokens(
        self, read: Blocks, together: int, records: Value, out: Value, row: Value, n: int
    ) -> None:
        b, x = self.b, self.x
        starts = [x.at(records, b.mul(I64(t), self.token)) for t in range(n)]

        def add(k: Value, sums: list[Value]) -> list[Value]:
            for i, block in enumerate(read(k)):
                first = b.add(b.mul(k, I64(together * RECORD)), I64(i * RECORD))
                sums = self._added(sums, block, [x.at(start, first) for start in starts])
            return sums

        n_groups = b.sdiv(self.n_blocks, I64(together))
        for t, value in enumerate(x.loop(n_groups, [x.constant(0.0)] * n, add)):
            x.store(value, out, b.mul(I64(t), row))

    def _added(self, sums: list[Value], block: Block, at: Sequence[Value]) -> list[Value]:
        """The tokens' sums with what a block adds."""
        x = self.x
        for words, scale, less, first in self._parts(block):
            dots = self._dots(words, at, less, first)
            sums = [self._scaled(*each, scale) for each in zip(sums, dots, at, strict=True)]
        if not self.form.has_min:
            return sums
        shares = [x.splat(x.scalar(F32, place, 4)) for place in at]
        return [x.fma(block.other, *each) for each in zip(shares, sums, strict=True)]

    def _parts(self, block: Block) -> list[tuple[list[Value], Value, int, int]]:
        """What has one scale: values, the scale, where its sum is, and which word is the first."""
        words, scale, other = block
        if not self.form.halved:
            return [(words, scale, LESS[0], 0)]
        half = _WORDS // 2
        return [(words[:half], scale, LESS[1], 0), (words[half:], other, LESS[2], half)]

    def _dots(
        self, words: Sequence[Value], at: Sequence[Value], less: int, first: int
    ) -> list[Value]:
        """For each token the sums of weights times activations, an i32 a row."""
        b, x = self.b, self.x
        zeros, starts = [x.ints(0)] * len(at), [self._less(place, less) for place in at]
        high = self._add_dots(zeros, words, at, HIGH + 4 * first)
        low = self._add_dots(starts, words, at, LOW + 4 * first)
        return [b.add(b.shl(h, x.ints(8)), each) for h, each in zip(high, low, strict=True)]

    def _less(self, at: Value, offset: int) -> Value:
        """What to begin with, so that weights count from their offset."""
        if self.form.has_min:
            return self.x.ints(0)
        less = self.x.splat_int(self.x.scalar(I32, at, offset))
        return self.b.shl(less, self.x.ints(self.form.shift))

    def _add_dots(
        self, dots: list[Value], words: Sequence[Value], at: Sequence[Value], part: int
    ) -> list[Value]:
        x = self.x
        for j, word in enumerate(words):
            fours = [x.splat_int(x.scalar(I32, place, part + 4 * j)) for place in at]
            dots = [x.dot(dot, word, four) for dot, four in zip(dots, fours, strict=True)]
        return dots

    def _scaled(self, total: Value, dot: Value, at: Value, scale: Value) -> Value:
        product = self.b.fmul(self.b.sitofp(dot, FLOATS), scale)
        return self.x.fma(product, self.x.splat(self.x.scalar(F32, at)), total)
