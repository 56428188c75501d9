"""Graphs that rotate K rows give back what they took when they cannot be built."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.nodes import Constants
from kvcellar.backends.ggml.rotation import RotationGraph
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.errors import AllocationError
from kvcellar.types import CacheSpec, LayerSpec, RopeSpec

ROPE = RopeSpec("normal", 4, factors=(1.0, 2.0))
SPEC = CacheSpec(8, 1, (LayerSpec(1, 4, 4, ROPE),))


def test_a_graph_without_memory_for_its_constants_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(_constants: Constants, values: tuple[float, ...]) -> int:
        raise AllocationError("a constant tensor", 4 * len(values))

    closed: list[RotationGraph] = []
    close = RotationGraph.close

    def count(graph: RotationGraph) -> None:
        closed.append(graph)
        close(graph)

    backend = GgmlBackend(1)
    store = GgmlStore(SPEC, backend)
    before = store.read_raw(0, "k", np.arange(8))
    monkeypatch.setattr(Constants, "factors", no_memory)
    monkeypatch.setattr(RotationGraph, "close", count)
    with pytest.raises(AllocationError, match="constant"):
        store.rotate(np.arange(8), np.ones(8, np.int32))
    assert len(closed) == 1
    np.testing.assert_array_equal(store.read_raw(0, "k", np.arange(8)), before)
    store.close()
    backend.close()
