"""Compiled products against the same written out in NumPy, and against ggml's."""

from __future__ import annotations

import ctypes as c
import logging
import mmap

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.backends.ggml.binding import TYPE_F32, Tensor
from kvcellar.backends.ggml.jit import product as products
from kvcellar.backends.ggml.jit.compiler import ENV, has_byte_products
from kvcellar.backends.ggml.jit.product import Products, why_no_products
from kvcellar.backends.ggml.jit.product_formats import FORMATS, LARGEST, RECORD, TINY, VALUES
from kvcellar.types import AnyArray, Float32Array, KVType
from tests.backends.ggml.jit.weights import random_rows
from tests.backends.helpers import tensor_over
from tests.profiles import examples

REASON = why_no_products()
compiled = pytest.mark.skipif(REASON is not None, reason=str(REASON))
Operation = c.CFUNCTYPE(None, c.c_void_p, c.c_int, c.c_int, c.c_void_p)
KINDS = [form.name for form in FORMATS.values()]
_RECORDS = np.dtype(
    [
        ("scale", "f4"),
        ("sum", "f4"),
        ("less", "i4"),
        ("less_by_half", "i4", 2),
        ("high", "i1", VALUES),
        ("low", "i1", VALUES),
    ]
)
PRECISION = 3e-5
"""What a product may lose, relative to its norm; one of bytes alone loses 5e-3."""


