"""Where layers lie, what is allocated for them, and what is left when that fails."""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.backends.ggml.buffers import (
    Buffer,
    HostBufferType,
    KVBuffers,
    RowMajor,
    layer_buffer_types,
    stacked,
)
from kvcellar.backends.ggml.library import load
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.errors import AllocationError, NotSupported, OptionError
from kvcellar.types import CacheSpec, KVType, LayerSpec

SPEC = CacheSpec(8, 1, (LayerSpec(2, 8, 4), LayerSpec(1, 4, 8), LayerSpec(2, 8, 4)))


@dataclass(eq=False)
class FakeType:
    """Host memory under another name, which may have run out."""

    name: str
    is_host: bool = True
    has_memory: bool = True
    contexts: list[int] = field(default_factory=list)

    def allocate(self, context: int) -> Buffer | None:
        self.contexts.append(context)
        return HostBufferType().allocate(context) if self.has_memory else None


@dataclass
class Freed:
    """What was given back to ggml."""

    buffers: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Freed:
    """Counts buffers and contexts that are freed."""
    api, log = load().api, Freed()
    free_buffer, free_context = api.ggml_backend_buffer_free, api.ggml_free

    def buffer(handle: int) -> None:
        log.buffers.append(handle)
        free_buffer(handle)

    def context(handle: int) -> None:
        log.contexts.append(handle)
        free_context(handle)

    monkeypatch.setattr(api, "ggml_backend_buffer_free", buffer)
    monkeypatch.setattr(api, "ggml_free", context)
    return log


class TestPlacement:
    def test_layers_lie_with_the_device_that_runs_them(self) -> None:
        a, b, host = FakeType("a"), FakeType("b"), FakeType("host")
        assert layer_buffer_types(3, [a, b, a], host=host) == (a, b, a)

    def test_without_offload_they_lie_with_the_host(self) -> None:
        a, host = FakeType("a"), FakeType("host")
        assert layer_buffer_types(2, [a, a], offload=False, host=host) == (host, host)

    def test_without_devices_too(self) -> None:
        types = layer_buffer_types(2)
        assert [kind.name for kind in types] == ["CPU", "CPU"]
        assert types[0] == types[1]

    def test_a_device_for_each_layer(self) -> None:
        with pytest.raises(OptionError, match="devices: 1 for 2 layers"):
            layer_buffer_types(2, [FakeType("a")])
        with pytest.raises(OptionError, match="buffer_types: 1 for 3 layers"):
            GgmlStore(SPEC, None, [FakeType("a")])


