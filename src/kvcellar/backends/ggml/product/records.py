"""Activations as records: two bytes a value, and a scale a block of 32."""

from __future__ import annotations

from functools import partial

from kvcellar.backends.ggml.kernel.vectors import I32, I64, Value
from kvcellar.backends.ggml.product.call import Call, begin
from kvcellar.backends.ggml.product.format import (
    HIGH,
    LANES,
    LARGEST,
    LESS,
    LOW,
    RECORD,
    TINY,
    VALUES,
)
from kvcellar.backends.ggml.product.lanes import FLOATS, INTS, Lanes


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
