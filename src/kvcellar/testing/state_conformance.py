"""Stores of recurrent states: what every one has to do, and one that knows what it holds.

Subclass :class:`StateStoreConformance` with a way to open a store; with pytest::

    @pytest.mark.parametrize("spec", state_specs(), ids=state_spec_name)
    class TestMyStateStore(StateStoreConformance):
        def open(self, spec):
            return MyStateStore(spec)

A store must come empty and zeroed. The row behind its last one, ``n_rows``, can be read and holds
zeros for good: a sequence without a state starts from it.

:class:`HistoryStore` is for tests of caches: a state is the text of the tokens it has absorbed, by
number, as its one value, so that it can be read and written like any other; number 0, which zeros
are, is the text of no tokens.
"""

from __future__ import annotations

import numpy as np

from kvcellar.backends.base import StateStore
from kvcellar.cache.state_placement import members_of
from kvcellar.plan import Plan
from kvcellar.types import Float32Array, Int64Array, StateLayer, StateSpec


class HistoryStore:
    """States that carry their history; ``absorb`` stands for the computation of a plan.

    Attributes:
        spec: the shape.
        broken: the name of a method that fails.
    """

    def __init__(self, n_rows: int, n_seq_max: int) -> None:
        self.spec = StateSpec(n_rows, n_seq_max, (StateLayer(1),))
        self.broken: str | None = None
        self._numbers = np.zeros((n_rows + 1, 1), np.float32)
        self._texts: list[tuple[int, ...]] = [()]

    def text(self, row: int) -> tuple[int, ...]:
        """What the state in a row has absorbed; AssertionError if it was spoilt."""
        number = self._numbers[row, 0]
        assert np.isfinite(number), f"row {row} holds what a failed decode left"
        return self._texts[int(number)]

    def absorb(self, plan: Plan) -> None:
        """Do what a model would: read each sequence's source, write its target."""
        assert plan.states is not None
        sources, targets = plan.states.sources.tolist(), plan.states.targets.tolist()
        assert len(sources) == len(targets) == len(members_of(plan.micro))
        assert len(set(targets)) == len(targets), "two sequences leave their state in one row"
        assert all(0 <= row < self.spec.n_rows for row in targets), "a target that is no row"
        tokens = plan.micro.tokens
        ids = [-1] * plan.n_tokens if tokens is None else tokens.tolist()
        n = plan.n_tokens // len(sources)
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            others = sources[:i] + sources[i + 1 :]
            assert target not in others, f"row {target} is filled while another reads it"
            self._texts.append((*self.text(source), *ids[i * n : (i + 1) * n]))
            self._numbers[target] = len(self._texts) - 1

    def spoil(self, plan: Plan) -> None:
        """Fail in the middle: what the plan should have written is no state."""
        assert plan.states is not None
        self._numbers[plan.states.targets] = np.nan

    def read(self, rows: Int64Array) -> Float32Array:
        """The numbers of the texts in rows."""
        self._fail_if_broken("read")
        got: Float32Array = self._numbers[rows]
        return got

    def write(self, rows: Int64Array, states: Float32Array) -> None:
        """Put them back."""
        self._fail_if_broken("write")
        self._numbers[rows] = states

    def wipe(self, rows: Int64Array) -> None:
        """Make rows the text of no tokens."""
        self._fail_if_broken("wipe")
        self._numbers[rows] = 0

    def zero(self) -> None:
        """Make every row the text of no tokens."""
        self._fail_if_broken("zero")
        self._numbers.fill(0)

    def close(self) -> None:
        """Nothing to free."""

    def _fail_if_broken(self, method: str) -> None:
        if self.broken == method:
            raise MemoryError(f"{method} is broken")


_N = 5


def state_specs() -> list[StateSpec]:
    """States of several unlike layers, of convolutions alone, and of one row."""
    mixed = (StateLayer(6, 16), StateLayer(3), StateLayer(10, 4), StateLayer(0, 5))
    return [
        StateSpec(_N, 2, mixed),
        StateSpec(_N, 4, (StateLayer(7), StateLayer(7))),
        StateSpec(1, 1, (StateLayer(2, 8),)),
    ]


def state_spec_name(spec: StateSpec) -> str:
    """What tells one spec from the others."""
    layers = "+".join(f"{layer.n_conv}.{layer.n_ssm}" for layer in spec.layers)
    return f"{spec.n_rows}x{layers}"


