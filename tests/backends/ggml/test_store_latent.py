"""Stores of layers whose V is part of their K: no V is kept, K turns as ever."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.testing.conformance import tolerance
from kvcellar.testing.rotation import random_rows, rotated_rows
from kvcellar.types import CacheSpec, KVType, LayerSpec, RopeSpec

N = 8
CELLS = np.arange(N)
LATENT = LayerSpec(1, 576, 512, RopeSpec("normal", 64, factors=(2.0,) * 32), v_offset=64)
PLAIN = LayerSpec(2, 64, 32)
NO_V = np.empty((N, 0), np.float32)


@pytest.fixture(scope="module")
def backend() -> Iterator[GgmlBackend]:
    made = GgmlBackend(1)
    yield made
    made.close()


@pytest.fixture(params=[True, False], ids=["rows", "across"])
def store(backend: GgmlBackend, request: pytest.FixtureRequest) -> Iterator[GgmlStore]:
    """A latent layer between two that have a V."""
    layers = (PLAIN, LATENT, PLAIN)
    made = GgmlStore(CacheSpec(N, 1, layers, flash_attn=request.param), backend)
    made.write(1, CELLS, random_rows(N, 576), NO_V)
    made.write(2, CELLS, random_rows(N, 128), random_rows(N, 64, seed=1))
    yield made
    made.close()


def test_no_v_is_kept(store: GgmlStore) -> None:
    assert store.spec.n_bytes == N * (2 * (128 + 64) + 576) * 2
    assert [bool(tensor) for tensor in store.v] == [True, False, True]
    assert store.read(1, "v", np.array([3, 1])).shape == (2, 0)
    assert store.read_raw(1, "v", CELLS).shape == (N, 0)
    store.write_raw(1, "v", CELLS, store.read_raw(1, "v", CELLS))
    assert np.abs(store.read(1, "k", CELLS) - random_rows(N, 576)).max() < 2e-3


def test_rows_are_copied_wiped_and_moved_all_the_same(store: GgmlStore) -> None:
    before = store.read(1, "k", CELLS), store.read(2, "v", CELLS)
    store.copy(np.array([0, 5]), np.array([2, 3]))
    store.wipe(np.array([7]))
    store.resize(4, np.array([2, 6, 7]), np.array([0, 3, 1]))
    for part, rows in zip(
        (store.read(1, "k", np.arange(4)), store.read(2, "v", np.arange(4))), before, strict=True
    ):
        np.testing.assert_array_equal(part[[0, 3]], rows[[0, 6]])
        assert not part[[1, 2]].any()
    store.zero()
    assert not store.read(1, "k", np.arange(4)).any()


@pytest.mark.parametrize("kind", [KVType.F32, KVType.F16, KVType.Q8_0, KVType.Q4_0])
@pytest.mark.parametrize("mode", ["normal", "neox"])
def test_only_the_rotary_part_turns(backend: GgmlBackend, kind: KVType, mode: str) -> None:
    rope = RopeSpec("normal" if mode == "normal" else "neox", 64)
    layer = LayerSpec(1, 576, 512, rope, v_offset=64)
    store, rows = GgmlStore(CacheSpec(N, 1, (layer,), kind), backend), random_rows(N, 576)
    store.write(0, CELLS, rows, NO_V)
    stored, shifts = store.read(0, "k", CELLS), np.array([0, 1, -1, 40, -40, 3, 0, 60], np.int32)
    store.rotate(CELLS, shifts)
    got, expected = store.read(0, "k", CELLS), rotated_rows(stored, shifts, layer)
    assert np.abs(got - expected).max() <= tolerance(kind, rows) + 1e-5
    if not kind.is_quantized:
        np.testing.assert_array_equal(got[:, 64:], stored[:, 64:])
    assert np.abs(got[3, :64] - stored[3, :64]).max() > 0.5
    store.close()


def test_v_across_of_latent_layers_has_no_width_to_differ_in() -> None:
    layers = (LATENT, PLAIN, LayerSpec(1, 96, 64, v_offset=0))
    GgmlStore(CacheSpec(N, 1, layers, flash_attn=False)).close()
