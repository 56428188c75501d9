"""The rows of recurrent states in a ggml buffer."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest

from kvcellar.backends.ggml.binding import array_at, tensor_at
from kvcellar.backends.ggml.buffers import HostBufferType
from kvcellar.backends.ggml.library import load
from kvcellar.backends.ggml.states import GgmlStateStore
from kvcellar.errors import AllocationError
from kvcellar.types import StateLayer, StateSpec
from tests.backends.ggml.ops_bench import rows

SPEC = StateSpec(4, 2, (StateLayer(6, 8), StateLayer(3), StateLayer(0, 5)))
WIDTH = 22


@pytest.fixture
def store() -> Iterator[GgmlStateStore]:
    made = GgmlStateStore(SPEC)
    yield made
    made.close()


def test_a_new_store_holds_zeros(store: GgmlStateStore) -> None:
    states = store.read(np.arange(SPEC.n_rows + 1))
    assert states.shape == (5, WIDTH)
    assert not states.any()


def test_rows_come_back_in_the_order_asked_for(store: GgmlStateStore) -> None:
    states = rows(3, WIDTH)
    store.write(np.array([2, 0, 3]), states)
    np.testing.assert_array_equal(store.read(np.array([3, 2, 2, 0])), states[[2, 0, 0, 1]])
    assert not store.read(np.array([1, 4])).any()


def test_what_is_read_is_a_copy(store: GgmlStateStore) -> None:
    store.read(np.array([1]))[:] = 7
    assert not store.read(np.array([1])).any()


def test_wiping_touches_only_its_rows(store: GgmlStateStore) -> None:
    states = rows(4, WIDTH)
    store.write(np.arange(4), states)
    store.wipe(np.array([1, 3]))
    states[[1, 3]] = 0
    np.testing.assert_array_equal(store.read(np.arange(4)), states)
    store.zero()
    assert not store.read(np.arange(4)).any()


def test_no_rows_are_fine(store: GgmlStateStore) -> None:
    none = np.empty(0, np.int64)
    assert store.read(none).shape == (0, WIDTH)
    store.write(none, np.empty((0, WIDTH), np.float32))
    store.wipe(none)


def test_each_layer_has_the_tensors_that_it_needs(store: GgmlStateStore) -> None:
    states = rows(4, WIDTH)
    store.write(np.arange(4), states)
    assert [bool(tensor) for tensor in store.conv] == [True, True, False]
    assert [bool(tensor) for tensor in store.ssm] == [True, False, True]
    starts = {store.conv[0]: 0, store.ssm[0]: 6, store.conv[1]: 14, store.ssm[2]: 17}
    for tensor, start in starts.items():
        struct = tensor_at(tensor)
        assert struct.ne[1] == SPEC.n_rows + 1
        values = array_at(struct.data, np.float32, (5, struct.ne[0]))
        np.testing.assert_array_equal(values[:4], states[:, start : start + struct.ne[0]])


def test_layers_without_anything_to_keep(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kvcellar"):
        store = GgmlStateStore(StateSpec(3, 1, (StateLayer(0), StateLayer(0, 0))))
    assert not caplog.records
    assert store.read(np.arange(3)).shape == (3, 0)
    store.write(np.arange(3), np.empty((3, 0), np.float32))
    store.zero()
    store.close()


def test_its_size_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kvcellar"):
        GgmlStateStore(StateSpec(1023, 1, (StateLayer(256, 768),))).close()
    assert [record.message for record in caplog.records] == ["CPU state buffer: 4.00 MiB"]


def test_a_store_beyond_memory_is_refused_before_it_is_asked_for() -> None:
    with pytest.raises(AllocationError, match="for the state buffer") as caught:
        GgmlStateStore(StateSpec(2**40, 1, SPEC.layers))
    assert caught.value.n_bytes == (2**40 + 1) * 4 * WIDTH


def test_an_allocation_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    api, free = load().api, load().api.ggml_free

    def count(context: int) -> None:
        freed.append(context)
        free(context)

    monkeypatch.setattr(api, "ggml_free", count)
    monkeypatch.setattr(HostBufferType, "allocate", lambda *_: None)
    with pytest.raises(AllocationError, match="the state buffer in CPU memory") as caught:
        GgmlStateStore(SPEC)
    assert caught.value.n_bytes == 5 * 4 * WIDTH
    assert len(freed) == 1


def test_closing_twice_is_fine_and_frees_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    api, free = load().api, load().api.ggml_backend_buffer_free

    def count(buffer: int) -> None:
        freed.append(buffer)
        free(buffer)

    monkeypatch.setattr(api, "ggml_backend_buffer_free", count)
    store = GgmlStateStore(SPEC, HostBufferType())
    store.close()
    store.close()
    assert len(freed) == 1
