"""K and V bytes in ggml buffers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.backends.base import KVStore, Part
from kvcellar.backends.ggml import store as store_module
from kvcellar.backends.ggml.library import load
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.errors import AllocationError, NotSupported, OptionError
from kvcellar.types import CacheSpec, Float32Array, KVType, LayerSpec

LAYERS = (LayerSpec(2, 64, 32), LayerSpec(1, 32, 64))
PARTS: tuple[Part, ...] = ("k", "v")
# The largest error as a share of the largest value of a row: quantised rows lie under a transform.
TOLERANCE = {"f32": 1e-6, "f16": 2**-10, "bf16": 2**-8, "q8_0": 0.02, "q5_1": 0.15, "q5_0": 0.2}
CASES = [(kind, True) for kind in KVType] + [
    (kind, False) for kind in KVType if not kind.is_quantized
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].label}-{'flash' if case[1] else 'plain'}")
def store(request: pytest.FixtureRequest) -> Iterator[GgmlStore]:
    """A store of each type and each layout of V."""
    kind, flash_attn = request.param
    made = GgmlStore(CacheSpec(8, 1, LAYERS, kind, kind, flash_attn))
    yield made
    made.close()


def _rows(width: int, n: int, seed: int = 0) -> Float32Array:
    rng = np.random.default_rng(seed)
    return np.asarray(rng.uniform(-2, 2, (n, width)), np.float32)


def _write_all(store: GgmlStore) -> None:
    cells = np.arange(store.spec.size)
    for i, layer in enumerate(store.spec.layers):
        n = len(cells)
        store.write(i, cells, _rows(layer.n_embd_k, n, i), _rows(layer.n_embd_v, n, i + 9))


def _all_bytes(store: GgmlStore) -> list[bytes]:
    cells = np.arange(store.spec.size)
    return [
        store.read_raw(i, part, cells).tobytes()
        for i in range(len(store.spec.layers))
        for part in PARTS
    ]


def _any(store: KVStore) -> KVStore:
    return store


def test_it_is_a_store(store: GgmlStore) -> None:
    assert _any(store).spec.size == 8
    assert store.can_copy
    assert not store.can_shift


def test_a_new_store_holds_zeros(store: GgmlStore) -> None:
    assert not any(any(data) for data in _all_bytes(store))
    assert not store.read(1, "v", np.arange(8)).any()


def test_written_rows_are_read_within_the_error_of_the_type(store: GgmlStore) -> None:
    cells = np.array([6, 1, 3])
    for i, layer in enumerate(store.spec.layers):
        k, v = _rows(layer.n_embd_k, 3), _rows(layer.n_embd_v, 3, 1)
        store.write(i, cells, k, v)
        share = TOLERANCE.get(store.spec.type_k.label, 0.35)
        for part, rows in (("k", k), ("v", v)):
            error = np.abs(store.read(i, "k" if part == "k" else "v", cells) - rows)
            assert error.max() <= share * np.abs(rows).max()


def test_writing_touches_only_its_cells_and_layer(store: GgmlStore) -> None:
    layer = store.spec.layers[0]
    store.write(0, np.array([2]), _rows(layer.n_embd_k, 1), _rows(layer.n_embd_v, 1))
    others = np.array([0, 1, 3, 4, 5, 6, 7])
    for part in PARTS:
        assert store.read_raw(0, part, np.array([2])).any()
        assert not store.read_raw(0, part, others).any()
        assert not store.read_raw(1, part, np.arange(8)).any()


def test_raw_rows_go_back_bit_for_bit(store: GgmlStore) -> None:
    rng = np.random.default_rng(0)
    cells = np.array([7, 0, 4])
    for i, layer in enumerate(store.spec.layers):
        for part in PARTS:
            kind = store.spec.type_k if part == "k" else store.spec.type_v
            width = layer.n_embd_k if part == "k" else layer.n_embd_v
            rows = rng.integers(0, 256, (3, kind.row_bytes(width)), dtype=np.uint8)
            store.write_raw(i, part, cells, rows)
            np.testing.assert_array_equal(store.read_raw(i, part, cells), rows)


def test_what_is_read_is_a_copy(store: GgmlStore) -> None:
    _write_all(store)
    before = _all_bytes(store)
    store.read_raw(0, "k", np.arange(8))[:] = 0
    store.read(0, "v", np.arange(8))[:] = 0
    assert _all_bytes(store) == before


def test_copying_is_bit_for_bit_in_every_layer(store: GgmlStore) -> None:
    _write_all(store)
    src, dst = np.array([0, 5]), np.array([7, 2])
    expected = [store.read_raw(i, part, src).tobytes() for i in range(2) for part in PARTS]
    store.copy(src, dst)
    copied = [store.read_raw(i, part, dst).tobytes() for i in range(2) for part in PARTS]
    assert copied == expected


def test_copying_may_overlap(store: GgmlStore) -> None:
    _write_all(store)
    before = store.read_raw(0, "k", np.arange(8))
    store.copy(np.arange(7), np.arange(1, 8))
    np.testing.assert_array_equal(store.read_raw(0, "k", np.arange(1, 8)), before[:7])


def test_wiping_zeroes_only_those_cells(store: GgmlStore) -> None:
    _write_all(store)
    kept = np.array([0, 1, 4, 5, 6, 7])
    before = [store.read_raw(i, part, kept).tobytes() for i in range(2) for part in PARTS]
    store.wipe(np.array([2, 3]))
    after = [store.read_raw(i, part, kept).tobytes() for i in range(2) for part in PARTS]
    assert after == before
    assert not any(
        store.read_raw(i, part, np.array([2, 3])).any() for i in (0, 1) for part in PARTS
    )


def test_zeroing_clears_everything(store: GgmlStore) -> None:
    _write_all(store)
    store.zero()
    assert not any(any(data) for data in _all_bytes(store))


def test_no_cells_are_no_work(store: GgmlStore) -> None:
    none = np.empty(0, np.int64)
    store.copy(none, none)
    store.wipe(none)
    assert store.read(0, "k", none).shape == (0, store.spec.layers[0].n_embd_k)


def test_closing_twice_is_fine(store: GgmlStore) -> None:
    store.close()
    store.close()


def test_a_store_without_a_backend_cannot_rotate() -> None:
    store = GgmlStore(CacheSpec(4, 1, LAYERS))
    with pytest.raises(NotSupported, match="without a backend"):
        store.rotate(np.array([1]), np.array([1], np.int32))
    store.close()


def _spec_with(layers: tuple[LayerSpec, ...], option: str, kind: KVType) -> CacheSpec:
    if option == "type_k":
        return CacheSpec(8, 1, layers, type_k=kind)
    return CacheSpec(8, 1, layers, type_v=kind)


@pytest.mark.parametrize("kind", [kind for kind in KVType if kind.is_quantized])
@pytest.mark.parametrize("option", ["type_k", "type_v"])
def test_blocks_must_divide_a_head(kind: KVType, option: str) -> None:
    odd = (LayerSpec(2, 32, 32), LayerSpec(2, 48, 48))
    with pytest.raises(OptionError, match=rf"{option}={kind.label}: heads of layer 1 have 48"):
        GgmlStore(_spec_with(odd, option, kind))


def test_quantised_v_cannot_lie_across() -> None:
    with pytest.raises(OptionError, match="quantised V needs flash_attn=True"):
        GgmlStore(CacheSpec(8, 1, LAYERS, type_v=KVType.Q8_0, flash_attn=False))


def test_a_store_beyond_memory_is_refused_before_it_is_asked_for() -> None:
    spec = CacheSpec(2**40, 1, LAYERS)
    with pytest.raises(AllocationError, match="for the K/V buffer") as caught:
        GgmlStore(spec)
    assert caught.value.n_bytes == spec.n_bytes
    assert caught.value.buffer == "the K/V buffer"


def test_an_allocation_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    api = load().api
    free = api.ggml_free

    def count_and_free(context: int) -> None:
        freed.append(context)
        free(context)

    monkeypatch.setattr(store_module, "check_available", lambda *_: None)
    monkeypatch.setattr(api, "ggml_backend_alloc_ctx_tensors_from_buft", lambda *_: None)
    monkeypatch.setattr(api, "ggml_free", count_and_free)
    with pytest.raises(AllocationError):
        GgmlStore(CacheSpec(8, 1, LAYERS))
    assert len(freed) == 1


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
        GgmlStore(spec).close()
    assert resident() - before < spec.n_bytes
