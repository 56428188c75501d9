"""A graph has room for the largest layer that can be written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.ggml.graph import NODES_PER_LAYER
from kvcellar.backends.operations import ExpertWeights, Ops, Routing
from kvcellar.models.moe import MAX_EXPERTS_USED
from kvcellar.plan import CellPlan, StatePlan
from kvcellar.types import (
    CacheSpec,
    KVType,
    LayerPlace,
    LayerSpec,
    MemorySpec,
    RopeSpec,
    StateLayer,
    StateSpec,
)
from tests.backends.ops_bench import Bench, Pass, plan_of, rows

N, N_LAYER, N_HEAD, D, N_EXPERT = 64, 3, 4, 64, 40
ROPE = RopeSpec("neox", 32)
ATTENTION = LayerSpec(2, D, D, ROPE)
LATENT = LayerSpec(1, 3 * D, 2 * D, ROPE, v_offset=D)
N_STATE, K = 4, 4
ROUTING = Routing("sigmoid", factor=2.0, activation="swiglu_oai")
CONV = N * 3 + N_HEAD
"""x, dt, b and c are convolved: b and c have a head of their own."""


class Largest:
    """A layer that attends (or attends latently), scans, and mixes experts, with every extra."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._square = bench.weight(rows(N, N), KVType.F16)
        self._vector = bench.weight(rows(N))
        self._wide = bench.weight(rows(N_HEAD * D, N))
        self._to_latent = bench.weight(rows(N_HEAD, 2 * D, D))
        self._from_latent = bench.weight(rows(N_HEAD, D, 2 * D))
        self._sinks = bench.weight(rows(N_HEAD))
        self._conv = bench.weight(rows(CONV, K), KVType.F16)
        self._a = bench.weight(-np.abs(rows(N_HEAD, 1)), KVType.F16)
        self._skip = bench.weight(rows(N_HEAD, 1))
        self._experts = self._make_experts()

    def _make_experts(self) -> ExpertWeights[int]:
        weight = self._bench.weight
        per_expert = ("gate", "up", "down")
        tensors: dict[str, Any] = {name: weight(rows(N_EXPERT, N, N)) for name in per_expert}
        for name in per_expert:
            tensors[f"{name}_scale"] = weight(rows(N_EXPERT))
            tensors[f"{name}_bias"] = weight(rows(N_EXPERT, N), KVType.F16)
        for name in ("router_bias", "choice_bias"):
            tensors[name] = weight(rows(N_EXPERT))
        made = ExpertWeights(weight(rows(N_EXPERT, N)), n_used=MAX_EXPERTS_USED, **tensors)
        absent = {field.name for field in fields(made) if getattr(made, field.name) is None}
        assert absent == {"gate_up", "gate_up_scale"}
        return made

    def forward(self, attend: Callable[[Ops[int], int, int], int]) -> Pass:
        def run(ops: Ops[int], x: int) -> int:
            for i in range(N_LAYER):
                h = self._norm(ops, x)
                mixed = ops.add(attend(ops, i, h), self._scan(ops, i, h))
                x = ops.add(x, self._norm(ops, mixed))
                h = self._norm(ops, x)
                routed = ops.experts(h, self._experts, ROUTING)
                x = ops.add(x, self._norm(ops, ops.add(routed, self._shared(ops, h))))
            return x

        return run

    def _norm(self, ops: Ops[int], x: int) -> int:
        return ops.layer_norm(x, self._vector, self._vector, 1e-5)

    def _linear(self, ops: Ops[int], x: int) -> int:
        """With a scale and a bias."""
        return ops.add(ops.mul(ops.linear(x, self._square), self._vector), self._vector)

    def _shared(self, ops: Ops[int], x: int) -> int:
        hidden = ops.geglu(self._linear(ops, x), self._linear(ops, x))
        return self._linear(ops, hidden)

    def attend(self, ops: Ops[int], i: int, x: int) -> int:
        """Grouped queries, with norms of queries and keys."""
        wide = ops.concat([self._linear(ops, x) for _ in range(N_HEAD)])
        q, k, v = ops.split(ops.concat([wide, wide]), [N_HEAD * D, 2 * D, 2 * D])
        q, k = (self._norm(ops, ops.heads(y, n)) for y, n in ((q, N_HEAD), (k, 2)))
        q, k, v = ops.rope(q, ROPE), ops.rope(k, ROPE), ops.heads(v, 2)
        out = ops.attention(i, q, k, v, 0.1, softcap=5.0, sinks=self._sinks)
        return self._linear(ops, ops.split(out, [N] * N_HEAD)[0])

    def attend_latently(self, ops: Ops[int], i: int, x: int) -> int:
        """Low ranks for queries and keys, products a head on both sides."""
        low = self._norm(ops, self._linear(ops, x))
        nope, rot = ops.split(ops.linear(low, self._wide), [N_HEAD * D // 2] * 2)
        nope = ops.heads(ops.concat([nope, nope]), N_HEAD)
        rot = ops.heads(ops.concat([rot, rot]), N_HEAD)
        q = ops.concat([ops.rope(rot, ROPE), ops.linear_heads(nope, self._to_latent)])
        latent = ops.heads(self._norm(ops, self._linear(ops, x)), 1)
        k = ops.concat([ops.rope(ops.heads(self._linear(ops, x), 1), ROPE), latent, latent])
        out = ops.attention(i, q, k, None, 0.1, softcap=5.0, sinks=self._sinks)
        out = ops.merge(ops.linear_heads(ops.heads(out, N_HEAD), self._from_latent))
        return self._linear(ops, ops.split(out, [N] * N_HEAD)[0])

    def _scan(self, ops: Ops[int], i: int, x: int) -> int:
        gate, wide = self._linear(ops, x), ops.linear(x, self._wide)
        wide = ops.short_conv(i, ops.split(wide, [CONV, N_HEAD * D - CONV])[0], self._conv)
        wide = ops.silu(ops.split(wide, [CONV])[0])
        x, dt, b, c = ops.split(wide, [N, N_HEAD, N, N])
        b, c = (ops.split(ops.heads(y, 1), [N_STATE, N - N_STATE])[0] for y in (b, c))
        heads = ops.heads(x, N_HEAD)
        y = ops.ssm_scan(i, heads, ops.add(dt, self._sinks), self._a, b, c)
        y = ops.merge(ops.add(y, ops.mul(heads, self._skip)))
        return self._linear(ops, self._norm(ops, ops.swiglu(gate, y)))


def _spec(layer: LayerSpec, kind: KVType, *, flash_attn: bool) -> MemorySpec:
    v = kind if flash_attn else KVType.F16
    group = CacheSpec(256, 1, (layer,) * N_LAYER, kind, v, flash_attn)
    state = StateLayer((K - 1) * CONV, N * N_STATE)
    places = tuple(LayerPlace(0, i, i) for i in range(N_LAYER))
    return MemorySpec((group,), StateSpec(2, 1, (state,) * N_LAYER), places)


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("n", [1, 3, 64])
def test_the_largest_layer_takes_fewer_nodes_than_there_are(
    opened: list[Bench], flash_attn: bool, latent: bool, n: int
) -> None:
    layer = LATENT if latent else ATTENTION
    bench = Bench(_spec(layer, KVType.Q8_0, flash_attn=flash_attn))
    opened.append(bench)
    largest = Largest(bench)
    attend = largest.attend_latently if latent else largest.attend
    executor = bench.executor(largest.forward(attend))
    mask = np.zeros((n, 256), np.float16)
    states = StatePlan(np.array([2], np.int32), np.array([1]))
    plan = plan_of(rows(n, N), [CellPlan(np.arange(n), mask)], states)
    n_nodes = bench.backend.api.ggml_graph_n_nodes(executor._cache.get(plan).graph)
    assert NODES_PER_LAYER // 2 < n_nodes / N_LAYER < NODES_PER_LAYER * 0.9
    assert np.isfinite(executor.run(plan)).all()
