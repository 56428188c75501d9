"""The store of states does what every store of states has to do."""

from __future__ import annotations

import pytest

from kvcellar.backends.numpy.states import NumpyStateStore
from kvcellar.testing.state_conformance import (
    StateStoreConformance,
    state_spec_name,
    state_specs,
)
from kvcellar.types import StateSpec


@pytest.mark.parametrize("spec", state_specs(), ids=state_spec_name)
class TestNumpyStateStore(StateStoreConformance):
    def open(self, spec: StateSpec) -> NumpyStateStore:
        return NumpyStateStore(spec)
