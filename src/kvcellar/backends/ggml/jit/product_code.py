"""Products of quantised weights and activations as LLVM IR: 16 rows of weights at a time.

First activations become records (:func:`quantise_ir`): two bytes a value, and a scale a block of 32
values. Then a lane is a row of weights (:func:`product_ir`): four consecutive values of 16 rows
meet the same four values of a token, their high bytes and, apart from them, their low ones.

1. Activations keep 15 bits, where ggml's have 7: 3e-5 of a product is lost in place of 9e-3.
2. A token's results do not depend on which tokens are computed beside it, nor on threads: sums
   are in one order, whatever the number of tokens.
3. What is not finite stays so.
4. No byte is read outside of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from llvmlite import ir

from kvcellar.backends.ggml.binding import Tensor
from kvcellar.backends.ggml.jit.ir import F32, I32, I64, POINTER, Operand, Value, custom_op
from kvcellar.backends.ggml.jit.lanes import FLOATS, INTS, Lanes
from kvcellar.backends.ggml.jit.product_formats import (
    HIGH,
    LANES,
    LARGEST,
    LESS,
    LOW,
    MOST,
    RECORD,
    TINY,
    VALUES,
    Format,
    unpacked_bytes,
)

FUNCTION = "run"
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


def quantise_ir(triple: str) -> str:
    """Activations to records, ``[n, n_in / 32]`` of them; a ``ggml_custom_op_t``."""
    function, x = begin(triple)
    b, task = x.b, Call(x, function)
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
    sums = [x.across(part, b.add) for part in found]
    total = b.add(*sums)
    first = partial(b.extract_element, idx=I32(0))
    x.store(first(scale), go)
    x.store(first(b.fmul(scale, b.sitofp(total, FLOATS))), go, 4)
    for at, part in zip(LESS, (total, *sums), strict=True):
        x.store(first(b.sub(x.ints(0), part)), go, at)
    for i, part in enumerate(found):
        high = b.ashr(b.add(part, x.ints(128)), x.ints(8))
        x.store(x.bytes(high), go, HIGH + i * LANES)
        x.store(x.bytes(part), go, LOW + i * LANES)


class Block(NamedTuple):
    """A block of 16 rows.

    Attributes:
        words: its values without sign, four a lane.
        scale: that of each row; of the first half where each half has one.
        other: the second half's scale, or the minimum.
    """

    words: list[Value]
    scale: Value
    other: Value


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


Reader = Callable[[Lanes, Format, Sequence[Value], Value], Iterator[Block]]
"""From where the rows' (super)blocks lie, and which blocks of them are wanted, an i64."""


def read_blocks(x: Lanes, form: Format, places: Sequence[Value], which: Value) -> Iterator[Block]:
    """As many blocks as are read together, as they lie in the file."""
    return _READERS.get(form.name, _plain)(x, form, places, which)


