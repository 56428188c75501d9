"""Products of our own within a graph: which are ours, what they share, and what they give."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvcellar.backends.base import GraphTimes
from kvcellar.backends.ggml import model_memory
from kvcellar.backends.ggml.jit.product import why_no_products
from kvcellar.backends.ggml.store import from_rows, to_rows
from kvcellar.backends.operations import Ops
from kvcellar.types import Float32Array, KVType
from tests.backends.ops_bench import Bench, Pass, plan_of, rows

REASON = why_no_products()
compiled = pytest.mark.skipif(REASON is not None, reason=str(REASON))
KINDS = (KVType.Q4_0, KVType.Q4_1, KVType.Q5_0, KVType.Q5_1, KVType.Q8_0)
PRECISION = 3e-5
"""What products may lose, relative to the norm; ggml's lose 5e-3."""


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(products=True)
    yield made
    made.close()


def product(x: Float32Array, values: Float32Array, kind: KVType) -> Float32Array:
    """What the product of x with the stored weights is."""
    stored = from_rows(to_rows(values, kind), kind).astype(np.float64)
    exact: Float32Array = (x @ stored.T).astype(np.float32)
    return exact


def assert_near(got: Float32Array, exact: Float32Array, n_products: int = 1) -> None:
    """See that nothing is lost but what rounding loses."""
    assert got.shape == exact.shape
    assert np.linalg.norm(got - exact) <= n_products * PRECISION * np.linalg.norm(exact)


def counted(bench: Bench, forward: Pass, x: Float32Array) -> dict[str, int]:
    """Of each kind of operation, how many nodes a pass has."""
    seen: list[GraphTimes] = []
    executor = bench.executor(forward)
    executor.watch(seen.append)
    executor.run(plan_of(x))
    return {kind: op.n_nodes for kind, op in seen[0].ops.items()}


@compiled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 8, 21])
def test_equals_the_exact_product(bench: Bench, kind: KVType, n: int) -> None:
    x, values, bias = rows(n, 96), rows(48, 96, seed=1), rows(48, seed=2)
    weight, added = bench.weight(values, kind), bench.weight(bias)
    got = bench.run(lambda ops, x: ops.linear(x, weight, added), x)
    assert_near(got, product(x, values, kind) + bias)


@compiled
def test_products_of_the_same_activations_quantise_them_once(bench: Bench) -> None:
    weights = [bench.weight(rows(32, 64, seed=i), KVType.Q4_1) for i in range(3)]
    last = bench.weight(rows(16, 32), KVType.Q8_0)

    def forward(ops: Ops[int], x: int) -> int:
        q, k, v = (ops.linear(x, weight) for weight in weights)
        return ops.linear(ops.add(ops.add(q, k), v), last)

    found = counted(bench, forward, rows(3, 64))
    assert found == {"QUANTISE": 2, "PRODUCT q4_1": 3, "ADD": 2, "PRODUCT q8_0": 1}
    parts = [product(rows(3, 64), rows(32, 64, seed=i), KVType.Q4_1) for i in range(3)]
    exact = product(np.sum(parts, axis=0), rows(16, 32), KVType.Q8_0)
    assert_near(bench.run(forward, rows(3, 64)), exact, n_products=2)


@compiled
@pytest.mark.parametrize(
    ("kind", "n_out"), [(KVType.F32, 32), (KVType.F16, 32), (KVType.IQ4_NL, 32), (KVType.Q4_1, 40)]
)
def test_ggml_computes_the_others(bench: Bench, kind: KVType, n_out: int) -> None:
    x, values = rows(5, 64), rows(n_out, 64, seed=1)
    weight = bench.weight(values, kind)
    assert counted(bench, lambda ops, x: ops.linear(x, weight), x) == {f"MUL_MAT {kind.label}": 1}
    got, exact = bench.run(lambda ops, x: ops.linear(x, weight), x), product(x, values, kind)
    assert np.linalg.norm(got - exact) <= 1e-2 * np.linalg.norm(exact)


@compiled
def test_ours_and_ggmls_stand_side_by_side(bench: Bench) -> None:
    x, ours, others = rows(9, 64), rows(32, 64, seed=1), rows(32, 64, seed=2)
    first, second = bench.weight(ours, KVType.Q4_0), bench.weight(others, KVType.F16)
    got = bench.run(lambda ops, x: ops.add(ops.linear(x, first), ops.linear(x, second)), x)
    exact = product(x, ours, KVType.Q4_0) + product(x, others, KVType.F16)
    assert np.linalg.norm(got - exact) <= 1e-3 * np.linalg.norm(exact)


@compiled
def test_a_part_of_the_activations_may_be_multiplied(bench: Bench) -> None:
    x, values = rows(7, 160), rows(16, 64, seed=1)
    weight = bench.weight(values, KVType.Q5_0)
    got = bench.run(lambda ops, x: ops.linear(ops.split(x, (32, 64, 64))[1], weight), x)
    assert_near(got, product(x[:, 32:96], values, KVType.Q5_0))


@compiled
@pytest.mark.alone
def test_neither_threads_nor_company_change_a_token(bench: Bench) -> None:
    x, values = rows(70, 96), rows(80, 96, seed=1)
    weight = bench.weight(values, KVType.Q4_1)
    whole = bench.run(lambda ops, x: ops.linear(x, weight), x)
    for first, last in ((0, 1), (1, 3), (3, 11), (11, 20), (20, 70)):
        part = bench.run(lambda ops, x: ops.linear(x, weight), x[first:last])
        np.testing.assert_array_equal(part, whole[first:last])
    other = Bench(products=True, n_threads=2)
    again = other.weight(values, KVType.Q4_1)
    found = other.run(lambda ops, x: ops.linear(x, again), x)
    other.close()
    np.testing.assert_array_equal(found, whole)


@compiled
def test_graphs_of_other_sizes_may_follow(bench: Bench) -> None:
    """A longer row moves the scratch memory, which earlier graphs find all the same."""
    small, large = rows(16, 32, seed=1), rows(16, 2048, seed=2)
    weights = [bench.weight(values, KVType.Q4_1) for values in (small, large)]
    short = bench.executor(lambda ops, x: ops.linear(x, weights[0]))
    long = bench.executor(lambda ops, x: ops.linear(x, weights[1]))
    before = np.array(short.run(plan_of(rows(12, 32))))
    assert_near(long.run(plan_of(rows(12, 2048))), product(rows(12, 2048), large, KVType.Q4_1))
    np.testing.assert_array_equal(short.run(plan_of(rows(12, 32))), before)


def test_a_processor_without_vnni_leaves_all_to_ggml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_memory, "why_no_products", lambda: "this processor lacks it")
    bench, values = Bench(products=True), rows(32, 64, seed=1)
    weight = bench.weight(values, KVType.Q4_1)
    found = counted(bench, lambda ops, x: ops.linear(x, weight), rows(3, 64))
    bench.close()
    assert found == {"MUL_MAT q4_1": 1}


def test_they_are_not_used_unless_asked_for() -> None:
    bench = Bench()
    weight = bench.weight(rows(32, 64), KVType.Q4_1)
    found = counted(bench, lambda ops, x: ops.linear(x, weight), rows(3, 64))
    bench.close()
    assert found == {"MUL_MAT q4_1": 1}
