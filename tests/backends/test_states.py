"""The stores of recurrent states do what every store of states has to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest

from kvcellar.backends.base import StateStore
from kvcellar.backends.ggml.states import GgmlStateStore
from kvcellar.backends.numpy.states import NumpyStateStore
from kvcellar.errors import AllocationError
from kvcellar.testing.state_conformance import (
    StateStoreConformance,
    state_spec_name,
    state_specs,
)
from kvcellar.types import StateLayer, StateSpec

Make: TypeAlias = Callable[[StateSpec], StateStore]

on_both = pytest.mark.parametrize("make", [GgmlStateStore, NumpyStateStore], ids=["ggml", "numpy"])


@pytest.mark.parametrize("spec", state_specs(), ids=state_spec_name)
class TestGgmlStateStore(StateStoreConformance):
    def open(self, spec: StateSpec) -> StateStore:
        return GgmlStateStore(spec)


@pytest.mark.parametrize("spec", state_specs(), ids=state_spec_name)
class TestNumpyStateStore(StateStoreConformance):
    def open(self, spec: StateSpec) -> StateStore:
        return NumpyStateStore(spec)


@on_both
def test_layers_without_anything_to_keep(make: Make) -> None:
    store = make(StateSpec(3, 1, (StateLayer(0), StateLayer(0, 0))))
    assert store.read(np.arange(3)).shape == (3, 0)
    store.write(np.arange(3), np.empty((3, 0), np.float32))
    store.zero()
    store.close()


@on_both
def test_a_store_beyond_memory_is_refused_before_it_is_asked_for(make: Make) -> None:
    with pytest.raises(AllocationError, match="for the state buffer") as caught:
        make(StateSpec(2**40, 1, (StateLayer(6, 8), StateLayer(3), StateLayer(0, 5))))
    assert caught.value.n_bytes == (2**40 + 1) * 4 * 22
