"""The kit for stores of states passes a plain store and finds every fault put into one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvcellar.testing.state_conformance import (
    StateStoreConformance,
    state_spec_name,
    state_specs,
)
from kvcellar.types import Float32Array, Int64Array, StateSpec


class PlainStore:
    """States in one array, the row of zeros at its end."""

    def __init__(self, spec: StateSpec) -> None:
        self.spec = spec
        self.states = np.zeros((spec.n_rows + 1, spec.row_bytes // 4), np.float32)

    def read(self, rows: Int64Array) -> Float32Array:
        got: Float32Array = self.states[rows]
        return got

    def write(self, rows: Int64Array, states: Float32Array) -> None:
        self.states[rows] = states

    def wipe(self, rows: Int64Array) -> None:
        self.states[rows] = 0

    def zero(self) -> None:
        self.states.fill(0)

    def close(self) -> None:
        pass


class AlwaysWholeStore(PlainStore):
    """Wipes more than it is asked to."""

    def wipe(self, rows: Int64Array) -> None:  # noqa: ARG002
        self.states.fill(0)


class HalfStore(PlainStore):
    """Wipes the first value of a state only."""

    def wipe(self, rows: Int64Array) -> None:
        self.states[rows, :1] = 0


class ViewStore(PlainStore):
    """Hands out its own memory."""

    def read(self, rows: Int64Array) -> Float32Array:
        if len(rows) and len(rows) == len(self.states) - 1:
            return self.states[:-1]
        return super().read(rows)


class NoZeroRowStore(PlainStore):
    """The row behind the last one is another name of row 0."""

    def read(self, rows: Int64Array) -> Float32Array:
        return super().read(rows % self.spec.n_rows)


class DirtyStore(PlainStore):
    """Comes with what was in its memory before."""

    def __init__(self, spec: StateSpec) -> None:
        super().__init__(spec)
        self.states[0] = np.nan


class KeepingStore(PlainStore):
    """Zeroes all but the last row."""

    def zero(self) -> None:
        self.states[:-2] = 0


@pytest.mark.parametrize("spec", state_specs(), ids=state_spec_name)
class TestPlainStore(StateStoreConformance):
    def open(self, spec: StateSpec) -> PlainStore:
        return PlainStore(spec)


@pytest.mark.parametrize(
    "faulty",
    [AlwaysWholeStore, HalfStore, ViewStore, NoZeroRowStore, DirtyStore, KeepingStore],
)
def test_a_fault_is_found(faulty: type[PlainStore]) -> None:
    kit = StateStoreConformance()
    kit.open = faulty  # type: ignore[method-assign]
    tests = [getattr(kit, name) for name in dir(kit) if name.startswith("test_")]

    found = sum(fails(test) for test in tests)

    assert 1 <= found < len(tests)


def fails(test: Callable[[StateSpec], None]) -> bool:
    try:
        test(state_specs()[0])
    except AssertionError:
        return True
    return False
