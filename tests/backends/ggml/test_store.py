"""K and V bytes in ggml buffers."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from kvcellar.backends.ggml import buffers as buffers_module
from kvcellar.backends.ggml.library import load
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.errors import AllocationError, NotSupported, OptionError
from kvcellar.types import CacheSpec, KVType, LayerSpec

LAYERS = (LayerSpec(2, 64, 32), LayerSpec(1, 32, 64))


def test_a_store_without_a_backend_cannot_rotate() -> None:
    store = GgmlStore(CacheSpec(4, 1, LAYERS))
    assert not store.can_shift
    with pytest.raises(NotSupported, match="without a backend"):
        store.rotate(np.array([1]), np.array([1], np.int32))
    store.close()


def test_rows_that_lie_across_are_equally_long_in_all_layers() -> None:
    uneven = (LayerSpec(2, 64, 32), LayerSpec(1, 32, 32))
    with pytest.raises(OptionError, match="V rows of layers differ in size"):
        GgmlStore(CacheSpec(8, 1, uneven, flash_attn=False))


def test_an_allocation_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    api = load().api
    free = api.ggml_free

    def count_and_free(context: int) -> None:
        freed.append(context)
        free(context)

    monkeypatch.setattr(buffers_module, "check_available", lambda *_: None)
    monkeypatch.setattr(buffers_module, "ZeroedMemory", _no_memory)
    monkeypatch.setattr(api, "ggml_free", count_and_free)
    with pytest.raises(AllocationError):
        GgmlStore(CacheSpec(8, 1, LAYERS))
    assert len(freed) == 1


def _fill(store: GgmlStore) -> None:
    """Write all rows, few at a time: what the allocator keeps of more would count as not freed."""
    for cells in np.split(np.arange(store.spec.size), store.spec.size // 256):
        for i, layer in enumerate(store.spec.layers):
            k, v = (np.ones((256, n), np.float32) for n in (layer.n_embd_k, layer.n_embd_v))
            store.write(i, cells, k, v)


def _no_memory(_: int) -> None:
    raise MemoryError


@pytest.mark.slow
def test_stores_give_their_memory_back() -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("no /proc to read the resident size from")
    spec = CacheSpec(2**16, 1, LAYERS, KVType.F32, KVType.F32)
    assert spec.n_bytes > 2**25

    def resident() -> int:
        gc.collect()
        return int(statm.read_text().split()[1]) * 4096

    before = resident()
    for _ in range(4):
        store = GgmlStore(spec)
        _fill(store)  # it takes no room before
        assert resident() - before > 0.9 * spec.n_bytes
        store.close()
    assert resident() - before < spec.n_bytes