def random_states(spec: StateSpec, n: int, seed: int = 0) -> Float32Array:
    """States of n rows; no value is 0."""
    shape = (n, spec.row_bytes // 4)
    states: Float32Array = np.random.default_rng(seed).uniform(1, 2, shape).astype(np.float32)
    return states


class StateStoreConformance:
    """Round trips, wiping, and the row of zeros, for any spec."""

    def open(self, spec: StateSpec) -> StateStore:
        """A new store of that shape."""
        raise NotImplementedError

    def test_a_new_store_holds_zeros(self, spec: StateSpec) -> None:
        """A state that nobody has written is that of a sequence without tokens."""
        store = self.open(spec)
        assert store.spec == spec
        states = store.read(_rows(spec))
        assert states.shape == (spec.n_rows, spec.row_bytes // 4)
        assert states.dtype == np.float32
        assert not states.any()
        store.close()

    def test_written_states_are_read_bit_for_bit(self, spec: StateSpec) -> None:
        """In the order asked for; a row may be asked for twice, as two may start from it."""
        store, states = self.open(spec), random_states(spec, spec.n_rows)
        order = np.random.default_rng(1).permutation(spec.n_rows)
        store.write(order, states)
        np.testing.assert_array_equal(store.read(order), states)
        twice = np.array([order[-1], order[0], order[-1]])
        np.testing.assert_array_equal(store.read(twice), states[[-1, 0, -1]])
        store.close()

    def test_values_that_are_no_numbers_are_kept(self, spec: StateSpec) -> None:
        """What is written comes back, signs of zero and the bits of NaN included."""
        store = self.open(spec)
        states = random_states(spec, 1)
        states[0, :2] = -0.0, np.nan
        store.write(np.array([0]), states)
        got = store.read(np.array([0]))
        np.testing.assert_array_equal(got.view(np.uint32), states.view(np.uint32))
        store.close()

    def test_writing_touches_only_its_rows(self, spec: StateSpec) -> None:
        """Every other row keeps its values."""
        store, states = _filled(self.open(spec))
        row = spec.n_rows // 2
        others = np.setdiff1d(_rows(spec), [row])
        new = random_states(spec, 1, seed=9)
        store.write(np.array([row]), new)
        np.testing.assert_array_equal(store.read(np.array([row])), new)
        np.testing.assert_array_equal(store.read(others), states[others])
        store.close()

    def test_what_is_read_and_written_is_a_copy(self, spec: StateSpec) -> None:
        """Changing either array afterwards changes nothing in the store."""
        store, states = self.open(spec), random_states(spec, spec.n_rows)
        given = states.copy()
        store.write(_rows(spec), given)
        given[:] = 0
        store.read(_rows(spec))[:] = 0
        np.testing.assert_array_equal(store.read(_rows(spec)), states)
        store.close()

    def test_wiping_zeroes_only_those_rows(self, spec: StateSpec) -> None:
        """In every layer, whatever was there."""
        store, states = _filled(self.open(spec))
        gone = np.arange(0, spec.n_rows, 2)
        kept = np.setdiff1d(_rows(spec), gone)
        store.write(gone, np.full((len(gone), spec.row_bytes // 4), np.nan, np.float32))
        store.wipe(gone)
        assert not store.read(gone).any()
        np.testing.assert_array_equal(store.read(kept), states[kept])
        store.close()

    def test_zeroing_clears_everything(self, spec: StateSpec) -> None:
        """Every row."""
        store, _ = _filled(self.open(spec))
        store.zero()
        assert not store.read(_rows(spec)).any()
        store.close()

    def test_the_row_behind_the_last_is_zero_for_good(self, spec: StateSpec) -> None:
        """Whatever is written, wiped or zeroed elsewhere; beside other rows, too."""
        zero = np.array([spec.n_rows])
        store = self.open(spec)
        assert not store.read(zero).any()
        store, states = _filled(store)
        both = store.read(np.array([0, spec.n_rows]))
        np.testing.assert_array_equal(both[0], states[0])
        assert not both[1].any()
        store.wipe(_rows(spec))
        store.zero()
        assert not store.read(zero).any()
        store.close()

    def test_no_rows_are_no_work(self, spec: StateSpec) -> None:
        """Every verb takes an empty list of rows."""
        store, states = _filled(self.open(spec))
        none = np.empty(0, np.int64)
        assert store.read(none).shape == (0, spec.row_bytes // 4)
        store.write(none, states[:0])
        store.wipe(none)
        np.testing.assert_array_equal(store.read(_rows(spec)), states)
        store.close()

    def test_closing_twice_is_fine(self, spec: StateSpec) -> None:
        """The second time does nothing."""
        store = self.open(spec)
        store.close()
        store.close()


def _rows(spec: StateSpec) -> Int64Array:
    return np.arange(spec.n_rows)


def _filled(store: StateStore) -> tuple[StateStore, Float32Array]:
    states = random_states(store.spec, store.spec.n_rows, seed=3)
    store.write(_rows(store.spec), states)
    return store, states
