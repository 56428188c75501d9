"""Attention over lists, as a node of a graph, with K and V of each type.

The oracle reads the stored rows back, so that only the order of sums differs from it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvcellar.backends.base import Part
from kvcellar.backends.ggml.jit.attention_shape import TYPES
from kvcellar.backends.ggml.jit.compiler import why_not
from kvcellar.backends.operations import Ops
from kvcellar.plan import CellLists, CellPlan
from kvcellar.types import BoolArray, CacheSpec, Float32Array, KVType, LayerSpec, MemorySpec
from tests.backends.ggml.ops_bench import Bench, close_to, plan_of, rows

pytestmark = pytest.mark.skipif(why_not() is not None, reason="no kernel here")

SIZE, N, N_HEAD, N_HEAD_KV = 256, 5, 6, 2
SCALE = 0.15
PARTS: tuple[Part, Part] = ("k", "v")
CELLS = np.random.default_rng(1).permutation(SIZE)[:N].astype(np.int64)
FLASH = {KVType.F16: 2e-3, KVType.Q8_0: 2e-2, KVType.Q4_0: 2e-2}
"""ggml rounds queries to the like of K's type, as a share of the largest output."""


def visible() -> BoolArray:
    """A third of the cells, and what each token wrote itself; the first token sees no other."""
    seen: BoolArray = np.random.default_rng(2).random((N, SIZE)) < 0.3
    seen[0] = False
    seen[np.arange(N), CELLS] = True
    return seen


def cell_plan(*, lists: bool) -> CellPlan:
    seen = visible()
    if not lists:
        return CellPlan(CELLS, np.where(seen, 0, -np.inf).astype(np.float16))
    cells = CellLists.separate([np.flatnonzero(row).astype(np.int32) for row in seen])
    return CellPlan(CELLS, np.empty((N, 0), np.float16), cells)


class Attention:
    """Random rows in a cache, and tokens that write theirs and attend."""

    def __init__(self, bench: Bench, layer: LayerSpec, softcap: float, *, sinks: bool) -> None:
        (self.store,) = bench.memory.groups
        self.bench, self.layer, self.softcap = bench, layer, softcap
        self.sinks = 2 * rows(N_HEAD, seed=4) if sinks else None
        others = np.setdiff1d(np.arange(SIZE), CELLS)
        sizes = (layer.n_embd_k, layer.n_embd_v)
        k, v = (rows(len(others), n, seed=n + i) for i, n in enumerate(sizes))
        self.store.write(0, others, k, v)
        self.sizes = [N_HEAD * layer.head_dim_k, *sizes]
        self.x = rows(N, sum(self.sizes), seed=3)

    def run(self, *, lists: bool) -> Float32Array:
        sinks = None if self.sinks is None else self.bench.weight(self.sinks)

        def forward(ops: Ops[int], x: int) -> int:
            q, k, v = ops.split(x, self.sizes)
            heads = (ops.heads(q, N_HEAD), ops.heads(k, N_HEAD_KV), ops.heads(v, N_HEAD_KV))
            return ops.attention(0, *heads, SCALE, softcap=self.softcap, sinks=sinks)

        return self.bench.run(forward, plan_of(self.x, [cell_plan(lists=lists)]))

    def expected(self) -> npt.NDArray[np.float64]:
        """The formula in double precision, over the rows that are stored now."""
        stored = (self.store.read(0, part, np.arange(SIZE)) for part in PARTS)
        group = N_HEAD // N_HEAD_KV
        by_head = (x.astype(np.float64).reshape(SIZE, N_HEAD_KV, -1) for x in stored)
        k, v = (np.repeat(x, group, axis=1) for x in by_head)
        q = self.x[:, : self.sizes[0]].astype(np.float64).reshape(N, N_HEAD, -1)
        scores = np.einsum("nhd,chd->nhc", q, k) * SCALE
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        weights = np.exp(np.where(visible()[:, np.newaxis], scores, -np.inf))
        sink = np.zeros(N_HEAD) if self.sinks is None else np.exp(self.sinks.astype(np.float64))
        weights /= weights.sum(axis=2, keepdims=True) + sink[:, np.newaxis]
        out: npt.NDArray[np.float64] = np.einsum("nhc,chd->nhd", weights, v).reshape(N, -1)
        return out


@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (2.5, False), (2.5, True)])
@pytest.mark.parametrize("layer", [LayerSpec(2, 128, 64), LayerSpec(2, 32, 96)], ids=str)
@pytest.mark.parametrize("type_v", TYPES)
@pytest.mark.parametrize("type_k", TYPES)
def test_lists_give_what_the_stored_rows_say(
    opened: list[Bench],
    type_k: KVType,
    type_v: KVType,
    layer: LayerSpec,
    softcap: float,
    sinks: bool,
) -> None:
    spec = CacheSpec(SIZE, 1, (layer,), type_k, type_v)
    opened.append(Bench(MemorySpec.single(spec), kernel=True))
    attention = Attention(opened[0], layer, softcap, sinks=sinks)
    got = attention.run(lists=True)
    close_to(got, attention.expected(), 1e-5)
    close_to(attention.run(lists=False), got, FLASH[type_k])


def test_the_layers_lie_under_transforms_and_not() -> None:
    layers = (LayerSpec(2, 128, 64), LayerSpec(2, 32, 96))
    spec = CacheSpec(SIZE, 1, layers, KVType.Q8_0, KVType.Q8_0)
    assert [(spec.hadamard_k(i), spec.hadamard_v(i)) for i in (0, 1)] == [(128, 64), (0, 0)]
