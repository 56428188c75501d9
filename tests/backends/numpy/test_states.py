"""Convolution and scan over rows of states against formulas that know of no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.backends.numpy import states as numpy_states
from kvcellar.backends.numpy.ops import NumpyOps
from kvcellar.backends.numpy.states import NumpyStateStore, short_conv, softplus, ssm_scan
from kvcellar.errors import AllocationError, NotSupported
from kvcellar.plan import Plan, StatePlan
from kvcellar.testing.plans import causal_plan
from kvcellar.testing.uncached import UncachedOps
from kvcellar.types import AnyArray, Float32Array, LayerPlace, MemorySpec, StateLayer, StateSpec

N_ROWS = 4
SPEC = StateSpec(N_ROWS, 2, (StateLayer(6, 8), StateLayer(3), StateLayer(0, 5)))
WIDTH = 22
F64 = npt.NDArray[np.float64]


def _random(*shape: int, seed: int = 0) -> Float32Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _plan(sources: Sequence[int], targets: Sequence[int]) -> StatePlan:
    return StatePlan(np.array(sources, np.int32), np.array(targets, np.int64))


# -- the store


def test_layers_lie_one_after_the_other() -> None:
    store, states = NumpyStateStore(SPEC), _random(N_ROWS, WIDTH)
    store.write(np.arange(N_ROWS), states)
    np.testing.assert_array_equal(store.conv(0)[:N_ROWS], states[:, :6])
    np.testing.assert_array_equal(store.ssm(0)[:N_ROWS], states[:, 6:14])
    np.testing.assert_array_equal(store.conv(1)[:N_ROWS], states[:, 14:17])
    np.testing.assert_array_equal(store.ssm(2)[:N_ROWS], states[:, 17:])
    assert store.ssm(1).shape == store.conv(2).shape == (N_ROWS + 1, 0)


def test_a_system_that_does_not_say_what_it_has_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_states, "check_available", lambda *_: None)
    with pytest.raises(AllocationError, match="for the state buffer"):
        NumpyStateStore(StateSpec(2**60, 1, SPEC.layers))


# -- the operations


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer that convolves and scans."""

    n_head: int = 4
    d: int = 3
    d_state: int = 5
    n_group: int = 2
    k: int = 4
    wide_a: bool = False

    @property
    def layer(self) -> StateLayer:
        n_conv = (self.k - 1) * self.n_head * self.d
        return StateLayer(n_conv, self.n_head * self.d * self.d_state)

    def weight(self) -> Float32Array:
        return _random(self.n_head * self.d, self.k, seed=1)

    def scanned(self, n: int, seed: int = 0) -> tuple[Float32Array, ...]:
        """x, dt, b and c of n tokens."""
        dt = 4 * _random(n, self.n_head, seed=seed + 1)
        b, c = _random(2, n, self.n_group, self.d_state, seed=seed + 2)
        return _random(n, self.n_head, self.d, seed=seed), dt, b, c

    def a(self) -> Float32Array:
        return -np.abs(_random(self.n_head, self.d_state if self.wide_a else 1, seed=4))


MAMBA2 = Shape()
MAMBA = Shape(n_head=6, d=1, n_group=1, wide_a=True)
SHAPES = st.sampled_from([MAMBA2, MAMBA, Shape(n_group=1, k=1), Shape(n_head=1, n_group=1, k=2)])


def _rows(n: int) -> Float32Array:
    """Rows of n random values; the last is that of zeros."""
    rows = _random(N_ROWS + 1, n, seed=9)
    rows[N_ROWS] = 0
    return rows


def _conv_formula(x: AnyArray, weight: AnyArray, before: AnyArray) -> F64:
    """Channel by channel, the inputs before it put in front."""
    columns = np.concatenate([before, x.T.astype(np.float64)], axis=1)
    pairs = zip(columns, weight, strict=True)
    return np.stack([np.convolve(xs, w[::-1], "valid") for xs, w in pairs], axis=1)


