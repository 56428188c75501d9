"""Products of quantised weights and activations as LLVM IR: 16 rows of weights at a time.

Activations become two bytes each first (:func:`quantise_ir`), with a scale a block of 32 values. A
lane is a row of weights: four consecutive values of 16 rows meet the same four values of a token,
their high bytes and, apart from them, their low ones.

1. Activations keep 15 bits, where ggml's have 7: what is lost is no more than f32 loses in a sum.
2. A token's results do not depend on which tokens are computed beside it, nor on threads: sums
   are in one order, whatever the number of tokens.
3. What is not finite stays so.
4. No byte is read outside of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir

from kvcellar.backends.ggml.binding import Tensor
from kvcellar.backends.ggml.kernel.vectors import F32, I32, I64, POINTER, Value
from kvcellar.backends.ggml.product.format import (
    HIGH,
    LANES,
    LARGEST,
    LOW,
    MOST,
    RECORD,
    TINY,
    VALUES,
    Format,
    unpacked_bytes,
)
from kvcellar.backends.ggml.product.lanes import FLOATS, INTS, Lanes

FUNCTION = "run"
AHEAD = 2**14
"""Bytes between the end of 16 rows and what is asked for meanwhile; measured."""
_WORDS = VALUES // 4


def quantise_ir(triple: str) -> str:
    """Activations to records, ``[n, n_in / 32]`` of them; a ``ggml_custom_op_t``."""
    function, x = _function(triple)
    b, task = x.b, _Call(x, function)
    dst, src = task.dst, task.source(0)
    n_blocks = b.sdiv(src.ne[0], I64(VALUES))

    def token(i: Value) -> None:
        come, go = x.at(src.data, b.mul(i, src.nb[1])), x.at(dst.data, b.mul(i, dst.nb[1]))

        def block(k: Value, _: list[Value]) -> list[Value]:
            at = x.at(come, b.mul(k, I64(4 * VALUES)))
            _quantise(x, at, x.at(go, b.mul(k, I64(RECORD))))
            return []

        x.loop(n_blocks, [], block)

    task.share(src.ne[1], token)
    return str(function.module)


def _quantise(x: Lanes, come: Value, go: Value) -> None:
    b = x.b
    values = [x.load(come, 4 * i) for i in range(0, VALUES, LANES)]
    bits = [b.and_(b.bitcast(v, INTS), x.ints(0x7FFFFFFF)) for v in values]

    def larger(one: Value, other: Value) -> Value:  # bits of NaN are above all others
        return b.select(b.icmp_unsigned(">", one, other), one, other)

    top = b.bitcast(x.across(larger(*bits), larger), FLOATS)
    scale = b.fmul(top, x.constant(1 / LARGEST))
    tiny = b.fcmp_ordered("<", top, x.constant(TINY))
    inverse = b.select(tiny, x.constant(0.0), b.fdiv(x.constant(LARGEST), top))
    found = [b.fptosi(x.rint(b.fmul(v, inverse)), INTS) for v in values]
    total = x.across(b.add(*found), b.add)
    first = partial(b.extract_element, idx=I32(0))
    x.store(first(scale), go)
    x.store(first(b.fmul(scale, b.sitofp(total, FLOATS))), go, 4)
    x.store(first(b.sub(x.ints(0), total)), go, 8)
    for i, part in enumerate(found):
        high = b.ashr(b.add(part, x.ints(128)), x.ints(8))
        x.store(x.bytes(high), go, HIGH + i * LANES)
        x.store(x.bytes(part), go, LOW + i * LANES)


def product_ir(form: Format, tokens: int, triple: str) -> str:
    """``[n, n_out]`` from weights and records; a ``ggml_custom_op_t``.

    Args:
        form: the type of the weights.
        tokens: that n is this, at most :data:`MOST`; any number when 0.
        triple: for which machine.
    """
    function, x = _function(triple)
    b, task = x.b, _Call(x, function)
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


Block = tuple[list[Value], Value, Value]
"""Values of 16 rows, four a lane; their scales; their minimums."""


class _Product:
    def __init__(self, x: Lanes, form: Format, n_blocks: Value, row: Value, token: Value) -> None:
        self.x, self.b, self.form, self.n_blocks, self.token = x, x.b, form, n_blocks, token
        self.ahead = self.b.add(self.b.mul(I64(LANES), row), I64(AHEAD))
        self.starts = [self.b.mul(I64(i), row) for i in range(LANES)]

    def read(self, weights: Value, k: Value) -> Block:
        """A block of 16 rows as it lies in the file."""
        x, b, form = self.x, self.b, self.form
        base = x.at(weights, b.mul(k, I64(form.block_bytes)))
        share = b.mul(k, I64(LANES * form.block_bytes))
        x.prefetch(x.at(x.at(weights, self.ahead), share), LANES * form.block_bytes)
        places = [x.at(base, start) for start in self.starts]
        if form.has_min:
            scale, least = x.pairs(places)
        else:
            scale, least = x.halves(places), x.constant(0.0)
        return self._values(places), scale, least

    def _values(self, places: Sequence[Value]) -> list[Value]:
        """The bytes of a block at each place, four a lane, without a sign."""
        x, b, form = self.x, self.b, self.form
        words = []
        for i in range(0, VALUES * form.bits // 8, 16):
            words += x.turn([x.at(place, form.values_at + i) for place in places])
        if form.bits == 8:
            return [b.xor(w, x.ints(-0x7F7F7F80)) for w in words]
        mask = x.ints(0x0F0F0F0F)
        low = [b.and_(w, mask) for w in words]
        found = low + [b.and_(b.lshr(w, x.ints(4)), mask) for w in words]
        if form.fifth_at is None:
            return found
        fifths = x.words([x.at(place, form.fifth_at) for place in places])
        return [b.or_(w, x.fifths(b.lshr(fifths, x.ints(4 * i)))) for i, w in enumerate(found)]

    def unpack(self, weights: Value, scratch: Value) -> None:
        """All blocks into scratch memory."""

        def block(k: Value, _: list[Value]) -> list[Value]:
            at = self._place(scratch, k)
            words, scale, least = self.read(weights, k)
            for i, value in enumerate([*words, scale, least]):
                self.x.store(value, at, 4 * LANES * i)
            return []

        self.x.loop(self.n_blocks, [], block)

    def _place(self, scratch: Value, k: Value) -> Value:
        return self.x.at(scratch, self.b.mul(k, I64(unpacked_bytes(VALUES))))

    def _stored(self, scratch: Value, k: Value) -> Block:
        at, x = self._place(scratch, k), self.x
        words = [x.load_ints(at, 4 * LANES * i) for i in range(_WORDS)]
        return words, x.load(at, 4 * LANES * _WORDS), x.load(at, 4 * LANES * (_WORDS + 1))

    def directly(self, weights: Value, records: Value, out: Value, row: Value, n: int) -> None:
        """Few tokens, without scratch memory."""
        self._tokens(partial(self.read, weights), records, out, row, n)

    def many(self, scratch: Value, records: _Tensor, out: Value, row: Value) -> None:
        """Any number of tokens: as many eights as there are, then four, two and one."""
        b, x, n = self.b, self.x, records.ne[1]
        block = partial(self._stored, scratch)

        def group(first: Value, n_tokens: int) -> None:
            at = x.at(records.data, b.mul(first, self.token))
            self._tokens(block, at, x.at(out, b.mul(first, row)), row, n_tokens)

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
        self, block: Callable[[Value], Block], records: Value, out: Value, row: Value, n: int
    ) -> None:
        b, x = self.b, self.x
        starts = [x.at(records, b.mul(I64(t), self.token)) for t in range(n)]

        def add(k: Value, sums: list[Value]) -> list[Value]:
            words, scale, least = block(k)
            at = [x.at(start, b.mul(k, I64(RECORD))) for start in starts]
            dots = self._dots(words, at)
            return [self._scaled(*each, scale, least) for each in zip(sums, dots, at, strict=True)]

        for t, value in enumerate(x.loop(self.n_blocks, [x.constant(0.0)] * n, add)):
            x.store(value, out, b.mul(I64(t), row))

    def _dots(self, words: Sequence[Value], at: Sequence[Value]) -> list[Value]:
        """For each token the sums of weights times activations, an i32 a row."""
        b, x = self.b, self.x
        high = self._add_dots([x.ints(0)] * len(at), words, at, HIGH)
        low = self._add_dots([self._less(place) for place in at], words, at, LOW)
        return [b.add(b.shl(h, x.ints(8)), each) for h, each in zip(high, low, strict=True)]

    def _less(self, at: Value) -> Value:
        """What to begin with, so that weights count from their offset."""
        if self.form.has_min:
            return self.x.ints(0)
        less = self.x.splat_int(self.x.scalar(I32, at, 8))
        return self.b.shl(less, self.x.ints(self.form.shift))

    def _add_dots(
        self, dots: list[Value], words: Sequence[Value], at: Sequence[Value], part: int
    ) -> list[Value]:
        x = self.x
        for j, word in enumerate(words):
            fours = [x.splat_int(x.scalar(I32, place, part + 4 * j)) for place in at]
            dots = [x.dot(dot, word, four) for dot, four in zip(dots, fours, strict=True)]
        return dots

    def _scaled(self, total: Value, dot: Value, at: Value, scale: Value, least: Value) -> Value:
        b, x = self.b, self.x
        product = b.fmul(b.sitofp(dot, FLOATS), scale)
        total = x.fma(product, x.splat(x.scalar(F32, at)), total)
        if self.form.has_min:
            total = x.fma(least, x.splat(x.scalar(F32, at, 4)), total)
        return total


class _Tensor:
    """The fields of a ``ggml_tensor`` that are used, loaded once."""

    def __init__(self, x: Lanes, address: Value) -> None:
        self.data = x.scalar(POINTER, address, Tensor.data.offset)
        self.ne = [x.scalar(I64, address, Tensor.ne.offset + 8 * i) for i in range(2)]
        self.nb = [x.scalar(I64, address, Tensor.nb.offset + 8 * i) for i in range(2)]


class _Call:
    """What a ``ggml_custom_op_t`` is called with."""

    def __init__(self, x: Lanes, function: ir.Function) -> None:
        self.x = x
        self._dst, ith, nth, self._task = function.args
        self.ith, self.nth = x.i64(ith), x.i64(nth)
        self.dst = _Tensor(x, self._dst)

    def source(self, i: int) -> _Tensor:
        return _Tensor(self.x, self.x.scalar(POINTER, self._dst, Tensor.src.offset + 8 * i))

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


def _function(triple: str) -> tuple[ir.Function, Lanes]:
    module = ir.Module("product")
    module.triple = triple
    kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, POINTER])
    function = ir.Function(module, kind, FUNCTION)
    return function, Lanes(ir.IRBuilder(function.append_basic_block("entry")))
