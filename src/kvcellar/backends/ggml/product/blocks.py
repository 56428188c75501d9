"""Reading blocks of weights as LLVM IR: the same 32 values of 16 rows as bytes, with their scales.

Types with K in their name put eight blocks together, with 6-bit or 8-bit scales of their own and
one for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


Reader = Callable[[Lanes, Format, Sequence[Value], Value], Block]
"""From where the rows' (super)blocks lie, and which block of them is wanted, an i64."""


def read_block(x: Lanes, form: Format, places: Sequence[Value], which: Value) -> Block:
    """A block as it lies in the file."""
    return _READERS.get(form.name, _plain)(x, form, places, which)


def _plain(x: Lanes, form: Format, places: Sequence[Value], _: Value) -> Block:
    scale, least = x.pairs(places) if form.has_min else (x.halves(places), x.constant(0.0))
    words = _sixteens(x, places, form.values_at, VALUES * form.bits // 8)
    if form.bits == 8:
        return Block([x.b.xor(w, x.ints(-0x7F7F7F80)) for w in words], scale, least)
    found = [x.part(w, shift, 0x0F) for shift in (0, 4) for w in words]
    if form.fifth_at is not None:
        bits = x.words(_further(x, places, form.fifth_at))
        fifths = (x.fifths(x.b.lshr(bits, x.ints(4 * i))) for i in range(len(found)))
        found = [x.b.or_(*each) for each in zip(found, fifths, strict=True)]
    return Block(found, scale, least)


def _k_scales(x: Lanes, places: Sequence[Value], which: Value) -> tuple[Value, Value]:
    """Scale and minimum of q4_K and q5_K: 6 bits each, the upper ones of the last four apart."""
    b = x.b
    both, *packed = x.turn(places)
    step = b.and_(which, which.type(3))
    by = x.splat_int(b.trunc(b.mul(step, step.type(8)), I32))
    scales, minimums, mixed = (b.and_(b.lshr(p, by), x.ints(0xFF)) for p in packed)

    def upper(value: Value) -> Value:
        return b.shl(b.lshr(value, x.ints(6)), x.ints(4))

    late = b.icmp_signed(">=", which, which.type(4))
    late_scale = b.or_(b.and_(mixed, x.ints(0x0F)), upper(scales))
    late_min = b.or_(b.lshr(mixed, x.ints(4)), upper(minimums))
    scale = b.select(late, late_scale, b.and_(scales, x.ints(63)))
    least = b.select(late, late_min, b.and_(minimums, x.ints(63)))
    d, d_min = x.two_halves(both)
    minus = b.fneg(b.fmul(d_min, b.sitofp(least, FLOATS)))
    return b.fmul(d, b.sitofp(scale, FLOATS)), minus


def _q4_k(x: Lanes, form: Format, places: Sequence[Value], which: Value) -> Block:
    """The low halves of 32 bytes are one block, the high ones the next."""
    b = x.b
    start = b.mul(b.ashr(which, which.type(1)), which.type(VALUES))
    words = _sixteens(x, _further(x, places, start), form.values_at, VALUES)
    shift = b.mul(b.and_(which, which.type(1)), which.type(4))
    found = [x.part(w, shift, 0x0F) for w in words]
    if form.fifth_at is not None:
        bits = _sixteens(x, places, form.fifth_at, VALUES)
        fifths = (b.shl(x.part(w, which, 1), x.ints(4)) for w in bits)
        found = [b.or_(*each) for each in zip(found, fifths, strict=True)]
    return Block(found, *_k_scales(x, places, which))


def _q6_k(x: Lanes, form: Format, places: Sequence[Value], which: Value) -> Block:
    """Four blocks have their lower bits in halves of 64 bytes, the upper ones in pairs of 32."""
    b, kind = x.b, which.type
    half, fourth = b.ashr(which, kind(2)), b.and_(which, kind(3))
    odd = b.and_(fourth, kind(1))
    start = b.add(b.mul(half, kind(64)), b.mul(odd, kind(VALUES)))
    low = _sixteens(x, _further(x, places, start), 0, VALUES)
    high = _sixteens(x, _further(x, places, b.mul(half, kind(VALUES))), 128, VALUES)
    shift = b.mul(b.ashr(fourth, kind(1)), kind(4))
    low = [x.part(w, shift, 0x0F) for w in low]
    high = [b.shl(x.part(w, b.mul(fourth, kind(2)), 3), x.ints(4)) for w in high]
    words = [b.or_(*each) for each in zip(low, high, strict=True)]
    d = x.halves(_further(x, places, form.scale_at))
    scales = x.two_bytes(_further(x, _further(x, places, 192), b.mul(which, kind(2))))
    return Block(words, *(b.fmul(d, scale) for scale in scales))


def _further(x: Lanes, places: Sequence[Value], offset: Value | int) -> list[Value]:
    return [x.at(place, offset) for place in places]


def _sixteens(x: Lanes, places: Sequence[Value], start: int, n_bytes: int) -> list[Value]:
    """So many bytes of each row, four a lane."""
    words = []
    for i in range(start, start + n_bytes, 16):
        words += x.turn(_further(x, places, i))
    return words


_READERS: Mapping[str, Reader] = MappingProxyType({"q4_K": _q4_k, "q5_K": _q4_k, "q6_K": _q6_k})