def _plain(x: Lanes, form: Format, places: Sequence[Value], _: Value) -> Iterator[Block]:
    scale, least = x.pairs(places) if form.has_min else (x.halves(places), x.constant(0.0))
    words = _sixteens(x, places, form.values_at, VALUES * form.bits // 8)
    if form.bits == 8:
        yield Block([x.b.xor(w, x.ints(-0x7F7F7F80)) for w in words], scale, least)
        return
    found = [x.part(w, shift, 0x0F) for shift in (0, 4) for w in words]
    if form.fifth_at is not None:
        bits = x.words(_further(x, places, form.fifth_at))
        fifths = (x.fifths(x.b.lshr(bits, x.ints(4 * i))) for i in range(len(found)))
        found = [x.b.or_(*each) for each in zip(found, fifths, strict=True)]
    yield Block(found, scale, least)


def _q4_k(x: Lanes, form: Format, places: Sequence[Value], half: Value) -> Iterator[Block]:
    """Four blocks: the low halves of 32 bytes are one, the high ones the next."""
    b, kind = x.b, half.type
    chunks = _further(x, places, b.mul(half, kind(64)))
    head = x.turn(places)
    fifths: list[Value] = []
    if form.fifth_at is not None:
        by = x.splat_int(b.trunc(b.mul(half, kind(4)), I32))
        fifths = [b.lshr(w, by) for w in _sixteens(x, places, form.fifth_at, VALUES)]
    words: list[Value] = []
    for i in range(4):
        if i % 2 == 0:
            words = _sixteens(x, chunks, form.values_at + VALUES * (i // 2), VALUES)
        found = [x.part(w, 4 * (i % 2), 0x0F) for w in words]
        if fifths:
            upper = (b.shl(x.part(w, i, 1), x.ints(4)) for w in fifths)
            found = [b.or_(*each) for each in zip(found, upper, strict=True)]
        yield Block(found, *_k_scales(x, head, half, i))


def _k_scales(x: Lanes, head: Sequence[Value], half: Value, i: int) -> tuple[Value, Value]:
    """Scale and minimum of q4_K and q5_K: 6 bits each, the upper ones of the last four apart."""
    b = x.b
    both, *packed = head
    scales, minimums, mixed = (b.and_(b.lshr(p, x.ints(8 * i)), x.ints(0xFF)) for p in packed)

    def upper(value: Value) -> Value:
        return b.shl(b.lshr(value, x.ints(6)), x.ints(4))

    late = b.icmp_signed("!=", half, half.type(0))
    late_scale = b.or_(b.and_(mixed, x.ints(0x0F)), upper(scales))
    late_min = b.or_(b.lshr(mixed, x.ints(4)), upper(minimums))
    scale = b.select(late, late_scale, b.and_(scales, x.ints(63)))
    least = b.select(late, late_min, b.and_(minimums, x.ints(63)))
    d, d_min = x.two_halves(both)
    minus = b.fneg(b.fmul(d_min, b.sitofp(least, FLOATS)))
    return b.fmul(d, b.sitofp(scale, FLOATS)), minus


def _q6_k(x: Lanes, form: Format, places: Sequence[Value], half: Value) -> Iterator[Block]:
    """Four blocks have their lower bits in halves of 64 bytes, the upper ones in pairs of 32."""
    b, kind = x.b, half.type
    low = _sixteens(x, _further(x, places, b.mul(half, kind(64))), 0, 2 * VALUES)
    high = _sixteens(x, _further(x, places, b.mul(half, kind(VALUES))), 128, VALUES)
    d = x.halves(_further(x, places, form.scale_at))
    eighths, late = x.turn(_further(x, places, 192)), b.icmp_signed("!=", half, kind(0))
    scales = [b.select(late, *each) for each in zip(eighths[2:], eighths[:2], strict=True)]
    for i in range(4):
        odd = len(high) * (i % 2)
        lower = [x.part(w, 4 * (i // 2), 0x0F) for w in low[odd : odd + len(high)]]
        upper = (b.shl(x.part(w, 2 * i, 3), x.ints(4)) for w in high)
        words = [b.or_(*each) for each in zip(lower, upper, strict=True)]
        first = 2 * (i % 2)
        own = [x.signed_byte(scales[i // 2], first + j) for j in range(2)]
        yield Block(words, *(b.fmul(d, scale) for scale in own))


def _further(x: Lanes, places: Sequence[Value], offset: Value | int) -> list[Value]:
    return [x.at(place, offset) for place in places]


def _sixteens(x: Lanes, places: Sequence[Value], start: int, n_bytes: int) -> list[Value]:
    """``n_bytes`` of each row, four a lane."""
    words = []
    for i in range(start, start + n_bytes, 16):
        words += x.turn(_further(x, places, i))
    return words


_READERS: Mapping[str, Reader] = MappingProxyType({"q4_K": _q4_k, "q5_K": _q4_k, "q6_K": _q6_k})


class Call:
    """The arguments of a ``ggml_custom_op_t``."""

    def __init__(self, x: Lanes, function: ir.Function) -> None:
        self.x = x
        self._dst, ith, nth, self._task = function.args
        self.ith, self.nth = x.i64(ith), x.i64(nth)
        self.dst = Operand(x, self._dst, 2)

    def source(self, i: int) -> Operand:
        """A source of the node."""
        address = self.x.scalar(POINTER, self._dst, Tensor.src.offset + 8 * i)
        return Operand(self.x, address, 2)

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
    made = custom_op("product", FUNCTION, triple)
    return made, Lanes(ir.IRBuilder(made.append_basic_block("entry")))