class Bench:
    """Random weights of a type, and products with them as so many threads one after the other.

    A row has ``n_in`` values, eight times as many where the type has superblocks.
    """

    def __init__(self, kind: str, n_out: int, n_in: int, n_threads: int = 1) -> None:
        number, form = next((i, form) for i, form in FORMATS.items() if form.name == kind)
        self.n_in = n_in * form.n_blocks
        self.rows = random_rows(form, n_out, n_in // VALUES)
        self.weights = dequantize(self.rows, GGMLQuantizationType(number)).astype(np.float64)
        self.n_threads = n_threads
        self._weight = tensor_over(self.rows)
        self._weight.type, self._weight.ne[0] = number, self.n_in
        self._products = Products(n_threads)

    def place(self, address: int) -> None:
        """Have the weights' bytes at an address."""
        c.memmove(address, self.rows.ctypes.data, self.rows.nbytes)
        self._weight.data = address

    def quantise(self, x: Float32Array) -> AnyArray:
        """Records ``[n, n_blocks]`` of activations."""
        records = np.full((len(x), x.shape[1] // VALUES * RECORD), 0xAA, np.uint8)
        self._run(self._products.quantise(), records, [tensor_over(x)])
        return records.view(_RECORDS)

    def multiply(self, x: Float32Array) -> Float32Array:
        """``x @ weights.T``."""
        out = np.full((len(x), self._weight.ne[1]), 7, np.float32)  # what is not written shows
        records = self.quantise(x)  # lives until the product is done
        function = self._products.multiply(self._weight, len(x))
        self._run(function, out, [self._weight, tensor_over(records.view(np.int32))])
        return out

    def _run(self, function: int, out: AnyArray, sources: list[Tensor]) -> None:
        node = tensor_over(out)
        for i, source in enumerate(sources):
            node.src[i] = c.addressof(source)
        for i in range(self.n_threads):
            Operation(function)(c.addressof(node), i, self.n_threads, self._products.task)


def activations(n: int, n_in: int) -> Float32Array:
    """Random numbers, some tokens much larger than others."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, n_in)) * 10.0 ** rng.integers(-3, 3, (n, 1))
    return x.astype(np.float32)


def numbers(records: AnyArray) -> AnyArray:
    """The whole numbers that records hold."""
    found: AnyArray = 256 * records["high"].astype(np.int32) + records["low"]
    return found


@compiled
def test_records_hold_what_the_formula_says() -> None:
    x = activations(5, 96)
    x[2, 32:64] = 0
    records = Bench("q8_0", 16, 96).quantise(x)
    values, scale = numbers(records), records["scale"]
    assert (np.abs(values).max(axis=2)[scale > 0] == LARGEST).all()
    np.testing.assert_array_equal(records["less"], -values.sum(axis=2))
    halves = values.reshape(5, 3, 2, VALUES // 2).sum(axis=3)
    np.testing.assert_array_equal(records["less_by_half"], -halves)
    np.testing.assert_array_equal(records["sum"], scale * values.sum(axis=2).astype(np.float32))
    error = np.abs(values * scale[..., None].astype(np.float64) - x.reshape(values.shape))
    assert (error <= 0.51 * scale[..., None]).all()
    assert not values[2, 1].any()
    assert scale[2, 1] == 0


@compiled
@given(x=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=VALUES, max_size=VALUES))
@examples(60)
def test_any_value_comes_back_within_half_a_step(x: list[float]) -> None:
    given = np.array([x], np.float32)
    record = Bench("q4_0", 16, VALUES).quantise(given)[0]
    step = max(float(np.abs(given).max()) / LARGEST, TINY)
    back = numbers(record) * record["scale"][:, None].astype(np.float64)
    assert (np.abs(back - given) <= 0.51 * step).all() or np.abs(given).max() < TINY


@compiled
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 9e-34, 2e-33, 1e-30, 1e30])
def test_the_smallest_values_give_nothing_odd(size: float) -> None:
    bench, x = Bench("q4_1", 16, 64), np.full((1, 64), size, np.float32)
    found, exact = bench.multiply(x), x @ bench.weights.T
    assert np.isfinite(found).all()
    most = TINY * np.abs(bench.weights).sum(axis=1).max()
    assert np.abs(found - exact).max() <= max(1e-4 * np.abs(exact).max(), most)


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 15, 31])
def test_equals_the_product_written_out(kind: str, n: int) -> None:
    bench = Bench(kind, 48, 160)
    x = activations(n, bench.n_in)
    found, size = bench.multiply(x), np.abs(x) @ np.abs(bench.weights.T)
    records = bench.quantise(x)
    scale = records["scale"][..., None].astype(np.float64)
    seen = (numbers(records) * scale).reshape(x.shape)
    assert (np.abs(found - seen @ bench.weights.T) <= 1e-6 * size).all()
    steps = np.broadcast_to(scale, numbers(records).shape).reshape(x.shape)
    lost = 0.51 * steps @ np.abs(bench.weights.T)
    assert (np.abs(found - x @ bench.weights.T) <= lost + 1e-6 * size).all()


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_out", [16, 48])
def test_nothing_behind_the_weights_is_read(kind: str, n_out: int) -> None:
    """They end where a page ends, and the next one cannot be read."""
    bench = Bench(kind, n_out, 96)
    x = activations(9, bench.n_in)
    expected, page = bench.multiply(x), mmap.PAGESIZE
    size = -(-bench.rows.nbytes // page) * page
    with mmap.mmap(-1, size + page) as memory:
        start = c.addressof(c.c_char.from_buffer(memory))
        protect = c.CDLL(None).mprotect
        protect.argtypes = (c.c_void_p, c.c_size_t, c.c_int)
        assert protect(start + size, page, 0) == 0
        bench.place(start + size - bench.rows.nbytes)
        found, alone = bench.multiply(x), bench.multiply(x[:1])
        assert protect(start + size, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(alone, expected[:1])


@pytest.mark.slow
@compiled
@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 20),
    n_tiles=st.integers(1, 5),
    n_blocks=st.integers(1, 6),
    n_threads=st.integers(1, 7),
)
@examples(40)
def test_neither_threads_nor_company_change_a_token(
    kind: str, n: int, n_tiles: int, n_blocks: int, n_threads: int
) -> None:
    shape = (16 * n_tiles, VALUES * n_blocks)
    bench = Bench(kind, *shape)
    x = activations(n, bench.n_in)
    found = Bench(kind, *shape, n_threads).multiply(x)
    alone = np.concatenate([bench.multiply(x[i : i + 1]) for i in range(n)])
    np.testing.assert_array_equal(found, alone)


@compiled
def test_rows_of_activations_may_lie_apart() -> None:
    x = activations(9, 256)
    bench = Bench("q4_1", 16, 64)
    part = x[:, 64:128]
    np.testing.assert_array_equal(bench.multiply(part), bench.multiply(part.copy()))


@compiled
def test_scratch_memory_grows_with_the_longest_row() -> None:
    small, large = Bench("q4_0", 32, 32), Bench("q4_0", 32, 640, n_threads=3)
    large._products = small._products = Products(3)
    for bench in (small, large, small):
        n_in = bench.weights.shape[1]
        x = activations(12, n_in)
        exact = x @ bench.weights.T
        assert np.linalg.norm(bench.multiply(x) - exact) <= PRECISION * np.linalg.norm(exact)


@compiled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [1, 12])
def test_what_is_not_finite_stays_so_and_harms_no_other_token(
    kind: str, bad: float, n: int
) -> None:
    bench = Bench(kind, 16, 64)
    x = activations(n, bench.n_in)
    clean = bench.multiply(x)
    x[-1, 40] = bad
    found = bench.multiply(x)
    assert not np.isfinite(found[-1]).any()
    np.testing.assert_array_equal(found[:-1], clean[:-1])


@compiled
def test_the_largest_values_do_not_overflow() -> None:
    bench = Bench("q8_0", 16, 4096)
    x = np.full((1, 4096), 3e4, np.float32)
    np.testing.assert_allclose(bench.multiply(x), x @ bench.weights.T, rtol=1e-4, atol=1)


def _described(kind: int, *ne: int) -> Tensor:
    tensor = Tensor()
    tensor.type = kind
    for i, n in enumerate([*ne, 1, 1, 1][:4]):
        tensor.ne[i] = n
    tensor.nb[0] = 4
    return tensor


def test_ggml_keeps_what_does_not_suit() -> None:
    ours = Products(1)
    x, q4_1 = _described(TYPE_F32, 64, 3), KVType.Q4_1.ggml_id
    assert ours.suits(x, _described(q4_1, 64, 32))
    assert not ours.suits(x, _described(q4_1, 64, 40))
    assert not ours.suits(x, _described(q4_1, 64, 32, 2))
    assert not ours.suits(x, _described(KVType.F16.ggml_id, 64, 32))
    assert not ours.suits(_described(TYPE_F32, 64, 3, 2), _described(q4_1, 64, 32))
    x.nb[0] = 12
    assert not ours.suits(x, _described(q4_1, 64, 32))


def test_it_can_be_turned_off_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_byte_products", lambda: False)
    monkeypatch.setattr(products, "why_not", lambda: None)
    assert why_no_products() == "this processor lacks AVX-512 VNNI"
    monkeypatch.undo()
    monkeypatch.setenv(ENV, "off")
    assert why_no_products() == f"{ENV} turns it off"


@compiled
@pytest.mark.parametrize("lacking", ["avx512f", "avx512vl", "avx512bw", "avx512vnni"])
def test_processors_that_lack_something_are_told_by_their_features(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    llvm = pytest.importorskip("llvmlite.binding")
    has = {**llvm.get_host_cpu_features(), lacking: False}
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: has)
    has_byte_products.cache_clear()
    try:
        assert why_no_products() == "this processor lacks AVX-512 VNNI"
    finally:
        has_byte_products.cache_clear()


@compiled
def test_code_lives_as_long_as_what_uses_it() -> None:
    """Two threads may compile the same at once; only one result stays in the cache."""
    weight, ours = _described(KVType.Q4_0.ggml_id, 64, 32), Products(1)
    address = ours.multiply(weight, 3)
    products._compile_product.cache_clear()
    other = Products(1).multiply(weight, 3)
    assert other != address
    assert ours._kept[address].engine.get_function_address("run") == address


@compiled
def test_compiling_happens_once_a_type_and_size(caplog: pytest.LogCaptureFixture) -> None:
    weight = _described(KVType.Q4_0.ggml_id, 64, 32)
    products._compile_product.cache_clear()
    with caplog.at_level(logging.INFO, "kvcellar.kernel"):
        first = [Products(1).multiply(weight, n) for n in (3, 9, 700)]
        assert [Products(2).multiply(weight, n) for n in (3, 9, 700)] == first
    assert first[1] == first[2] != first[0]
    assert len(caplog.records) == 2


def test_the_record_here_is_that_of_the_code() -> None:
    assert _RECORDS.itemsize == RECORD
