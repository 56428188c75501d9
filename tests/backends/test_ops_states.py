"""Convolutions and scans over states in rows, against the formulas, a token at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.backends.operations import Ops
from kvcellar.errors import NotSupported
from kvcellar.plan import Plan, StatePlan
from kvcellar.types import (
    AnyArray,
    Float32Array,
    KVType,
    LayerPlace,
    MemorySpec,
    StateLayer,
    StateSpec,
)
from tests.backends.ops_bench import AnyBench, Bench, NumpyBench, OpenBench, close_to, plan_of, rows
from tests.profiles import examples

N_ROWS = 5
OTHER = 7
"""Values of a row that belong to the layer before."""
F64 = npt.NDArray[np.float64]


@dataclass
class Mamba:
    """A layer that convolves all its inputs and scans some of them."""

    n_head: int = 4
    d: int = 3
    d_state: int = 6
    n_group: int = 2
    k: int = 4
    wide_a: bool = False

    def __post_init__(self) -> None:
        n_head, n_group, d_state = self.n_head, self.n_group, self.d_state
        self.sizes = [n_head * self.d, n_head, n_group * d_state, n_group * d_state]
        self.width = sum(self.sizes)
        self.conv = rows(self.width, self.k, seed=1)
        self.a = -np.abs(rows(n_head, d_state if self.wide_a else 1, seed=2))

    @property
    def spec(self) -> MemorySpec:
        own = StateLayer((self.k - 1) * self.width, self.n_head * self.d * self.d_state)
        states = StateSpec(N_ROWS, 3, (StateLayer(OTHER), own))
        return MemorySpec((), states, (LayerPlace(state=0), LayerPlace(state=1)))

    def forward(self, bench: AnyBench, kind: KVType = KVType.F32) -> Forward:
        return Forward(self, bench.weight(self.conv, kind), bench.weight(self.a, kind))

    def expected(self, xs: F64, state: AnyArray) -> tuple[F64, F64]:
        """Outputs and the state left by the inputs ``[n, width]`` of one sequence."""
        n_conv, n_head = (self.k - 1) * self.width, self.n_head
        conv, ssm = np.split(state.astype(np.float64), [n_conv])
        last = conv.reshape(self.width, self.k - 1).T
        ssm = ssm.reshape(n_head, self.d, self.d_state)
        out, group = [], n_head // self.n_group
        for x in xs:
            window = np.vstack([last, x])
            last = window[1:]
            x, dt, b, c = np.split((window * self.conv.T).sum(axis=0), np.cumsum(self.sizes)[:-1])
            step = np.log1p(np.exp(dt))[:, np.newaxis, np.newaxis]
            b, c = (np.repeat(y.reshape(self.n_group, 1, -1), group, axis=0) for y in (b, c))
            a = self.a[:, np.newaxis].astype(np.float64)
            ssm = ssm * np.exp(step * a) + step * x.reshape(n_head, self.d, 1) * b
            out.append((ssm * c).sum(axis=2).ravel())
        return np.array(out), np.concatenate([last.T.ravel(), ssm.ravel()])


@dataclass
class Forward:
    """The pass of a :class:`Mamba`."""

    mamba: Mamba
    conv: Any
    a: Any

    def __call__(self, ops: Ops[Any], x: Any) -> Any:
        m = self.mamba
        x, dt, b, c = ops.split(ops.short_conv(1, x, self.conv), m.sizes)
        heads, b, c = ops.heads(x, m.n_head), ops.heads(b, m.n_group), ops.heads(c, m.n_group)
        return ops.merge(ops.ssm_scan(1, heads, dt, self.a, b, c))


def state_plan(x: Float32Array, sources: list[int], targets: list[int]) -> Plan:
    states = StatePlan(np.array(sources, np.int32), np.array(targets, np.int64))
    return plan_of(x, states=states)


def open_filled(open_bench: OpenBench, mamba: Mamba) -> AnyBench:
    """A bench whose states are random numbers."""
    bench = open_bench(mamba.spec)
    assert bench.memory.states is not None
    width = bench.memory.states.spec.row_bytes // 4
    bench.memory.states.write(np.arange(N_ROWS), rows(N_ROWS, width, seed=9))
    return bench


def all_states(bench: AnyBench) -> Float32Array:
    """All rows, that of zeros last."""
    assert bench.memory.states is not None
    return bench.memory.states.read(np.arange(N_ROWS + 1))


def _check(
    bench: AnyBench, mamba: Mamba, x: Float32Array, sources: list[int], targets: list[int]
) -> None:
    """One run, of which outputs and every row are as the formulas have them."""
    _check_run(bench, mamba, mamba.forward(bench), state_plan(x, sources, targets))


def _check_run(bench: AnyBench, mamba: Mamba, forward: Forward, plan: Plan) -> None:
    before, states, x = all_states(bench), plan.states, plan.micro.embeddings
    assert states is not None
    assert x is not None
    got = bench.run(forward, plan)
    wanted, out = before.astype(np.float64), []
    pieces = np.split(x.astype(np.float64), states.n_seqs)
    for piece, source, target in zip(pieces, states.sources, states.targets, strict=True):
        y, wanted[target, OTHER:] = mamba.expected(piece, before[source, OTHER:])
        out.append(y)
    close_to(got, np.concatenate(out))
    after, untouched = all_states(bench), np.setdiff1d(np.arange(N_ROWS + 1), states.targets)
    close_to(after, wanted)
    np.testing.assert_array_equal(after[untouched], before[untouched])
    assert not after[N_ROWS].any()


VARIANTS = {
    "mamba2": Mamba(),
    "mamba": Mamba(n_head=5, d=1, d_state=6, n_group=1, wide_a=True),
    "one group": Mamba(n_group=1),
    "wide heads": Mamba(n_head=2, d=16, d_state=32, n_group=1),
    "one head": Mamba(n_head=1, n_group=1),
}


@pytest.mark.parametrize("mamba", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(
    ("n", "sources", "targets"),
    [
        (1, [2], [0]),
        (7, [1], [1]),  # in place
        (2, [N_ROWS], [3]),  # from zeros, fewer inputs than the convolution remembers
        (6, [4, 1, N_ROWS], [4, 0, 3]),
        (3, [2, 2, 2], [0, 1, 4]),  # a state that three share
        (6, [N_ROWS, N_ROWS], [1, 0]),
        (2, [0, 1], [1, 0]),
    ],
)
def test_states_are_read_from_rows_and_left_in_rows(
    open_bench: OpenBench, mamba: Mamba, n: int, sources: list[int], targets: list[int]
) -> None:
    bench = open_filled(open_bench, mamba)
    _check(bench, mamba, rows(n, mamba.width, seed=n), sources, targets)


@pytest.mark.parametrize("make", [Bench, NumpyBench], ids=["ggml", "numpy"])
@given(st.data())
@examples(25)
def test_any_rows(make: OpenBench, data: st.DataObject) -> None:
    mamba = VARIANTS[data.draw(st.sampled_from(sorted(VARIANTS)))]
    bench = open_filled(make, mamba)
    for seed in range(2):
        n_seqs, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
        row = st.integers(0, N_ROWS - 1)
        targets = data.draw(st.lists(row, min_size=n_seqs, max_size=n_seqs, unique=True))
        sources = data.draw(st.lists(st.integers(0, N_ROWS), min_size=n_seqs, max_size=n_seqs))
        _check(bench, mamba, rows(n_seqs * steps, mamba.width, seed=seed), sources, targets)
    bench.close()


def test_token_by_token_equals_all_at_once(open_bench: OpenBench) -> None:
    mamba = Mamba()
    x = rows(6, mamba.width)
    whole, single = open_filled(open_bench, mamba), open_filled(open_bench, mamba)
    expected = whole.run(mamba.forward(whole), state_plan(x, [N_ROWS], [0]))
    executor = single.executor(mamba.forward(single))
    for i in range(6):
        source = 0 if i else N_ROWS
        close_to(executor.run(state_plan(x[i : i + 1], [source], [0])), expected[i : i + 1])
    close_to(all_states(single)[0], all_states(whole)[0])


def test_a_sequence_does_not_depend_on_those_beside_it(open_bench: OpenBench) -> None:
    mamba = Mamba()
    x = rows(6, mamba.width)
    alone, beside = open_filled(open_bench, mamba), open_filled(open_bench, mamba)
    expected = alone.run(mamba.forward(alone), state_plan(x[2:4], [1], [1]))
    got = beside.run(mamba.forward(beside), state_plan(x, [0, 1, 2], [0, 1, 2]))
    np.testing.assert_array_equal(got[2:4], expected)
    np.testing.assert_array_equal(all_states(beside)[1], all_states(alone)[1])


def test_states_are_written_even_if_no_output_is_wanted(open_bench: OpenBench) -> None:
    mamba = Mamba()
    bench, other = open_filled(open_bench, mamba), open_filled(open_bench, mamba)
    plan = state_plan(rows(4, mamba.width), [0, N_ROWS], [1, 2])
    none = replace(plan, micro=replace(plan.micro, outputs=np.empty(0, np.int32)))
    assert bench.run(mamba.forward(bench), none).size == 0
    other.run(mamba.forward(other), plan)
    np.testing.assert_array_equal(all_states(bench), all_states(other))


def test_weights_of_half_precision_are_widened(open_bench: OpenBench) -> None:
    mamba = Mamba()
    mamba.conv, mamba.a = (x.astype(np.float16).astype(np.float32) for x in (mamba.conv, mamba.a))
    bench = open_filled(open_bench, mamba)
    plan = state_plan(rows(4, mamba.width), [0, 1], [2, 3])
    _check_run(bench, mamba, mamba.forward(bench, KVType.F16), plan)


def test_a_convolution_of_one_input_has_no_state(open_bench: OpenBench) -> None:
    spec = MemorySpec((), StateSpec(2, 1, (StateLayer(0, 0),)), (LayerPlace(state=0),))
    bench = open_bench(spec)
    x, weight = rows(4, 5), rows(5, 1, seed=1)
    w = bench.weight(weight)
    got = bench.run(lambda ops, x: ops.short_conv(0, x, w), state_plan(x, [0, 1], [0, 1]))
    close_to(got, x * weight[:, 0])


def test_states_need_a_plan_and_a_memory_that_have_them(open_bench: OpenBench) -> None:
    mamba = Mamba()
    bench = open_filled(open_bench, mamba)
    with pytest.raises(NotSupported, match="without states"):
        bench.run(mamba.forward(bench), rows(4, mamba.width))
