"""Attention by masks against the formula: windows, soft-capping, sinks, V inside of K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvcellar.backends.operations import Ops
from kvcellar.plan import CellPlan
from kvcellar.types import (
    BoolArray,
    CacheSpec,
    Float32Array,
    KVType,
    LayerSpec,
    MemorySpec,
    RopeSpec,
)
from tests.backends.ops_bench import AnyBench, Bench, OpenBench, close_to, plan_of, rows

SIZE = 256
F64 = npt.NDArray[np.float64]


@dataclass
class Case:
    """One layer, a cache full of rows, and tokens that attend to some of them.

    The tokens' own rows go to scattered cells; the second layer of the cache stays empty.
    """

    layer: LayerSpec
    n: int
    n_head: int
    softcap: float = 0.0
    with_sinks: bool = False
    scale: float = 0.4

    def __post_init__(self) -> None:
        layer, n = self.layer, self.n
        self.q = rows(n, self.n_head, layer.head_dim_k, seed=1)
        self.k = rows(SIZE, layer.n_head_kv, layer.head_dim_k, seed=2)
        self.v = rows(SIZE, layer.n_head_kv, layer.head_dim_v, seed=3)
        if layer.v_offset is not None:
            self.v = self.k[..., layer.v_offset : layer.v_offset + layer.head_dim_v]
        self.sinks = rows(self.n_head, seed=4) * 3 if self.with_sinks else None
        rng = np.random.default_rng(n)
        self.cells = rng.permutation(SIZE)[:n].astype(np.int64)
        self.visible: BoolArray = rng.random((n, SIZE)) < 0.3
        self.visible[np.arange(n), self.cells] = True

    def spec(self, kind: KVType = KVType.F32, *, flash_attn: bool = True) -> CacheSpec:
        return CacheSpec(SIZE, 1, (self.layer, self.layer), kind, kind, flash_attn)

    def run(self, bench: AnyBench) -> Float32Array:
        """Fill the cache with all rows but the tokens' own, and let those attend."""
        (store,), layer, n = bench.memory.groups, self.layer, self.n
        others = np.setdiff1d(np.arange(SIZE), self.cells)
        k, v = self.k.reshape(SIZE, -1), self.v.reshape(SIZE, -1)[:, : layer.n_embd_v]
        store.write(1, others, k[others], v[others])
        sinks = None if self.sinks is None else bench.weight(self.sinks)

        def forward(ops: Ops[Any], x: Any) -> Any:
            q, new_k, *new_v = ops.split(x, [n for n in sizes if n])
            values = ops.heads(new_v[0], layer.n_head_kv) if new_v else None
            keys = ops.heads(new_k, layer.n_head_kv)
            queries = ops.heads(q, self.n_head)
            return ops.attention(
                1, queries, keys, values, self.scale, softcap=self.softcap, sinks=sinks
            )

        sizes = [self.n_head * layer.head_dim_k, layer.n_embd_k, layer.n_embd_v]
        x = np.concatenate([self.q.reshape(n, -1), k[self.cells], v[self.cells]], axis=1)
        mask = np.where(self.visible, 0, -np.inf).astype(np.float16)
        return bench.run(forward, plan_of(x, [CellPlan(self.cells, mask)]))

    def expected(self) -> F64:
        """The formula, a head at a time, in double precision."""
        group = self.n_head // self.layer.n_head_kv
        out = np.empty((self.n, self.n_head, self.layer.head_dim_v))
        for h in range(self.n_head):
            k, v = (x[:, h // group].astype(np.float64) for x in (self.k, self.v))
            scores = self.q[:, h].astype(np.float64) @ k.T * self.scale
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            weights = np.exp(np.where(self.visible, scores, -np.inf))
            sink = 0.0 if self.sinks is None else np.exp(np.float64(self.sinks[h]))
            out[:, h] = weights @ v / (weights.sum(axis=1, keepdims=True) + sink)
        return out.reshape(self.n, -1)


def _compare(case: Case, open_bench: OpenBench, spec: CacheSpec, tolerance: float = 1e-5) -> None:
    close_to(case.run(open_bench(MemorySpec.single(spec))), case.expected(), tolerance)


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("n", [1, 5, 40, 70])
@pytest.mark.parametrize(("softcap", "sinks"), [(0, False), (2.5, False), (0, True), (2.5, True)])
def test_scores_are_capped_and_sinks_take_their_share(
    open_bench: OpenBench, flash_attn: bool, n: int, softcap: float, sinks: bool
) -> None:
    case = Case(LayerSpec(2, 16, 8), n, 6, softcap, sinks)
    _compare(case, open_bench, case.spec(flash_attn=flash_attn))


def test_capping_and_sinks_are_not_small_effects() -> None:
    layer = LayerSpec(2, 16, 8)
    plain = Case(layer, 5, 6).expected()
    for other in (Case(layer, 5, 6, 2.5), Case(layer, 5, 6, 0.0, True)):
        assert np.abs(other.expected() - plain).max() > 0.1


@pytest.mark.parametrize(("kind", "tolerance"), [(KVType.F16, 5e-3), (KVType.Q8_0, 3e-2)])
@pytest.mark.parametrize("n", [3, 70])
def test_smaller_types_too(open_bench: OpenBench, kind: KVType, tolerance: float, n: int) -> None:
    case = Case(LayerSpec(2, 64, 32), n, 4, 2.5, True, scale=0.125)
    _compare(case, open_bench, case.spec(kind), tolerance)


INSIDE = {
    "in front": LayerSpec(1, 24, 16, v_offset=0),
    "behind": LayerSpec(1, 24, 16, v_offset=8),
    "several heads": LayerSpec(2, 24, 16, v_offset=4),
    "deepseek2": LayerSpec(1, 576, 512, RopeSpec("normal", 64), v_offset=64),
}


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("n", [1, 70])
@pytest.mark.parametrize("layer", INSIDE.values(), ids=INSIDE)
def test_v_may_be_part_of_k(
    open_bench: OpenBench, layer: LayerSpec, n: int, flash_attn: bool
) -> None:
    case = Case(layer, n, 4, scale=layer.head_dim_k**-0.5)
    _compare(case, open_bench, case.spec(flash_attn=flash_attn))


@pytest.mark.parametrize(
    ("kind", "tolerance"), [(KVType.F16, 5e-3), (KVType.BF16, 2e-2), (KVType.Q8_0, 3e-2)]
)
@pytest.mark.parametrize("n", [1, 70])
@pytest.mark.parametrize(
    "layer",
    [
        LayerSpec(1, 192, 128, v_offset=64),  # under a Hadamard transform where quantised
        LayerSpec(1, 96, 64, v_offset=32),  # without
        LayerSpec(1, 576, 512, v_offset=64),
    ],
)
def test_v_may_be_part_of_k_of_any_type(
    open_bench: OpenBench, layer: LayerSpec, kind: KVType, tolerance: float, n: int
) -> None:
    case = Case(layer, n, 4, scale=layer.head_dim_k**-0.5)
    _compare(case, open_bench, case.spec(kind), tolerance)


@pytest.mark.parametrize("layer", [LayerSpec(1, 16, 16), LayerSpec(1, 16, 16, v_offset=0)])
def test_v_is_given_unless_it_is_part_of_k(open_bench: OpenBench, layer: LayerSpec) -> None:
    bench = open_bench(MemorySpec.single(CacheSpec(SIZE, 1, (layer,))))

    def forward(ops: Ops[Any], x: Any) -> Any:
        heads = ops.heads(x, 1)
        return ops.attention(0, heads, heads, heads if layer.v_offset is not None else None, 1.0)

    cells = CellPlan(np.zeros(1, np.int64), np.zeros((1, SIZE), np.float16))
    with pytest.raises(AssertionError, match="part of k" if isinstance(bench, Bench) else None):
        bench.run(forward, plan_of(rows(1, 16), [cells]))
