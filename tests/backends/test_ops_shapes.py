"""Norms, activations and shapes against formulas, on whole tensors and on views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvcellar.backends.operations import Ops
from kvcellar.errors import PositionError
from kvcellar.types import KVType
from tests.backends.ops_bench import AnyBench, close_to, plan_of, rows

F64 = npt.NDArray[np.float64]


def _gelu(x: F64) -> F64:
    """By the tanh formula."""
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def _silu(x: F64) -> F64:
    return np.asarray(x / (1 + np.exp(-x)))


UNARY: dict[str, tuple[Callable[[Ops[Any], Any], Any], Callable[[F64], F64], float]] = {
    "silu": (lambda ops, x: ops.silu(x), _silu, 1e-5),
    "gelu": (lambda ops, x: ops.gelu(x), _gelu, 2e-3),  # ggml looks it up in a table of f16
    "softcap": (lambda ops, x: ops.softcap(x, 1.5), lambda x: 1.5 * np.tanh(x / 1.5), 1e-5),
    "scale": (lambda ops, x: ops.scale(x, -2.0), lambda x: -2.0 * x, 1e-6),
}
BINARY: dict[str, tuple[Callable[[Ops[Any], Any, Any], Any], Callable[[F64, F64], F64], float]] = {
    "swiglu": (lambda ops, a, b: ops.swiglu(a, b), lambda a, b: _silu(a) * b, 1e-5),
    "geglu": (lambda ops, a, b: ops.geglu(a, b), lambda a, b: _gelu(a) * b, 2e-3),
    "add": (lambda ops, a, b: ops.add(a, b), lambda a, b: a + b, 1e-6),
    "mul": (lambda ops, a, b: ops.mul(a, b), lambda a, b: a * b, 1e-6),
}


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_tensor(bench: AnyBench, name: str, n: int) -> None:
    node, formula, tolerance = UNARY[name]
    x = rows(n, 24) * 3
    close_to(bench.run(node, x), formula(x.astype(np.float64)), tolerance)


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_a_piece_and_of_heads_of_a_piece(bench: AnyBench, name: str, n: int) -> None:
    node, formula, tolerance = UNARY[name]
    x = rows(n, 24) * 3

    def flat(ops: Ops[Any], x: Any) -> Any:
        return node(ops, ops.split(x, [8, 16])[1])

    def by_head(ops: Ops[Any], x: Any) -> Any:
        return ops.merge(node(ops, ops.split(ops.heads(x, 2), [4, 8])[1]))

    close_to(bench.run(flat, x), formula(x[:, 8:].astype(np.float64)), tolerance)
    pieces = x.reshape(n, 2, 12)[..., 4:].reshape(n, -1).astype(np.float64)
    close_to(bench.run(by_head, x), formula(pieces), tolerance)


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_pieces_and_of_their_heads(bench: AnyBench, name: str, n: int) -> None:
    node, formula, tolerance = BINARY[name]
    x = rows(n, 24) * 3

    def flat(ops: Ops[Any], x: Any) -> Any:
        return node(ops, *ops.split(x, [12, 12]))

    def by_head(ops: Ops[Any], x: Any) -> Any:
        return ops.merge(node(ops, *ops.split(ops.heads(x, 3), [4, 4])))

    a, b = np.split(x.astype(np.float64), 2, axis=1)
    close_to(bench.run(flat, x), formula(a, b), tolerance)
    a, b = np.split(x.reshape(n, 3, 8).astype(np.float64), 2, axis=2)
    close_to(bench.run(by_head, x), formula(a, b).reshape(n, -1), tolerance)


@pytest.mark.parametrize("n", [1, 5])
def test_norms(bench: AnyBench, n: int) -> None:
    x, weight, bias, eps = rows(n, 24) * 3 + 1, rows(12, seed=1), rows(12, seed=2), 1e-3
    w, b = bench.weight(weight), bench.weight(bias)

    def forward(ops: Ops[Any], x: Any) -> Any:
        first, second = ops.split(x, [12, 12])
        return ops.concat([ops.layer_norm(first, w, b, eps), ops.rms_norm(second, w, eps)])

    first, second = np.split(x.astype(np.float64), 2, axis=1)
    centred = first - first.mean(axis=1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps)
    root = second / np.sqrt((second**2).mean(axis=1, keepdims=True) + eps)
    close_to(bench.run(forward, x), np.hstack([normal * weight + bias, root * weight]))


@pytest.mark.parametrize("n", [1, 5])
def test_a_norm_a_head_and_a_weight_a_head(bench: AnyBench, n: int) -> None:
    x, weight, factor = rows(n, 24), rows(4, seed=1), rows(3, 1, seed=2)
    w, f = bench.weight(weight), bench.weight(factor)

    def forward(ops: Ops[Any], x: Any) -> Any:
        heads = ops.heads(ops.split(x, [12, 12])[1], 3)
        return ops.merge(ops.mul(ops.rms_norm(heads, w, 1e-6), f))

    heads = x[:, 12:].reshape(n, 3, 4).astype(np.float64)
    root = heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + 1e-6)
    close_to(bench.run(forward, x), (root * weight * factor).reshape(n, -1))


@pytest.mark.parametrize("n", [1, 5])
def test_heads_are_cut_and_put_together_in_another_order(bench: AnyBench, n: int) -> None:
    x = rows(n, 24)

    def forward(ops: Ops[Any], x: Any) -> Any:
        a, b, c = ops.split(ops.heads(x, 2), [3, 5, 4])
        return ops.merge(ops.concat([c, a, b]))

    heads = x.reshape(n, 2, 12)
    expected = np.concatenate([heads[..., 8:], heads[..., :8]], axis=2).reshape(n, 24)
    np.testing.assert_array_equal(bench.run(forward, x), expected)


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("kind", [KVType.F32, KVType.F16, KVType.Q8_0])
def test_products_a_head(bench: AnyBench, n: int, kind: KVType) -> None:
    x, weight = rows(n, 3 * 40), rows(3, 7, 32, seed=1)
    w = bench.weight(weight, kind)

    def forward(ops: Ops[Any], x: Any) -> Any:
        return ops.merge(ops.linear_heads(ops.split(ops.heads(x, 3), [8, 32])[1], w))

    heads = x.reshape(n, 3, 40)[..., 8:].astype(np.float64)
    expected = np.einsum("nhi,hoi->nho", heads, weight.astype(np.float64)).reshape(n, -1)
    close_to(bench.run(forward, x), expected, {"f32": 1e-5, "f16": 2e-3, "q8_0": 2e-2}[kind.label])


def test_products_of_a_piece(bench: AnyBench) -> None:
    x, weight, bias = rows(5, 24), rows(7, 16, seed=1), rows(7, seed=2)
    w, b = bench.weight(weight), bench.weight(bias)
    got = bench.run(lambda ops, x: ops.linear(ops.split(x, [8, 16])[1], w, b), x)
    close_to(got, x[:, 8:].astype(np.float64) @ weight.T + bias)


@pytest.mark.parametrize("kind", [KVType.F32, KVType.F16])
def test_rows_of_positions(bench: AnyBench, kind: KVType) -> None:
    table = rows(20, 8).astype(np.float16).astype(np.float32)
    t, positions = bench.weight(table, kind), [3, 0, 19, 3]
    got = bench.run(
        lambda ops, x: ops.add(ops.embed_positions(t), x),
        plan_of(np.ones((4, 8)), positions=positions),
    )
    np.testing.assert_array_equal(got, table[positions] + 1)


def test_a_position_without_a_row_is_refused_before_ggml_looks_for_it(bench: AnyBench) -> None:
    t = bench.weight(rows(20, 8))
    executor = bench.executor(lambda ops, x: ops.add(ops.embed_positions(t), x))
    for positions in ([20], [19, 3, 2**31 - 1]):
        x = np.ones((len(positions), 8))
        with pytest.raises(PositionError, match=rf"position {max(positions)}: .* 20 positions"):
            executor.run(plan_of(x, positions=positions))


def test_pieces_must_be_the_whole(bench: AnyBench) -> None:
    with pytest.raises(AssertionError):
        bench.run(lambda ops, x: ops.split(x, [8, 8])[0], rows(2, 24))
