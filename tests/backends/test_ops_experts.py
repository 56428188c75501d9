"""Mixtures of experts against a loop over tokens and experts."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from kvcellar.backends.operations import ROUTING, ExpertWeights, Routing
from kvcellar.types import Float32Array, KVType
from tests.backends.ops_bench import AnyBench, Bench, close_to, rows

N_EXPERT, N_EMBD, N_FF = 6, 16, 8
F64 = npt.NDArray[np.float64]

SHAPES = {
    "router": (N_EXPERT, N_EMBD),
    "gate": (N_EXPERT, N_FF, N_EMBD),
    "up": (N_EXPERT, N_FF, N_EMBD),
    "down": (N_EXPERT, N_EMBD, N_FF),
    "router_bias": (N_EXPERT,),
    "gate_bias": (N_EXPERT, N_FF),
    "up_bias": (N_EXPERT, N_FF),
    "down_bias": (N_EXPERT, N_EMBD),
    "choice_bias": (N_EXPERT,),
    "gate_scale": (N_EXPERT,),
    "up_scale": (N_EXPERT,),
    "down_scale": (N_EXPERT,),
}
PLAIN = ("router", "gate", "up", "down")


def _arrays(names: tuple[str, ...]) -> dict[str, Float32Array]:
    return {
        name: rows(*SHAPES[name], seed=10 + i) for i, name in enumerate(SHAPES) if name in names
    }


def _weights(bench: AnyBench, arrays: dict[str, Float32Array], n_used: int) -> ExpertWeights[Any]:
    tensors: dict[str, Any] = {name: bench.weight(values) for name, values in arrays.items()}
    return ExpertWeights(n_used=n_used, **tensors)


def _expected(
    x: Float32Array, arrays: dict[str, Float32Array], n_used: int, routing: Routing
) -> F64:
    """A token and an expert at a time."""
    w: dict[str, Any] = {name: values.astype(np.float64) for name, values in arrays.items()}
    out = np.zeros((len(x), N_EMBD))
    for row, token in zip(out, x.astype(np.float64), strict=True):
        scores = w["router"] @ token + w.get("router_bias", 0.0)
        shares = {
            "softmax": np.exp(scores) / np.exp(scores).sum(),
            "sigmoid": 1 / (1 + np.exp(-scores)),
            "softmax_chosen": scores,
        }[routing.gating]
        chosen = np.argsort(-(shares + w.get("choice_bias", 0.0)))[:n_used]
        taken = shares[chosen]
        if routing.gating == "softmax_chosen":
            taken = np.exp(taken) / np.exp(taken).sum()
        if routing.normalised:
            taken = taken / max(taken.sum(), 2.0**-14)
        for expert, share in zip(chosen, taken * routing.factor, strict=True):
            row += share * _expert(token, w, int(expert), routing)
    return out


def _expert(token: F64, w: dict[str, Any], e: int, routing: Routing) -> F64:
    def product_of(part: str, x: F64) -> F64:
        y: F64 = w[part][e] @ x
        if f"{part}_scale" in w:
            y = y * w[f"{part}_scale"][e]
        return y + w[f"{part}_bias"][e] if f"{part}_bias" in w else y

    gate, up = product_of("gate", token), product_of("up", token)
    if routing.activation == "swiglu_oai":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0) + 1
        return product_of("down", gate / (1 + np.exp(-1.702 * gate)) * up)
    return product_of("down", gate / (1 + np.exp(-gate)) * up)


GATINGS: tuple[Literal["softmax", "sigmoid", "softmax_chosen"], ...] = (
    "softmax",
    "sigmoid",
    "softmax_chosen",
)
ROUTINGS = [
    Routing(gating, normalised, factor)
    for gating, normalised, factor in product(GATINGS, (True, False), (1.0, 2.5))
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("extra", [(), ("router_bias", "choice_bias")])
def test_ways_of_choosing(bench: AnyBench, routing: Routing, extra: tuple[str, ...]) -> None:
    x, arrays = rows(7, N_EMBD), _arrays((*PLAIN, *extra))
    weights = _weights(bench, arrays, 3)
    got = bench.run(lambda ops, x: ops.experts(x, weights, routing), x)
    close_to(got, _expected(x, arrays, 3, routing))


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
@pytest.mark.parametrize("extra", ["bias", "scale", "bias scale"])
@pytest.mark.parametrize(("n", "n_used"), [(1, 1), (5, 6), (40, 2)])
def test_biases_and_scales(
    bench: AnyBench, activation: Any, extra: str, n: int, n_used: int
) -> None:
    names = tuple(f"{part}_{kind}" for part in ("gate", "up", "down") for kind in extra.split())
    x, arrays = rows(n, N_EMBD) * 3, _arrays((*PLAIN, *names))
    routing = Routing("softmax_chosen", activation=activation)
    weights = _weights(bench, arrays, n_used)
    got = bench.run(lambda ops, x: ops.experts(x, weights, routing), x)
    close_to(got, _expected(x, arrays, n_used, routing))


@pytest.mark.parametrize("extra", [(), ("gate_bias", "up_bias")])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_gate_and_up_may_be_one_matrix(
    bench: AnyBench, extra: tuple[str, ...], activation: Any
) -> None:
    x, arrays, routing = rows(5, N_EMBD), _arrays((*PLAIN, *extra)), Routing(activation=activation)
    both = np.concatenate([arrays["gate"], arrays["up"]], axis=1)
    scale = rows(N_EXPERT, seed=40)
    apart = {name: values for name, values in arrays.items() if name not in ("gate", "up")}
    tensors: dict[str, Any] = {name: bench.weight(values) for name, values in apart.items()}
    weights = ExpertWeights(
        n_used=2, gate_up=bench.weight(both), gate_up_scale=bench.weight(scale), **tensors
    )
    got = bench.run(lambda ops, x: ops.experts(x, weights, routing), x)
    scaled = {**arrays, "gate_scale": scale, "up_scale": scale}
    close_to(got, _expected(x, scaled, 2, routing))


def test_the_default_is_a_normalised_softmax(bench: AnyBench) -> None:
    x, arrays = rows(5, N_EMBD), _arrays(PLAIN)
    weights = _weights(bench, arrays, 2)
    got = bench.run(lambda ops, x: ops.experts(x, weights), x)
    close_to(got, _expected(x, arrays, 2, ROUTING))


def test_experts_take_a_piece_of_a_tensor(bench: AnyBench) -> None:
    x, arrays = rows(5, 2 * N_EMBD), _arrays(PLAIN)
    weights = _weights(bench, arrays, 2)
    got = bench.run(lambda ops, x: ops.experts(ops.split(x, [N_EMBD] * 2)[1], weights), x)
    close_to(got, _expected(x[:, N_EMBD:], arrays, 2, ROUTING))


def test_a_sum_of_shares_near_zero_is_not_divided_by(bench: AnyBench) -> None:
    arrays = _arrays(PLAIN)
    x = rows(3, N_EMBD) * 1e-3
    arrays["router_bias"] = np.full(N_EXPERT, -40, np.float32)
    weights, routing = _weights(bench, arrays, 2), Routing("sigmoid")
    got = bench.run(lambda ops, x: ops.experts(x, weights, routing), x)
    if isinstance(bench, Bench):  # NumPy's sigmoid is 0 there
        close_to(got, _expected(x, arrays, 2, routing))
    assert np.abs(got).max() < 1e-10


def test_biases_of_half_precision_are_widened(bench: AnyBench) -> None:
    x, arrays = rows(5, N_EMBD), _arrays((*PLAIN, "down_bias"))
    arrays["down_bias"] = arrays["down_bias"].astype(np.float16).astype(np.float32)
    tensors: dict[str, Any] = {name: bench.weight(v) for name, v in arrays.items()}
    tensors["down_bias"] = bench.weight(arrays["down_bias"], KVType.F16)
    weights: ExpertWeights[Any] = ExpertWeights(n_used=2, **tensors)
    got = bench.run(lambda ops, x: ops.experts(x, weights), x)
    close_to(got, _expected(x, arrays, 2, ROUTING))
