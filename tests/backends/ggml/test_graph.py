"""Graphs kept by shape, and what a decode computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.base import Part
from kvcellar.backends.ggml import graph as graph_module
from kvcellar.backends.ggml.graph import MAX_GRAPHS, GgmlExecutor
from kvcellar.backends.ggml.inputs import Shape
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.errors import AllocationError
from kvcellar.testing.gguf_writer import gguf_bytes
from kvcellar.testing.plans import causal_plan
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.types import Float32Array, KVType
from tests.backends.helpers import Rig

TOKENS = [5, 3, 40, 0, 17, 17, 8]


@pytest.fixture(params=[True, False], ids=["flash", "plain"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Both ways of computing attention, exact types."""
    return {"type_k": KVType.F32, "type_v": KVType.F32, "flash_attn": request.param}


def _close(got: Float32Array, expected: Float32Array) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


def _kept(executor: GgmlExecutor) -> list[Shape]:
    return executor._cache.shapes


def test_one_batch_equals_token_by_token(rig: Rig, options: dict[str, Any]) -> None:
    whole = rig.executor(**options)[1].run(causal_plan(TOKENS)).copy()
    _, executor = rig.executor(**options)
    for i, token in enumerate(TOKENS):
        _close(executor.run(causal_plan([token], i))[0], whole[i])


def test_wanted_rows_equal_those_of_all(rig: Rig, options: dict[str, Any]) -> None:
    _, executor = rig.executor(**options)
    every = executor.run(causal_plan(TOKENS)).copy()
    for wanted in ([6], [0, 3], [1, 2, 3, 4, 5, 6], [0]):
        _close(executor.run(causal_plan(TOKENS, outputs=wanted)), every[wanted])


def test_no_wanted_rows_write_k_and_v_but_give_no_logits(rig: Rig, options: dict[str, Any]) -> None:
    store, executor = rig.executor(**options)
    other, reference = rig.executor(**options)
    expected = reference.run(causal_plan(TOKENS)).copy()
    assert executor.run(causal_plan(TOKENS[:-1], outputs=[])).shape[0] == 0
    cells = np.arange(len(TOKENS) - 1)
    for i in range(len(store.spec.layers)):
        _close(store.read(i, "k", cells), other.read(i, "k", cells))
        _close(store.read(i, "v", cells), other.read(i, "v", cells))
    _close(executor.run(causal_plan(TOKENS[-1:], len(TOKENS) - 1))[0], expected[-1])


def test_embeddings_equal_the_tokens_they_are_of(rig: Rig, options: dict[str, Any]) -> None:
    info = rig.file.tensors["token_embd.weight"]
    raw = rig.file.path.read_bytes()[info.offset : info.offset + info.n_bytes]
    table = np.frombuffer(raw, np.float32).reshape(info.shape)
    _, executor = rig.executor(**options)
    expected = executor.run(causal_plan(TOKENS)).copy()
    _close(executor.run(causal_plan(None, embeddings=table[TOKENS])), expected)


def test_logits_do_not_depend_on_the_cells(rig: Rig, options: dict[str, Any]) -> None:
    expected = rig.executor(**options)[1].run(causal_plan(TOKENS)).copy()
    for cells in ([200, 3, 150, 4, 255, 0, 77], list(range(100, 107)), [6, 5, 4, 3, 2, 1, 0]):
        _, executor = rig.executor(**options)
        _close(executor.run(causal_plan(TOKENS, cells=cells)), expected)


def test_logits_do_not_depend_on_how_many_cells_are_looked_at(
    rig: Rig, options: dict[str, Any]
) -> None:
    _, executor = rig.executor(**options)
    expected = executor.run(causal_plan(TOKENS)).copy()
    _close(executor.run(causal_plan(TOKENS, n_kv=512)), expected)


def test_the_same_shape_uses_the_same_graph(rig: Rig) -> None:
    _, executor = rig.executor()
    first = executor._cache.get(causal_plan([1, 2]))
    assert executor._cache.get(causal_plan([3, 4], 9)) is first
    assert executor._cache.get(causal_plan([3, 4], 9, outputs=[0])) is not first


def test_a_graph_gives_the_same_when_it_is_used_again(rig: Rig, options: dict[str, Any]) -> None:
    _, executor = rig.executor(**options)
    first = executor.run(causal_plan(TOKENS)).copy()
    executor.run(causal_plan([9] * 7))
    executor.run(causal_plan([9]))
    np.testing.assert_array_equal(executor.run(causal_plan(TOKENS)), first)


def test_a_larger_shape_moves_the_buffer_and_drops_the_others(rig: Rig) -> None:
    _, executor = rig.executor()
    small = causal_plan([1, 2])
    first = executor.run(small).copy()
    before, n_bytes = _kept(executor), executor.buffer_bytes
    assert before == [Shape.of(small)]
    large = causal_plan([1] * 200, n_kv=512)
    executor.run(large)
    assert _kept(executor) == [Shape.of(large)]
    assert executor.buffer_bytes > n_bytes
    np.testing.assert_array_equal(executor.run(small), first)
    assert _kept(executor) == [Shape.of(large), Shape.of(small)]


