"""Sampling against an implementation that sorts and loops in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import ComputeError, OptionError
from kvcellar.text.sampler import Sampler, SamplerOptions, log_softmax
from kvcellar.types import Float32Array
from tests.profiles import examples


def plain(**options: Any) -> SamplerOptions:
    """Options that change nothing but what is given."""
    return SamplerOptions(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options})


def naive_distribution(
    logits: Sequence[float], history: Sequence[int], options: SamplerOptions
) -> dict[int, float]:
    """The chain step by step: a list of (logit, id), cut and weighed."""
    values = list(logits)
    for token, bias in options.logit_bias.items():
        values[token] = float(np.float32(values[token]) + np.float32(bias))
    n = options.penalty_last_n
    recent = list(history) if n < 0 else list(history)[len(history) - min(n, len(history)) :]
    for token, count in Counter(recent).items():
        value = values[token]
        factor = options.repetition_penalty
        value = value * factor if value <= 0 else value / factor
        value -= count * options.frequency_penalty + options.presence_penalty
        values[token] = float(np.float32(value))
    ranked = sorted((-value, i) for i, value in enumerate(values) if value > -math.inf)
    if options.temperature == 0:
        return {ranked[0][1]: 1.0}
    if options.top_k:
        ranked = ranked[: options.top_k]
    best = ranked[0][0]
    if options.top_p < 1:
        weights = [math.exp(best - negative) for negative, _ in ranked]
        mass = 0.0
        for kept, weight in enumerate(weights, 1):
            mass += weight
            if mass >= options.top_p * math.fsum(weights) * (1 - 1e-12):
                ranked = ranked[:kept]
                break
    if options.min_p > 0:
        ranked = [r for r in ranked if math.exp(best - r[0]) >= options.min_p * (1 - 1e-12)]
    weights = [math.exp((best - negative) / options.temperature) for negative, _ in ranked]
    return {i: weight / math.fsum(weights) for (_, i), weight in zip(ranked, weights, strict=True)}


_LOGITS = st.lists(
    st.one_of(st.floats(-20, 20, width=16), st.sampled_from([0.0, 1.0, 2.0])),
    min_size=1,
    max_size=300,
)


@examples(150)
@given(
    logits=_LOGITS,
    data=st.data(),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.1, 0.55, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.45]),
    penalties=st.tuples(
        st.sampled_from([1.0, 1.3]), st.sampled_from([0.0, 0.5]), st.integers(-1, 5)
    ),
)
def test_the_distribution_is_that_of_the_naive_chain(
    logits: list[float],
    data: st.DataObject,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalties: tuple[float, float, int],
) -> None:
    tokens = st.integers(0, len(logits) - 1)
    history = data.draw(st.lists(tokens, max_size=10))
    options = SamplerOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalties[0],
        presence_penalty=penalties[1],
        frequency_penalty=penalties[1] / 2,
        penalty_last_n=penalties[2],
        logit_bias=data.draw(st.dictionaries(tokens, st.sampled_from([-1.0, 2.0]), max_size=3)),
    )
    row = np.array(logits, np.float32)
    before = row.copy()
    ids, probabilities = Sampler(options).distribution(row, history)
    expected = naive_distribution(row.tolist(), history, options)
    assert dict(zip(ids.tolist(), probabilities.tolist(), strict=True)) == pytest.approx(expected)
    assert set(ids.tolist()) == set(expected)
    assert np.array_equal(row, before)


@examples(60)
@given(seed=st.integers(0, 2**32), k=st.integers(1, 400), levels=st.sampled_from([3, 100, 10**6]))
def test_top_k_takes_the_best_and_of_equals_the_first(seed: int, k: int, levels: int) -> None:
    random = np.random.default_rng(seed)
    row = (random.integers(0, levels, 3000) / levels).astype(np.float32)
    ids, _ = Sampler(plain(top_k=k)).distribution(row)
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    assert ids.tolist() == expected


def test_draws_follow_the_distribution() -> None:
    row = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    sampler = Sampler(plain(seed=7))
    n = 20000
    counts = Counter(sampler.sample(row) for _ in range(n))
    expected = [0.5 * n, 0.25 * n, 0.15 * n, 0.1 * n]
    chi_square = sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected))
    assert chi_square < 16.3  # three degrees of freedom, one in a thousand


def test_temperature_sharpens_and_flattens() -> None:
    row = np.log(np.array([0.8, 0.2], np.float32))
    _, cold = Sampler(plain(temperature=0.5)).distribution(row)
    _, hot = Sampler(plain(temperature=2.0)).distribution(row)
    assert cold[0] == pytest.approx(0.64 / 0.68)
    assert hot[0] == pytest.approx(2 / 3)


def test_a_seed_repeats_and_none_does_not() -> None:
    row = np.zeros(1000, np.float32)
    first = Sampler(plain(seed=3))
    draws = [first.sample(row) for _ in range(20)]
    again = Sampler(plain(seed=3))
    assert [again.sample(row) for _ in range(20)] == draws
    fresh = [Sampler(plain()), Sampler(plain())]
    assert [fresh[0].sample(row) for _ in range(9)] != [fresh[1].sample(row) for _ in range(9)]


def test_a_copy_draws_the_same_from_there_on() -> None:
    row = np.zeros(1000, np.float32)
    sampler = Sampler(plain(seed=3))
    sampler.sample(row)
    twin, state = sampler.copy(), sampler.state()
    draws = [sampler.sample(row) for _ in range(5)]
    assert [twin.sample(row) for _ in range(5)] == draws
    twin.set_state(state)
    assert [twin.sample(row) for _ in range(5)] == draws


def test_greedy_takes_the_lowest_of_equals() -> None:
    row = np.array([1.0, 3.0, 3.0, -math.inf], np.float32)
    assert Sampler(SamplerOptions(temperature=0)).sample(row) == 1


def test_greedy_minds_bias_and_penalties() -> None:
    row = np.array([1.0, 3.0, 2.0], np.float32)
    assert Sampler(SamplerOptions(temperature=0, logit_bias={0: 5.0})).sample(row) == 0
    assert Sampler(SamplerOptions(temperature=0, repetition_penalty=4.0)).sample(row, [1]) == 2
    assert Sampler(SamplerOptions(temperature=0, presence_penalty=1.5)).sample(row, [1]) == 2


def test_only_the_last_n_tokens_are_penalized() -> None:
    row = np.array([1.0, 3.0, 2.0], np.float32)
    options = SamplerOptions(temperature=0, presence_penalty=1.5, penalty_last_n=1)
    assert Sampler(options).sample(row, [1, 0]) == 1
    assert Sampler(options).sample(row, [0, 1]) == 2
    unlimited = SamplerOptions(temperature=0, presence_penalty=1.5, penalty_last_n=-1)
    assert Sampler(unlimited).sample(row, [1] + [0] * 500) == 2


def test_infinite_bias_bans_and_forces() -> None:
    row = np.array([5.0, 1.0, 2.0], np.float32)
    assert Sampler(SamplerOptions(temperature=0, logit_bias={0: -math.inf})).sample(row) == 2
    forced = Sampler(plain(logit_bias={1: math.inf, 2: math.inf}))
    ids, probabilities = forced.distribution(row)
    assert ids.tolist() == [1, 2]
    assert probabilities[1] == pytest.approx(1 / (1 + math.exp(-1)))
    banned = np.array([-math.inf, 0.0], np.float32)
    assert Sampler(SamplerOptions(logit_bias={0: math.inf})).sample(banned) == 0


def test_banning_everything_is_an_error() -> None:
    options = SamplerOptions(logit_bias={0: -math.inf, 1: -math.inf})
    with pytest.raises(OptionError, match="bans every token"):
        Sampler(options).sample(np.zeros(2, np.float32))


def test_a_bias_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises(OptionError, match="token 5, the vocabulary has 2"):
        Sampler(SamplerOptions(logit_bias={5: 1.0})).sample(np.zeros(2, np.float32))


@pytest.mark.parametrize("history", [[-1], [2]])
def test_a_history_beyond_the_vocabulary_is_an_error(history: list[int]) -> None:
    options = SamplerOptions(repetition_penalty=1.1)
    with pytest.raises(OptionError, match="history"):
        Sampler(options).sample(np.zeros(2, np.float32), history)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_damaged_logits_are_an_error(bad: float, temperature: float) -> None:
    row = np.array([0.0, bad, 1.0], np.float32)
    with pytest.raises(ComputeError, match="first at token 1"):
        Sampler(SamplerOptions(temperature=temperature)).sample(row)
    with pytest.raises(ComputeError, match="first at token 1"):
        log_softmax(row)


@pytest.mark.parametrize("row", [np.full(3, -np.inf, np.float32), np.zeros((2, 2), np.float32)])
def test_logits_without_a_choice_are_an_error(row: Float32Array) -> None:
    for call in (Sampler().sample, log_softmax):
        with pytest.raises(ComputeError):
            call(row)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("penalty_last_n", -2),
        ("seed", -1),
        ("seed", 1.0),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {"1": 0.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 1e300}),
        ("logit_bias", {1: True}),
    ],
)
def test_options_are_checked_by_name(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=name):
        SamplerOptions(**{name: value})  # type: ignore[arg-type]


@examples(100)
@given(
    temperature=st.floats(0, 1e308, exclude_min=True),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    scale=st.sampled_from([0.0, 1.0, 1e4, 1e38]),
)
def test_extremes_still_give_probabilities(
    temperature: float, top_p: float, min_p: float, scale: float
) -> None:
    row = (np.linspace(-1, 1, 50) * scale).astype(np.float32)
    options = plain(temperature=temperature, top_p=top_p, min_p=min_p, seed=1)
    ids, probabilities = Sampler(options).distribution(row)
    assert np.isfinite(probabilities).all()
    assert probabilities.sum() == pytest.approx(1)
    assert Sampler(options).sample(row) in ids


@given(st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=50))
def test_log_softmax_is_exact(logits: list[float]) -> None:
    result = log_softmax(np.array(logits, np.float32))
    total = math.fsum(math.exp(value - max(logits)) for value in logits)
    expected = [value - max(logits) - math.log(total) for value in logits]
    assert result.dtype == np.float64
    assert result.tolist() == pytest.approx(expected, abs=1e-12)