def _scan_formula(
    parts: Sequence[AnyArray], a: AnyArray, before: AnyArray, i: int
) -> tuple[F64, F64]:
    """Output and state of token i as sums over all tokens up to it and the first state."""
    x, dt, b, c = (part.astype(np.float64) for part in parts)
    n_head = x.shape[1]
    b, c = (np.repeat(part, n_head // part.shape[1], axis=1) for part in (b, c))
    step = np.logaddexp(0, dt)[:, :, np.newaxis, np.newaxis]
    rate = a[:, np.newaxis].astype(np.float64)
    state = before * np.exp(step[: i + 1].sum(axis=0) * rate)
    for j in range(i + 1):
        decay = np.exp(step[j + 1 : i + 1].sum(axis=0) * rate)
        state = state + decay * step[j] * x[j][:, :, np.newaxis] * b[j][:, np.newaxis]
    return (state * c[i][:, np.newaxis]).sum(axis=2), state


@given(SHAPES, st.integers(1, 6), st.integers(0, N_ROWS), st.integers(0, N_ROWS - 1))
def test_the_convolution_of_a_sequence(shape: Shape, n: int, source: int, target: int) -> None:
    x, rows = _random(n, shape.n_head * shape.d), _rows(shape.layer.n_conv)
    before = rows.copy()
    got = short_conv(_plan([source], [target]), rows, x, shape.weight())
    held = before[source].reshape(shape.n_head * shape.d, shape.k - 1)
    expected = _conv_formula(x, shape.weight(), held)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    inputs = np.concatenate([held, x.T], axis=1)
    before[target] = inputs[:, inputs.shape[1] - (shape.k - 1) :].ravel()
    np.testing.assert_array_equal(rows, before)


@given(SHAPES, st.integers(1, 6), st.integers(0, N_ROWS), st.integers(0, N_ROWS - 1))
def test_the_scan_of_a_sequence(shape: Shape, n: int, source: int, target: int) -> None:
    rows, parts = _rows(shape.layer.n_ssm), shape.scanned(n)
    x, dt, b, c = parts
    before = rows.copy()
    got = ssm_scan(_plan([source], [target]), rows, x, dt, shape.a(), b, c)
    first = before[source].reshape(shape.n_head, shape.d, shape.d_state)
    formula = [_scan_formula(parts, shape.a(), first, i) for i in range(n)]
    np.testing.assert_allclose(got, [y for y, _ in formula], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rows[target], formula[-1][1].ravel(), rtol=1e-4, atol=1e-5)
    others = np.setdiff1d(np.arange(N_ROWS + 1), [target])
    np.testing.assert_array_equal(rows[others], before[others])


def _layer(
    rows: tuple[Float32Array, Float32Array], plan: StatePlan, shape: Shape, tokens: Sequence[int]
) -> Float32Array:
    """Convolution and scan of some of ten tokens over rows of both."""
    x, dt, b, c = (part[list(tokens)] for part in shape.scanned(10))
    conved = short_conv(plan, rows[0], x.reshape(len(x), -1), shape.weight())
    return ssm_scan(plan, rows[1], conved.reshape(x.shape), dt, shape.a(), b, c)


def _both_rows(shape: Shape) -> tuple[Float32Array, Float32Array]:
    return _rows(shape.layer.n_conv), _rows(shape.layer.n_ssm)


@given(SHAPES, st.lists(st.integers(1, 9), unique=True).map(sorted))
def test_pieces_equal_the_whole(shape: Shape, cuts: list[int]) -> None:
    """Bit for bit, in place: the state is all that a piece needs of those before it."""
    whole, pieces = _both_rows(shape), _both_rows(shape)
    expected = _layer(whole, _plan([N_ROWS], [1]), shape, range(10))
    got = []
    for start, end in zip([0, *cuts], [*cuts, 10], strict=True):
        plan = _plan([1 if start else N_ROWS], [1])
        got.append(_layer(pieces, plan, shape, range(start, end)))
    np.testing.assert_array_equal(np.concatenate(got), expected)
    for a, b in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(a, b)


@given(SHAPES, st.permutations(range(N_ROWS)), st.integers(1, 3))
def test_sequences_side_by_side_equal_each_alone(
    shape: Shape, targets: list[int], n_seqs: int
) -> None:
    targets = targets[:n_seqs]
    sources = [N_ROWS, *targets][:n_seqs]  # rows that are written may be read, too
    alone, beside, first = _both_rows(shape), _both_rows(shape), _both_rows(shape)
    together = _layer(beside, _plan(sources, targets), shape, range(3 * n_seqs))
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        own = tuple(part.copy() for part in first)
        tokens = range(3 * i, 3 * i + 3)
        got = _layer((own[0], own[1]), _plan([source], [target]), shape, tokens)
        np.testing.assert_array_equal(together[3 * i : 3 * i + 3], got)
        for part, mine in zip(alone, own, strict=True):
            part[target] = mine[target]
    for a, b in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(a, b)


def test_softplus_of_large_numbers_does_not_overflow() -> None:
    x = np.array([-200, -1, 0, 1, 19.9, 20, 20.1, 1e4], np.float32)
    np.testing.assert_allclose(softplus(x), np.logaddexp(0, x.astype(np.float64)), 1e-6, 1e-30)


# -- as ops


def _whole_ops(shape: Shape, n: int) -> NumpyOps:
    """Ops whose second state is of that shape, for n tokens of a new sequence."""
    states = StateSpec(2, 1, (StateLayer(7, 3), shape.layer))
    spec = MemorySpec((), states, (LayerPlace(state=0), LayerPlace(), LayerPlace(state=1)))
    plan = Plan(causal_plan(range(n)).micro, (), _plan([2], [0]))
    return NumpyOps(plan, spec, (), NumpyStateStore(states))


@pytest.mark.parametrize("shape", [MAMBA, MAMBA2], ids=["mamba", "mamba2"])
def test_ops_equal_those_without_states(shape: Shape) -> None:
    n = 9
    cached, uncached = _whole_ops(shape, n), UncachedOps(range(n), ())
    x, dt, b, c = shape.scanned(n)
    flat = x.reshape(n, -1)
    np.testing.assert_allclose(
        cached.short_conv(2, flat, shape.weight()),
        uncached.short_conv(2, flat, shape.weight()),
        rtol=1e-4,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        cached.ssm_scan(2, x, dt, shape.a(), b, c),
        uncached.ssm_scan(2, x, dt, shape.a(), b, c),
        rtol=1e-4,
        atol=1e-4,
    )


def test_a_layer_finds_its_own_state() -> None:
    ops = _whole_ops(MAMBA2, 3)
    ops.short_conv(2, _random(3, 12), MAMBA2.weight())
    assert ops._states is not None
    assert not ops._states.conv(0).any()
    assert not ops._states.ssm(1).any()
    assert ops._states.conv(1)[0].all()


def test_states_need_a_plan_and_a_memory_that_have_them() -> None:
    ops = _whole_ops(MAMBA, 3)
    memory, plan = MemorySpec((), None, (LayerPlace(),)), causal_plan(range(3))
    x, dt, b, c = MAMBA.scanned(3)
    for lacking in (NumpyOps(ops.plan, memory, ()), NumpyOps(plan, ops._spec, (), ops._states)):
        with pytest.raises(NotSupported, match="without states"):
            lacking.short_conv(0, x.reshape(3, -1), MAMBA.weight())
        with pytest.raises(NotSupported, match="without states"):
            lacking.ssm_scan(0, x, dt, MAMBA.a(), b, c)