class TestAllocation:
    def test_there_is_one_a_buffer_type_with_its_layers(self) -> None:
        a, b = FakeType("a"), FakeType("b")
        buffers = KVBuffers(SPEC, (a, b, a))
        assert (len(a.contexts), len(b.contexts), len(buffers.buffers)) == (1, 1, 2)
        assert len({*buffers.k, *buffers.v}) == 6
        api = load().api
        sizes = [api.ggml_backend_buffer_get_size(each.handle) for each in buffers.buffers]
        wanted = [SPEC.k_bytes(i) + SPEC.v_bytes(i) for i in range(3)]
        assert sizes[0] >= wanted[0] + wanted[2]
        assert sizes[1] >= wanted[1]
        buffers.close()
        buffers.close()

    def test_layers_of_several_types_are_one_store(self) -> None:
        a, b = FakeType("a"), FakeType("b")
        store = GgmlStore(SPEC, None, [b, a, b])
        cells = np.arange(8)
        for i, layer in enumerate(SPEC.layers):
            assert not store.read_raw(i, "k", cells).any()
            k = np.full((8, layer.n_embd_k), i + 1, np.float32)
            store.write(i, cells, k, np.full((8, layer.n_embd_v), -i - 1, np.float32))
        store.resize(5, np.array([7, 0]), np.array([1, 4]))
        assert (len(a.contexts), len(b.contexts)) == (2, 2)
        for i in range(3):
            assert store.read(i, "k", np.arange(5))[:, 0].tolist() == [0, i + 1, 0, 0, i + 1]
            assert store.read(i, "v", np.arange(5))[:, 0].tolist() == [0, -i - 1, 0, 0, -i - 1]
        store.zero()
        assert not any(store.read_raw(i, "v", np.arange(5)).any() for i in range(3))
        store.close()

    def test_what_was_allocated_before_a_failure_is_freed(self, freed: Freed) -> None:
        a, b = FakeType("a"), FakeType("b", has_memory=False)
        with pytest.raises(AllocationError, match="K/V buffer in b memory") as caught:
            KVBuffers(SPEC, (a, b, a))
        assert caught.value.buffer == "the K/V buffer in b memory"
        assert caught.value.n_bytes == SPEC.k_bytes(1) + SPEC.v_bytes(1)
        assert len(freed.buffers) == 1
        assert sorted(freed.contexts) == sorted([*a.contexts, *b.contexts])

    def test_a_resize_that_fails_leaves_the_store_as_it_was(self, freed: Freed) -> None:
        a, b = FakeType("a"), FakeType("b")
        store = GgmlStore(SPEC, None, [a, b, b])
        store.write(2, np.array([3]), np.ones((1, 16), np.float32), np.ones((1, 8), np.float32))
        before, tensors = store.read_raw(2, "k", np.arange(8)).tobytes(), store.k
        b.has_memory = False
        with pytest.raises(AllocationError):
            store.resize(20, np.array([3]), np.array([3]))
        assert store.read_raw(2, "k", np.arange(8)).tobytes() == before
        assert (store.k, store.spec, store.generation) == (tensors, SPEC, 0)
        assert len(freed.buffers) == 1
        store.close()
        assert len(freed.buffers) == 3

    def test_a_resize_beyond_memory_is_refused_before_it_is_asked_for(self) -> None:
        store = GgmlStore(SPEC)
        none = np.empty(0, np.int64)
        with pytest.raises(AllocationError, match="for the K/V buffer"):
            store.resize(2**44, none, none)
        assert store.spec is SPEC
        store.close()

    def test_memory_that_the_host_cannot_reach_is_refused(self) -> None:
        with pytest.raises(NotSupported, match="K and V in far memory"):
            GgmlStore(SPEC, None, [FakeType("far", is_host=False)] * 3)

    def test_sizes_are_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        a, b = FakeType("a"), FakeType("b")
        with caplog.at_level(logging.INFO, logger="kvcellar"):
            KVBuffers(CacheSpec(8192, 1, SPEC.layers, type_v=KVType.F32), (a, b, a)).close()
        assert [record.message for record in caplog.records] == [
            "a K/V buffer: 1.00 MiB for 2 layers of 8192 cells, K (f16) 0.50 MiB, V (f32) 0.50 MiB",
            "b K/V buffer: 0.31 MiB for 1 layers of 8192 cells, K (f16) 0.06 MiB, V (f32) 0.25 MiB",
        ]

    def test_an_exception_while_rows_are_moved_frees_the_new_buffers(
        self, freed: Freed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = GgmlStore(SPEC)
        monkeypatch.setattr(RowMajor, "put", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.resize(20, np.array([3]), np.array([3]))
        assert len(freed.buffers) == 1
        assert store.spec is SPEC
        store.close()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([(4, 3), (2, 5)])), max_size=9),
    st.randoms(use_true_random=False),
)
def test_views_that_are_alike_become_one_array(
    layout: list[tuple[int, tuple[int, int]]], random: Random
) -> None:
    """Wherever they lie: every one is in exactly one array, in the memory that it had."""
    memory, views, at = np.arange(400, dtype=np.uint16), [], 0
    for gap, (n, width) in layout:
        views.append((KVType.F16, memory[at : at + n * width].reshape(n, width)))
        at += n * width + gap
    random.shuffle(views)
    stacks = stacked(views)
    found = [part for _, stack in stacks for part in stack]
    assert all(np.shares_memory(part, memory) for part in found)
    key = operator.itemgetter(0)
    wanted = sorted((view.ravel().tolist() for _, view in views), key=key)
    assert sorted((part.ravel().tolist() for part in found), key=key) == wanted
    alone = [(KVType.F16, view) for _, view in views[:1]]
    assert [stack.shape[0] for _, stack in stacked(alone)] == [1] * len(alone)


@pytest.mark.parametrize("flash_attn", [True, False])
def test_layers_of_one_shape_are_looked_at_at_once(flash_attn: bool) -> None:
    spec = CacheSpec(64, 1, (LayerSpec(2, 32, 32),) * 6, flash_attn=flash_attn)
    buffers = KVBuffers(spec, layer_buffer_types(6))
    shapes = [bits.shape for _, bits in buffers._stacks]
    assert shapes == ([(12, 64, 64)] if flash_attn else [(6, 64, 64)] * 2)
    for layer in range(6):
        for rows in (buffers.rows["k"][layer], buffers.rows["v"][layer]):
            for cell in (0, 17, 63):
                where = np.array([cell])
                bad = rows.get(where)
                bad[0, -2:] = 0xFF
                rows.put(where, bad)
                others = np.setdiff1d(np.arange(64), where)
                assert not buffers.all_finite(where)
                assert not buffers.all_finite(np.arange(64))
                assert not buffers.all_finite(np.array([(cell + 5) % 64, cell]))
                assert buffers.all_finite(others)
                rows.wipe(where)
    assert buffers.all_finite(np.arange(64))
    buffers.close()