def test_the_least_recently_used_graph_goes_first(rig: Rig) -> None:
    _, executor = rig.executor()
    plans = [causal_plan([1] * n) for n in range(MAX_GRAPHS + 1, 0, -1)]
    for plan in plans[:MAX_GRAPHS]:
        executor.run(plan)
    executor.run(plans[0])
    executor.run(plans[-1])
    shapes = [Shape.of(plan) for plan in plans]
    assert _kept(executor) == [*shapes[2:MAX_GRAPHS], shapes[0], shapes[-1]]


def test_a_compute_buffer_that_cannot_be_had_is_named_and_leaves_the_executor_usable(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, executor = rig.executor()
    first = executor.run(causal_plan([1, 2])).copy()
    for attribute in ("ggml_gallocr_reserve", "check_available"):
        with monkeypatch.context() as patch:
            if attribute == "check_available":
                patch.setattr(graph_module, attribute, _refuse)
            else:
                patch.setattr(rig.backend.api, attribute, lambda *_: False)
            with pytest.raises(AllocationError, match="for the compute buffer") as caught:
                executor.run(causal_plan([1] * 300, n_kv=512))
            assert caught.value.n_bytes > 2**16
        assert executor.buffer_bytes == 0
        np.testing.assert_array_equal(executor.run(causal_plan([1, 2])), first)


def _refuse(buffer: str, n_bytes: int) -> None:
    raise AllocationError(buffer, n_bytes)


def test_closing_twice_is_fine(rig: Rig) -> None:
    _, executor = rig.executor()
    executor.run(causal_plan([1]))
    executor.close()
    executor.close()
    assert executor.buffer_bytes == 0


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Three layers with every bias, each token using 32 of 32 experts."""
    tiny = TinyLlama(n_layer=3, n_expert=32, n_expert_used=32)
    tensors = tiny.tensors()
    for name in list(tensors):
        if ".attn_" in name and "norm" not in name:
            n_out = np.asarray(tensors[name]).shape[0]
            tensors[name.replace(".weight", ".bias")] = np.ones(n_out, np.float32)
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    path.write_bytes(gguf_bytes(tiny.metadata(), tensors))
    made = Rig(path)
    yield made
    made.close()


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("n", [1, 3, 64])
def test_the_largest_layer_fits_into_a_graph(wide: Rig, flash_attn: bool, n: int) -> None:
    _, executor = wide.executor(flash_attn=flash_attn)
    assert np.isfinite(executor.run(causal_plan([1] * n, outputs=[0]))).all()


def poison(store: GgmlStore, cell: int) -> None:
    """Make K and V of a cell NaN in every layer, as no verb of the store would."""
    parts: tuple[Part, ...] = ("k", "v")
    for i in range(len(store.spec.layers)):
        for part in parts:
            rows = store.read_raw(i, part, np.array([cell]))
            store.write_raw(i, part, np.array([cell]), np.full_like(rows, 0xFF))


@pytest.mark.parametrize("n", [1, 8, 63])
@pytest.mark.parametrize("kind", [KVType.F32, KVType.F16, KVType.Q8_0])
def test_few_tokens_never_see_a_nan_in_a_hidden_cell(rig: Rig, kind: KVType, n: int) -> None:
    store, executor = rig.executor(type_k=kind, type_v=kind)
    cells = [i + (i >= 7) for i in range(n + 20)]  # 7 stays free
    executor.run(causal_plan([1] * 20, cells=cells))
    plan = causal_plan([2] * n, 20, cells=cells)
    expected = executor.run(plan).copy()
    poison(store, 7)
    np.testing.assert_array_equal(executor.run(plan), expected)


def test_wiped_cells_cannot_reach_many_tokens_either(rig: Rig, options: dict[str, Any]) -> None:
    store, executor = rig.executor(**options)
    cells = [i + (i >= 7) for i in range(100)]
    plan = causal_plan([2] * 80, cells=cells)
    expected = executor.run(plan).copy()
    poison(store, 7)
    store.wipe(np.array([7]))
    np.testing.assert_array_equal(executor.run(plan), expected)


def test_a_real_model_gives_the_reference_s_logits(shared: Path) -> None:
    rig = Rig(shared / "models" / "llama-moe.gguf")
    _, executor = rig.executor()
    logits = executor.run(causal_plan([1, 2, 3])).copy()
    assert logits.shape == (3, rig.model.spec.n_vocab)
    for i, token in enumerate([1, 2, 3]):
        _close(executor.run(causal_plan([token], i))[0], logits[i])
    rig.close()
