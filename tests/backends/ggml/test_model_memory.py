"""Several groups of K and V in one graph, inputs that nobody reads, what opening leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from kvcellar.backends.ggml import model_memory
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.inputs import Shape
from kvcellar.backends.ggml.jit.attention import why_no_kernel
from kvcellar.backends.ggml.jit.compiler import why_not
from kvcellar.backends.ggml.model_memory import GgmlMemory
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.backends.operations import Ops
from kvcellar.errors import AllocationError
from kvcellar.plan import CellLists, CellPlan, Plan, StatePlan
from kvcellar.types import (
    CacheSpec,
    Int64Array,
    KVType,
    LayerMemory,
    LayerPlace,
    LayerSpec,
    MemorySpec,
    RopeSpec,
    StateLayer,
    StateSpec,
    group_layers,
)
from tests.backends.ops_bench import Bench, close_to, plan_of, rows

ROPE = RopeSpec("neox", 8)
FULL = LayerSpec(2, 8, 8, ROPE)
SLIDING = LayerSpec(1, 16, 16, ROPE, window=3)
LAYERS = tuple(LayerMemory(layer) for layer in (SLIDING, FULL, SLIDING, SLIDING))
WIDTH = 16
SCALE = 0.2


def _spec(kind: KVType = KVType.F32, *, flash_attn: bool = True) -> MemorySpec:
    """Full layers over 512 cells, sliding ones over 256."""
    groups, states, places = group_layers(LAYERS)
    assert not states
    sizes = {0: 512, 3: 256}
    specs = (CacheSpec(sizes[g[0].window], 1, g, kind, kind, flash_attn) for g in groups)
    return MemorySpec(tuple(specs), None, places)


def _forward(ops: Ops[int], x: int) -> int:
    """Layers that attend with their input as keys and values, and twice as queries."""
    for i, layer in enumerate(LAYERS):
        shape = layer.attention
        assert shape is not None
        k = ops.rope(ops.heads(x, shape.n_head_kv), ROPE)
        q = ops.rope(ops.heads(ops.concat([x, x]), 2 * shape.n_head_kv), ROPE)
        out = ops.attention(i, q, k, ops.heads(x, shape.n_head_kv), SCALE)
        x = ops.add(x, ops.split(out, [WIDTH, WIDTH])[0])
    return x


def _cell_plan(
    positions: Sequence[int], cells: Int64Array, n_kv: int, window: int, *, lists: bool
) -> CellPlan:
    """Tokens at these positions, of which cell ``cells[p]`` holds position p."""
    at = np.full(n_kv, 10**6)
    at[cells[: positions[-1] + 1]] = np.arange(positions[-1] + 1)
    where = np.array(positions)[:, np.newaxis]
    visible = (at <= where) & (at > where - (window or 10**5))
    own = cells[np.array(positions)]
    if not lists:
        return CellPlan(own, np.where(visible, 0, -np.inf).astype(np.float16))
    found = [np.flatnonzero(row).astype(np.int32) for row in visible]
    none = np.empty((len(positions), 0), np.float16)
    return CellPlan(own, none, CellLists.separate(found))


X = rows(9, WIDTH)
CELLS = tuple(np.random.default_rng(i).permutation(256)[:9] for i in range(2))


def _plan(start: int, end: int, *, lists: Sequence[bool] = (False, False)) -> Plan:
    positions = range(start, end)
    groups = [
        _cell_plan(positions, CELLS[i], n_kv, window, lists=lists[i])
        for i, (n_kv, window) in enumerate(((512, 0), (256, 3)))
    ]
    return plan_of(X[start:end], groups, positions=positions)


def _expected() -> npt.NDArray[np.float64]:
    """The same pass without a cache, in double precision."""
    x = X.astype(np.float64)
    n, at = len(x), np.arange(len(x))
    for layer in LAYERS:
        shape = layer.attention
        assert shape is not None
        n_head = 2 * shape.n_head_kv
        k, v = (y.reshape(n, shape.n_head_kv, -1).repeat(2, axis=1) for y in (x, x))
        q = _rotated(np.hstack([x, x]).reshape(n, n_head, -1))
        scores = np.einsum("qhd,khd->hqk", q, _rotated(k)) * SCALE
        seen = at <= at[:, np.newaxis]
        if shape.window:
            seen &= at > at[:, np.newaxis] - shape.window
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)[:, :WIDTH]
    return x


def _rotated(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    angles = np.arange(len(x))[:, np.newaxis] * 10000.0 ** (-np.arange(4) / 4)
    turn = np.exp(1j * angles)[:, np.newaxis]
    pairs = (x[..., :4] + 1j * x[..., 4:8]) * turn
    return np.concatenate([pairs.real, pairs.imag, x[..., 8:]], axis=2)


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("cuts", [(0, 9), (0, 4, 9), tuple(range(10))])
def test_groups_have_cells_and_masks_of_their_own(
    opened: list[Bench], cuts: tuple[int, ...], flash_attn: bool
) -> None:
    opened.append(Bench(_spec(flash_attn=flash_attn)))
    executor = opened[0].executor(_forward)
    got = [executor.run(_plan(a, b)).copy() for a, b in pairwise(cuts)]
    close_to(np.concatenate(got), _expected())


needs_kernel = pytest.mark.skipif(why_not() is not None, reason="no kernel here")


@needs_kernel
@pytest.mark.parametrize("lists", [(True, True), (True, False), (False, True)])
def test_each_group_has_a_mask_or_lists(opened: list[Bench], lists: tuple[bool, bool]) -> None:
    opened.append(Bench(_spec(KVType.F16), kernel=True))
    executor = opened[0].executor(_forward)
    got = [executor.run(_plan(a, a + 3, lists=lists)).copy() for a in (0, 3, 6)]
    close_to(np.concatenate(got), _expected(), 5e-3)
    assert len({Shape.of(_plan(0, 3, lists=two)) for two in (lists, (False, False))}) == 2


@needs_kernel
def test_lists_are_wanted_where_a_group_can_have_them(opened: list[Bench]) -> None:
    inside = LayerSpec(1, 64, 32, v_offset=32)
    full = CacheSpec(8, 1, (FULL,))
    groups = (full, CacheSpec(8, 1, (FULL,), KVType.F32), CacheSpec(8, 1, (inside,)))
    spec = MemorySpec(groups, None, tuple(LayerPlace(i, 0) for i in range(3)))
    opened += [Bench(spec, kernel=True), Bench(spec)]
    assert opened[0].executor(lambda _, x: x).takes_lists == (True, False, False)
    assert opened[1].executor(lambda _, x: x).takes_lists == (False, False, False)
    assert [why_no_kernel(group) is None for group in groups] == [True, False, False]


def test_a_resize_of_any_group_drops_the_graphs(opened: list[Bench]) -> None:
    opened.append(Bench(_spec()))
    executor, none = opened[0].executor(_forward), np.empty(0, np.int64)
    for store in opened[0].memory.groups:
        graph = executor._cache.get(_plan(0, 9))
        assert executor._cache.get(_plan(0, 9)) is graph
        store.resize(600, none, none)
        assert executor._cache.get(_plan(0, 9)) is not graph
    close_to(executor.run(_plan(0, 9)), _expected())


class TestUnusedInputs:
    """What a pass does not read has no memory, and is not written."""

    def test_without_positions_and_tokens_only_states(self, opened: list[Bench]) -> None:
        spec = MemorySpec((), StateSpec(2, 1, (StateLayer(12),)), (LayerPlace(state=0),))
        opened.append(Bench(spec))
        weight = opened[0].weight(rows(4, 4))
        x, states = rows(3, 4), StatePlan(np.array([2], np.int32), np.array([0]))
        executor = opened[0].executor(lambda ops, x: ops.short_conv(0, x, weight))
        graph = executor._cache.get(plan_of(x, states=states))
        assert graph.feeds._positions is None
        assert graph.feeds._sources is not None
        assert np.isfinite(executor.run(plan_of(x, states=states))).all()

    @pytest.mark.parametrize("flash_attn", [True, False])
    def test_groups_and_states_that_no_layer_uses(
        self, opened: list[Bench], flash_attn: bool
    ) -> None:
        groups = _spec(flash_attn=flash_attn).groups
        opened.append(Bench(MemorySpec(groups, StateSpec(2, 1, (StateLayer(3),)), ())))
        states = StatePlan(np.array([0], np.int32), np.array([1]))
        plan = _plan(0, 9)
        executor = opened[0].executor(lambda ops, x: ops.scale(x, 2.0))
        got = executor.run(Plan(plan.micro, plan.groups, states))
        np.testing.assert_array_equal(got, 2 * X)

    def test_the_mask_of_a_layer_whose_output_is_not_wanted(self, opened: list[Bench]) -> None:
        opened.append(Bench(MemorySpec.single(CacheSpec(256, 1, (SLIDING,)))))

        def forward(ops: Ops[int], x: int) -> int:
            heads = ops.heads(x, 1)
            ops.attention(0, heads, heads, heads, 1.0)
            return ops.scale(x, 3.0)

        cells = _plan(0, 9).groups[1]
        np.testing.assert_array_equal(opened[0].run(forward, plan_of(X, [cells])), 3 * X)
        assert opened[0].memory.groups[0].read(0, "k", cells.cells).any()


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[GgmlStore]:
    """The stores that are closed."""
    seen: list[GgmlStore] = []
    close = GgmlStore.close

    def count(store: GgmlStore) -> None:
        seen.append(store)
        close(store)

    monkeypatch.setattr(GgmlStore, "close", count)
    return seen


@pytest.mark.parametrize("failing", ["second group", "states"])
def test_what_was_opened_before_a_failure_is_closed(closed: list[GgmlStore], failing: str) -> None:
    spec = _spec()
    huge = CacheSpec(2**44, 1, (SLIDING,))
    if failing == "second group":
        spec = MemorySpec((spec.groups[0], huge), None, spec.places)
    else:
        spec = MemorySpec(spec.groups, StateSpec(2**44, 1, (StateLayer(9),)), spec.places)
    backend = GgmlBackend(1)
    with pytest.raises(AllocationError):
        GgmlMemory.open(spec, backend)
    assert len(closed) == (1 if failing == "second group" else 2)
    backend.close()


@pytest.mark.parametrize("part", ["AttentionKernel", "Products", "GgmlStateStore"])
def test_it_is_closed_if_there_is_no_memory_to_work_on(
    closed: list[GgmlStore], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def refuse(*_: object) -> None:
        raise AllocationError(part, 1)

    monkeypatch.setattr(model_memory, "why_no_kernel", lambda _: None)
    monkeypatch.setattr(model_memory, "why_no_products", lambda: None)
    monkeypatch.setattr(model_memory, "AttentionKernel", lambda *_: None)
    monkeypatch.setattr(model_memory, "Products", lambda *_: None)
    monkeypatch.setattr(model_memory, part, refuse)
    backend, spec = GgmlBackend(1), _spec(KVType.F16)
    states = StateSpec(1, 1, (StateLayer(3),))
    with pytest.raises(AllocationError, match=part):
        GgmlMemory.open(replace(spec, states=states), backend, kernel=True, products=True)
    assert len(closed) == len(spec.groups) > 0
    backend.close()
