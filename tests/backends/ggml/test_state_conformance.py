"""The store of states does what every store of states has to do."""

from __future__ import annotations

import pytest

from kvcellar.backends.ggml.states import GgmlStateStore
from kvcellar.testing.state_conformance import (
    StateStoreConformance,
    state_spec_name,
    state_specs,
)
from kvcellar.types import StateSpec


@pytest.mark.parametrize("spec", state_specs(), ids=state_spec_name)
class TestGgmlStateStore(StateStoreConformance):
    def open(self, spec: StateSpec) -> GgmlStateStore:
        return GgmlStateStore(spec)
