"""The compiled kernel against attention written out in NumPy."""

from __future__ import annotations

import ctypes as c
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.backends import memory
from kvcellar.backends.ggml.jit import attention
from kvcellar.backends.ggml.jit.attention import (
    MAX_UNITS,
    AttentionKernel,
    unit_sizes,
    why_no_kernel,
)
from kvcellar.backends.ggml.jit.attention_shape import MANY, TYPES, UNIT
from kvcellar.backends.ggml.jit.compiler import ENV, Processor, why_not
from kvcellar.backends.ggml.store import from_rows, to_rows
from kvcellar.errors import AllocationError, NotSupported
from kvcellar.plan import CellLists
from kvcellar.types import AnyArray, CacheSpec, Float32Array, KVType, LayerSpec
from tests.backends.helpers import tensor_over
from tests.profiles import examples

pytest.importorskip("llvmlite", reason="llvmlite is not installed: no kernel can be compiled")

Operation = c.CFUNCTYPE(None, c.c_void_p, c.c_int, c.c_int, c.c_void_p)
TOLERANCE = 2e-6
VECTORS = {"avx512": Processor(16, 24), "avx2": Processor(8, 12), "neon": Processor(4, 24)}


@pytest.fixture(autouse=True, params=VECTORS)
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every width, whatever this processor has: LLVM cuts vectors that are too wide."""
    monkeypatch.setattr(attention, "processor", lambda: VECTORS[request.param])
    return list(VECTORS).index(request.param)


class Bench:
    """One layer of random K, V and queries, and a node that attends to them."""

    def __init__(
        self,
        lists: Sequence[Sequence[int]],
        n_head_kv: int,
        group: int,
        d: int,
        d_v: int = 0,
        *,
        softcap: float = 0.0,
        sinks: bool = False,
        type_k: KVType = KVType.F16,
        type_v: KVType = KVType.F16,
    ) -> None:
        self.lists, self.group, self.softcap, d_v = lists, group, softcap, d_v or d
        self.shared: CellLists | None = None  # the same lists, where they overlap
        rng, size = np.random.default_rng(5), max(map(max, lists)) + 1
        self.spec = CacheSpec(size, 1, (LayerSpec(n_head_kv, d, d_v),), type_k, type_v)
        self.k = _stored(rng.standard_normal((size, n_head_kv, d)), type_k)
        self.v = _stored(rng.standard_normal((size, n_head_kv, d_v)), type_v)
        self.q = rng.standard_normal((len(lists), n_head_kv * group, d)).astype(np.float32)
        self.out: Float32Array = np.zeros((len(lists), n_head_kv * group, d_v), np.float32)
        self.sinks = 3 * rng.standard_normal(n_head_kv * group).astype(np.float32)
        self.with_sinks = sinks
        self.scale = 1 / d**0.5
        self.kernel = AttentionKernel(self.spec, n_threads=8)
        made_for = {"softcap": bool(softcap), "sinks": sinks}
        self._run = Operation(self.kernel.function(0, n_head_kv * group, **made_for))
        rows: list[AnyArray] = [x.reshape(size, -1) for x in (self.k, self.v)]
        self._sources = [tensor_over(x) for x in (self.q, *rows, *[self.sinks][:sinks])]
        self._node = tensor_over(self.out)
        for i, source in enumerate(self._sources):
            self._node.src[i] = c.addressof(source)

    def run(self, n_threads: int = 1) -> Float32Array:
        """Attend, as so many threads that run one after the other."""
        self.load()
        for i in range(n_threads):
            self.step(i, n_threads)
        return np.array(self.out)

    def load(self) -> None:
        self.out[:] = 7  # what is not written shows
        apart = [np.array(cells, np.int32) for cells in self.lists]
        self.kernel.load(self.shared or CellLists.separate(apart))

    def step(self, i: int, n_threads: int) -> None:
        task = self.kernel.task(self.scale, self.softcap)
        self._run(c.addressof(self._node), i, n_threads, task)

    def expected(self) -> AnyArray:
        """The same in NumPy and double precision."""
        stored = ((self.k, self.spec.type_k), (self.v, self.spec.type_v))
        k, v = (np.repeat(_values(x, kind), self.group, axis=1) for x, kind in stored)
        rows = []
        for query, cells in zip(self.q.astype(np.float64), self.lists, strict=True):
            scores = np.einsum("hd,nhd->hn", query, k[cells]) * self.scale
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            if self.with_sinks:  # a score more, which gives nothing
                scores = np.column_stack([scores, self.sinks])
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            rows.append(np.einsum("hn,nhd->hd", weights[:, : len(cells)], v[cells]))
        return np.array(rows)


def _stored(values: AnyArray, kind: KVType) -> AnyArray:
    """``[size, n_head, d]`` as halves, or as the bytes of blocks."""
    if kind is KVType.F16:
        return values.astype(np.float16)
    size, n_head, d = values.shape
    return to_rows(values.reshape(size * n_head, d), kind).reshape(size, n_head, -1)


def _values(stored: AnyArray, kind: KVType) -> AnyArray:
    """What is stored, in double precision."""
    if kind is KVType.F16:
        return stored.astype(np.float64)
    rows = from_rows(stored.reshape(-1, stored.shape[-1]), kind)
    return rows.reshape(*stored.shape[:2], -1).astype(np.float64)


def ragged(*lengths: int) -> list[list[int]]:
    """Lists of these lengths over scattered cells, some of which are shared."""
    rng = np.random.default_rng(3)
    size = max(lengths) + 50
    return [sorted(rng.choice(size, n, replace=False).tolist()) for n in lengths]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_head_kv", "group", "d"),
    [(3, 3, 64), (4, 1, 64), (1, 8, 128), (2, 4, 96), (1, 7, 20), (2, 4, 128), (1, 1, 4)],
)
def test_equals_attention_written_out(n_head_kv: int, group: int, d: int) -> None:
    bench = Bench(ragged(1, 63, 64, 65, 200, 16, 17), n_head_kv, group, d)
    np.testing.assert_allclose(bench.run(2), bench.expected(), atol=TOLERANCE)


@pytest.mark.slow
@given(
    lists=st.lists(st.sets(st.integers(0, 150), min_size=1).map(sorted), min_size=1, max_size=5),
    n_threads=st.integers(1, 8),
)
@examples(20)
def test_any_lists_by_any_number_of_threads(lists: list[list[int]], n_threads: int) -> None:
    bench = Bench(lists, 2, 3, 32)
    np.testing.assert_allclose(bench.run(n_threads), bench.expected(), atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("softcap", "sinks", "n_threads"), [(2.5, False, 1), (0.0, True, 3), (2.5, True, 3)]
)
def test_scores_are_capped_and_sinks_take_their_share(
    softcap: float, sinks: bool, n_threads: int
) -> None:
    bench = Bench(ragged(1, 64, 65, 200, 16), 2, 3, 64, softcap=softcap, sinks=sinks)
    np.testing.assert_allclose(bench.run(n_threads), bench.expected(), atol=TOLERANCE)
    plain = Bench(bench.lists, 2, 3, 64)
    assert np.abs(bench.expected() - plain.expected()).max() > 0.1


def test_scores_of_any_size_are_capped() -> None:
    bench = Bench(ragged(90, 7), 1, 2, 32, softcap=50.0)
    q = bench.q.copy()
    for factor in (1e-3, 1e-2, 0.1, 1.0, 10.0, 1e4):
        bench.q[:] = q * np.float32(factor)
        np.testing.assert_allclose(bench.run(2), bench.expected(), atol=1e-5, err_msg=str(factor))


@pytest.mark.parametrize("n", [5, 300])
def test_a_sink_may_be_of_any_size(n: int) -> None:
    bench = Bench(ragged(n), 1, 2, 32, sinks=True)
    for sink in (-np.inf, -1e30, 30.0, 1e4):
        bench.sinks[:] = sink
        got, expected = bench.run(2), bench.expected()
        np.testing.assert_allclose(got, expected, atol=TOLERANCE, err_msg=str(sink))


@pytest.mark.parametrize("n", [5, 300])
def test_a_damaged_sink_is_not_hidden(n: int) -> None:
    bench = Bench(ragged(n), 1, 2, 32, sinks=True)
    bench.sinks[1] = np.nan
    got = bench.run(2)
    assert np.isnan(got[:, 1]).all()
    assert np.isfinite(got[:, 0]).all()


@pytest.mark.slow
@given(
    lists=st.lists(st.sets(st.integers(0, 150), min_size=1).map(sorted), min_size=1, max_size=4),
    types=st.tuples(st.sampled_from(TYPES), st.sampled_from(TYPES)),
    shape=st.sampled_from([(2, 3, 32), (1, 4, 64), (2, 1, 128), (1, 2, 256)]),
    softcap=st.sampled_from([0.0, 2.5]),
    sinks=st.booleans(),
    n_threads=st.integers(1, 3),
)
@examples(15)
def test_any_types_of_k_and_v(
    lists: list[list[int]],
    types: tuple[KVType, KVType],
    shape: tuple[int, int, int],
    softcap: float,
    sinks: bool,
    n_threads: int,
) -> None:
    type_k, type_v = types
    made_for: dict[str, Any] = {"type_k": type_k, "type_v": type_v, "sinks": sinks}
    bench = Bench(lists, *shape, softcap=softcap, **made_for)
    np.testing.assert_allclose(bench.run(n_threads), bench.expected(), atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("type_k", TYPES)
def test_each_pair_of_types(type_k: KVType, vectors: int) -> None:
    """Each type with each width, as K and as V."""
    type_v = TYPES[(TYPES.index(type_k) + vectors) % len(TYPES)]
    lists = ragged(1, 16, 65, 200)
    bench = Bench(lists, 2, 3, d=64, d_v=96, type_k=type_k, type_v=type_v)
    np.testing.assert_allclose(bench.run(2), bench.expected(), atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES[1:])
def test_every_bit_pattern_of_a_block_is_read(kind: KVType) -> None:
    bench = Bench(ragged(60, 20), 1, 2, 64, type_k=kind, type_v=kind)
    rng = np.random.default_rng(2)
    for rows in (bench.k, bench.v):
        blocks = rows.reshape(-1, kind.block_bytes)
        blocks[:, 2:] = rng.integers(0, 256, blocks[:, 2:].shape)
        scales = np.float16(0.02) * rng.choice([-1, 0, 1, 2e-5], len(blocks))
        blocks[:, :2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    assert set(range(256)) <= set(bench.k.reshape(-1, kind.block_bytes)[:, 2:].ravel().tolist())
    np.testing.assert_allclose(bench.run(2), bench.expected(), atol=TOLERANCE)


@pytest.mark.parametrize("kind", TYPES[1:])
def test_a_damaged_scale_is_not_hidden(kind: KVType) -> None:
    bench = Bench([list(range(20)), list(range(20, 90))], 1, 2, 32, type_k=kind, type_v=kind)
    for rows in (bench.k, bench.v):
        scale = rows[5, 0, :2].copy()
        rows[5, 0, :2] = np.array([np.nan], np.float16).view(np.uint8)
        got = bench.run()
        assert np.isnan(got[0]).all()
        assert np.isfinite(got[1]).all()
        rows[5, 0, :2] = scale
        assert np.isfinite(bench.run()).all()


def test_v_may_have_heads_of_another_size() -> None:
    bench = Bench(ragged(100, 3), 2, 2, d=64, d_v=48)
    np.testing.assert_allclose(bench.run(), bench.expected(), atol=TOLERANCE)


@pytest.mark.slow
def test_a_long_list_has_larger_units() -> None:
    bench = Bench(ragged(MANY * UNIT + 1, 5000, 3), 1, 2, 32)
    np.testing.assert_allclose(bench.run(3), bench.expected(), atol=TOLERANCE)


def test_unit_sizes_bound_the_units() -> None:
    lengths = np.array([1, MANY * UNIT, MANY * UNIT + 1, 10**6], np.int32)
    sizes = unit_sizes(lengths)
    assert sizes.tolist()[:3] == [UNIT, UNIT, 2 * UNIT]
    assert (-(-lengths // sizes) <= MANY).all()


def test_of_many_tokens_each_has_fewer_units() -> None:
    lengths = np.full(2048, 100 * UNIT, np.int32)
    units = -(-lengths // unit_sizes(lengths))
    assert units.max() == MAX_UNITS // 2048
    assert (unit_sizes(np.full(2 * MAX_UNITS, 1000, np.int32)) >= 1000).all()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_many_tokens_that_share_a_list(n_threads: int) -> None:
    cells = np.random.default_rng(1).permutation(400).astype(np.int32)
    ends = np.arange(101, 401, dtype=np.int32)
    starts = np.maximum(0, ends - 250).astype(np.int32)
    bench = Bench([cells[a:b].tolist() for a, b in zip(starts, ends, strict=True)], 1, 2, 8)
    apart = bench.run(n_threads)
    bench.shared = CellLists(cells, starts, ends)
    np.testing.assert_array_equal(bench.run(n_threads), apart)
    np.testing.assert_allclose(apart, bench.expected(), atol=TOLERANCE)


def test_threads_change_no_bit() -> None:
    bench = Bench(ragged(300, 1, 100), 3, 3, 64)
    once = bench.run()
    for n_threads in (2, 3, 5, 8):
        np.testing.assert_array_equal(bench.run(n_threads), once)


@pytest.mark.alone
def test_threads_at_the_same_time_change_no_bit() -> None:
    bench = Bench(ragged(600, 70, 300), 3, 3, 64)
    once = bench.run()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            bench.load()
            list(pool.map(lambda i: bench.step(i, 4), range(4)))
            np.testing.assert_array_equal(bench.out, once)


def test_lists_of_others_change_no_bit() -> None:
    lists = ragged(300, 200, 90)
    alone = Bench(lists, 2, 3, 64)
    expected = alone.run(2)
    alone.lists = [lists[0], list(range(5)), lists[2]]
    np.testing.assert_array_equal(alone.run(3)[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("n", [5, 100])
def test_nothing_but_the_lists_is_read(n: int) -> None:
    bench = Bench([list(range(0, 2 * n, 2)), list(range(1, 2 * n, 2))], 2, 3, 64)
    expected = bench.run()
    bench.k[1::2] = bench.v[1::2] = np.nan
    got = bench.run()
    np.testing.assert_array_equal(got[0], expected[0])
    assert np.isnan(got[1]).all()


@pytest.mark.parametrize("n", [5, 100])
def test_damaged_rows_of_ones_own_are_not_hidden(n: int) -> None:
    bench = Bench([list(range(n))], 1, 2, 32)
    for rows in (bench.k, bench.v):
        sound = rows[n // 2].copy()
        for value in (np.nan, np.inf):
            rows[n // 2] = value
            assert not np.isfinite(bench.run()).any()
        rows[n // 2] = sound
        assert np.isfinite(bench.run()).all()


def test_scores_of_any_size_give_finite_weights() -> None:
    bench = Bench(ragged(90, 7), 1, 2, 32)
    bench.q *= 1e4
    np.testing.assert_allclose(bench.run(2), bench.expected(), atol=1e-4)
    bench.q[:] = 0
    np.testing.assert_allclose(bench.run(2), bench.expected(), atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("refused", ["cells", "items", "counters", "threads"])
def test_memory_to_work_on_that_cannot_be_had_is_named(
    monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """And the kernel works on once it can be."""
    bench, reserve = Bench(ragged(300, 20), 2, 3, 32), AttentionKernel._reserve

    def poor(kernel: AttentionKernel, field: str, n: int) -> None:
        with monkeypatch.context() as patch:
            if field == refused:
                patch.setattr(memory, "available_bytes", lambda: 0)
            reserve(kernel, field, n)

    with monkeypatch.context() as patch:
        patch.setattr(AttentionKernel, "_reserve", poor)
        with pytest.raises(AllocationError, match="for the attention kernel"):
            bench.load()
    np.testing.assert_allclose(bench.run(2), bench.expected(), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"flash_attn": False}, "flash_attn=True"),
        ({"type_v": KVType.Q5_1}, "f16, q8_0, q4_0, not f16 and q5_1"),
        ({"type_k": KVType.F32}, "not f32 and f16"),
        ({"type_k": KVType.BF16, "type_v": KVType.Q8_0}, "not bf16 and q8_0"),
        ({"layers": (LayerSpec(1, 30, 32),)}, "heads of 30 as f16 are no multiple of 4"),
        ({"layers": (LayerSpec(1, 32, 48),), "type_v": KVType.Q4_0}, "48 as q4_0 .* of 32"),
        ({"layers": (LayerSpec(1, 32, 32), LayerSpec(1, 576, 64))}, "576 are larger than 512"),
        ({"layers": (LayerSpec(1, 96, 64, v_offset=32),)}, "V is part of K"),
    ],
)
def test_what_does_not_suit_is_named(options: dict[str, Any], reason: str) -> None:
    given_options: dict[str, Any] = {"layers": (LayerSpec(1, 32, 32),), **options}
    spec = CacheSpec(8, 1, **given_options)
    assert re.search(reason, why_no_kernel(spec) or "")
    with pytest.raises(NotSupported, match=reason):
        AttentionKernel(spec, 1)


@pytest.mark.parametrize("type_v", TYPES)
@pytest.mark.parametrize("type_k", TYPES)
def test_every_type_it_reads_suits_as_k_and_as_v(type_k: KVType, type_v: KVType) -> None:
    layers = (LayerSpec(2, 64, 32), LayerSpec(1, 512, 512))
    assert why_no_kernel(CacheSpec(8, 1, layers, type_k, type_v)) is None


def test_the_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not() is None
    monkeypatch.setenv(ENV, "off")
    assert ENV in (why_not() or "")
