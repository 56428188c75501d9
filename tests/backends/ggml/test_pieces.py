"""Large nodes in pieces compute what they compute as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvcellar.backends.ggml import pieces
from kvcellar.backends.ggml.jit.compiler import why_not
from kvcellar.backends.operations import ExpertWeights, Ops
from kvcellar.plan import CellLists, CellPlan
from kvcellar.testing.plans import causal_plan
from kvcellar.types import CacheSpec, Float32Array, KVType, LayerSpec, MemorySpec, RopeSpec
from tests.backends.helpers import Rig
from tests.backends.ops_bench import Bench, Pass, close_to, plan_of, rows

N = 300
"""Tokens: four pieces of 75."""


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As many pieces as there may be."""
    monkeypatch.setattr(pieces, "WORK", 1)
    yield
    monkeypatch.undo()


def _n_nodes(bench: Bench) -> int:
    (executor,) = bench._executors[-1:]
    (graph,) = executor._cache._space.graphs.values()  # type: ignore[union-attr]
    return int(bench.backend.api.ggml_graph_n_nodes(graph.graph))


def _both(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, forward: Pass, x: Float32Array
) -> tuple[Float32Array, Float32Array]:
    """The pass as a whole, and in pieces."""
    whole = bench.run(forward, x)
    before = _n_nodes(bench)
    monkeypatch.setattr(pieces, "WORK", 1)
    cut = bench.run(forward, x)
    assert _n_nodes(bench) > before + 5
    return whole, cut


@pytest.mark.parametrize("kind", [KVType.F32, KVType.F16, KVType.Q8_0])
def test_products(bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: KVType) -> None:
    weight, bias = bench.weight(rows(48, 64), kind), bench.weight(rows(48))
    close_to(*_both(bench, monkeypatch, lambda ops, x: ops.linear(x, weight, bias), rows(N, 64)))


def test_products_of_views(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = bench.weight(rows(48, 32))

    def forward(ops: Ops[int], x: int) -> int:
        return ops.linear(ops.split(x, [32, 32])[1], weight)

    close_to(*_both(bench, monkeypatch, forward, rows(N, 64)))


def test_a_product_a_head(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = bench.weight(rows(4, 24, 16))

    def forward(ops: Ops[int], x: int) -> int:
        return ops.merge(ops.linear_heads(ops.heads(x, 4), weight))

    close_to(*_both(bench, monkeypatch, forward, rows(N, 64)))


@pytest.mark.parametrize("merged", [False, True])
def test_experts(bench: Bench, monkeypatch: pytest.MonkeyPatch, merged: bool) -> None:
    weight = bench.weight
    down, router = weight(rows(6, 64, 32)), weight(rows(6, 64))
    if merged:
        experts = ExpertWeights(router, down=down, n_used=3, gate_up=weight(rows(6, 64, 64)))
    else:
        gate, up = (weight(rows(6, 32, 64)) for _ in range(2))
        experts = ExpertWeights(router, down=down, n_used=3, gate=gate, up=up)
    close_to(*_both(bench, monkeypatch, lambda ops, x: ops.experts(x, experts), rows(N, 64)))


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("outputs", [None, [0, 299]])
def test_a_whole_model(rig: Rig, flash_attn: bool, outputs: list[int] | None) -> None:
    tokens = [i % 48 for i in range(N)]
    plan = causal_plan(tokens, n_kv=512, outputs=outputs)
    _, cut = rig.executor(flash_attn=flash_attn)
    got = cut.run(plan).copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "WORK", 2**40)
        _, whole = rig.executor(flash_attn=flash_attn)
        expected = whole.run(plan).copy()
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(cut.run(plan), got)


@pytest.mark.usefixtures("cut")
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_attention_over_lists_beside_them(opened: list[Bench]) -> None:
    """It is one node, which looks by itself whether it should stop."""
    layer = LayerSpec(1, 32, 32, RopeSpec("neox", 32))
    spec = MemorySpec.single(CacheSpec(512, 1, (layer,)))
    x, weight = rows(N, 32), rows(32, 32)
    cells = np.arange(N)
    lists = CellLists.separate([np.arange(i + 1, dtype=np.int32) for i in range(N)])
    mask = np.zeros((N, 0), np.float16)
    plan = plan_of(x, [CellPlan(cells, mask, lists)])
    found = []
    for work in (1, 2**40):
        bench = Bench(spec, kernel=True)
        opened.append(bench)
        made = bench.weight(weight)

        def forward(ops: Ops[int], x: int, made: int = made) -> int:
            y = ops.heads(ops.linear(x, made), 1)
            return ops.attention(0, y, y, y, 0.2)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pieces, "WORK", work)
            found.append(bench.run(forward, plan))
    close_to(found[0], found[1])


@pytest.mark.parametrize(("n", "most"), [(1, 1), (64, 1), (127, 1), (128, 2), (2048, 32)])
def test_few_tokens_are_never_cut(n: int, most: int) -> None:
    assert pieces.most_pieces(n) == most
    assert pieces.most_pieces(10**6) == pieces.MOST
