"""Reading blocks of weights as LLVM IR: the same 32 values of 16 rows as bytes, with their scales.

Types with K in their name put eight blocks together, with 6-bit or 8-bit scales of their own and
one for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kvcellar.backends.ggml.kernel.vectors import I32, Value
from kvcellar.backends.ggml.product.format import VALUES, Format
from kvcellar.backends.ggml.product.lanes import FLOATS, Lanes


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
    """So many bytes of each row, four a lane."""
    words = []
    for i in range(start, start + n_bytes, 16):
        words += x.turn(_further(x, places, i))
    return words


_READERS: Mapping[str, Reader] = MappingProxyType({"q4_K": _q4_k, "q5_K": _q4_k, "q6_K": _q6_k})
