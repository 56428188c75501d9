"""Choose the next token from logits.

The steps, in llama.cpp's order: logit bias, penalties, top-k, top-p, min-p, temperature, draw.
So top-p and min-p look at the distribution at temperature 1. Temperature 0 takes the best token
after bias and penalties. Invariants:

1. Of equal logits the lowest id comes first, in every step.
2. The same options with the same seed give the same tokens for the same logits and histories.
3. The caller's logits are never written to.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcellar.errors import (
    ComputeError,
    OptionError,
    check_integers,
    check_kind,
    check_range,
    check_real,
    shown,
)
from kvcellar.types import Float32Array, Int64Array

_MAX_INT = 2**31 - 1
_MAX_REAL = sys.float_info.max
_MAX_BIAS = 1e9
_GROUP = 64
_FIRST_GUESS = 256
"""Candidates that nearly always have the probability that top-p asks for."""

Float64Array = npt.NDArray[np.float64]


class Sampler:
    """Draw tokens; the only state is that of the random numbers.

    Args:
        options: None for the defaults.
    """

    def __init__(self, options: SamplerOptions | None = None) -> None:
        if options is not None:
            check_kind("options", options, SamplerOptions)
        self.options = options or SamplerOptions()
        self._random = np.random.Generator(np.random.PCG64(self.options.seed))
        bias = self.options.logit_bias
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))

    def copy(self) -> Sampler:
        """Return a sampler that draws the same from here on."""
        twin = Sampler(self.options)
        twin.set_state(self.state())
        return twin

    __copy__ = copy  # two that share their random numbers would disturb each other

    def state(self) -> Mapping[str, object]:
        """The random state, for :meth:`set_state`."""
        return copy.deepcopy(self._random.bit_generator.state)

    def set_state(self, state: Mapping[str, object]) -> None:
        """Continue from a state that :meth:`state` returned.

        Raises:
            OptionError: it is none.
        """
        try:
            self._random.bit_generator.state = copy.deepcopy(dict(state))
        except (TypeError, ValueError, LookupError, OverflowError):
            raise OptionError(f"state={shown(state)}: give what Sampler.state() returned") from None

    def sample(self, logits: Float32Array, history: Sequence[int] = ()) -> int:
        """Return the next token.

        Args:
            logits: one number per token.
            history: the tokens so far, oldest first; only penalties use it.

        Raises:
            ComputeError: the logits hold NaN or +inf.
            OptionError: a bias for a token that does not exist, or all tokens banned.
        """
        if self.options.temperature == 0:
            return self._best(self._adjust(logits, history))
        ids, probabilities = self.distribution(logits, history)
        cumulative = probabilities.cumsum()
        drawn = cumulative.searchsorted(self._random.random() * cumulative[-1], side="right")
        # Rounding may reach the very end, behind the last token that has any probability.
        last = cumulative.searchsorted(cumulative[-1])
        return int(ids[min(drawn, last)])

    def distribution(
        self, logits: Float32Array, history: Sequence[int] = ()
    ) -> tuple[Int64Array, Float64Array]:
        """Return the tokens that may be drawn and their probabilities; best first if cut.

        Raises:
            ComputeError, OptionError: as :meth:`sample`.
        """
        adjusted = self._adjust(logits, history)
        best = self._best(adjusted)
        if self.options.temperature == 0:
            return np.array([best], np.int64), np.ones(1)
        ids, values = self._cut(adjusted, best)
        # Subtracting the best first keeps tiny temperatures from dividing inf by inf.
        with np.errstate(over="ignore"):
            weights = np.exp((values - values.max()) / self.options.temperature)
        return ids, weights / weights.sum()

    def _adjust(self, logits: Float32Array, history: Sequence[int]) -> Float32Array:
        """Logits after bias and penalties."""
        _check_logits(logits)
        seen = self._seen(history, len(logits))
        if not len(self._bias_ids) and not len(seen):
            return logits
        adjusted: Float32Array = logits.copy()
        if len(self._bias_ids):
            self._add_bias(adjusted)
        if len(seen):
            self._penalize(adjusted, seen)
        return adjusted

    def _add_bias(self, adjusted: Float32Array) -> None:
        if self._bias_ids.max() >= len(adjusted):
            raise OptionError(
                f"logit_bias names token {self._bias_ids.max()}, the vocabulary has {len(adjusted)}"
            )
        forced = self._bias == math.inf
        if not forced.any():
            adjusted[self._bias_ids] += self._bias
            return
        # Several forced tokens keep the model's distribution among them.
        ids = self._bias_ids[forced]
        values = np.maximum(adjusted[ids], np.finfo(np.float32).min)
        adjusted.fill(-np.inf)
        adjusted[ids] = values

    def _seen(self, history: Sequence[int], n_vocab: int) -> Int64Array:
        if not isinstance(history, (Sequence, np.ndarray)):
            raise OptionError(f"history={shown(history)}: must be a list of tokens")
        if not self.options.has_penalties or not len(history):
            return np.empty(0, np.int64)
        last_n = self.options.penalty_last_n
        recent = history if last_n < 0 else history[-last_n:]
        seen = check_integers("history", recent)
        if min(seen) < 0 or max(seen) >= n_vocab:
            raise OptionError(f"history holds a token outside [0, {n_vocab})")
        return np.array(seen, np.int64)

    def _penalize(self, adjusted: Float32Array, seen: Int64Array) -> None:
        ids, counts = np.unique(seen, return_counts=True)
        factor = self.options.repetition_penalty
        values = adjusted[ids].astype(np.float64)
        values = np.where(values <= 0, values * factor, values / factor)
        values -= counts * self.options.frequency_penalty + self.options.presence_penalty
        adjusted[ids] = values

    def _best(self, adjusted: Float32Array) -> int:
        best = int(adjusted.argmax())
        if adjusted[best] == -math.inf:
            if not len(self._bias_ids):
                raise ComputeError("all logits are -inf: no token is possible")
            raise OptionError("logit_bias bans every token: leave at least one")
        return best

    def _cut(self, adjusted: Float32Array, best: int) -> tuple[Int64Array, Float64Array]:
        """Top-k, top-p and min-p: the tokens left, with their logits."""
        options = self.options
        top = float(adjusted[best])
        if 0 < options.top_k < len(adjusted):
            ids = _top_k(adjusted, options.top_k)
            values = adjusted[ids].astype(np.float64)
            if options.top_p < 1:
                keep = _count_top_p(np.exp(values - top), options.top_p)
                ids, values = ids[:keep], values[:keep]
        elif options.top_p < 1:
            ids = _top_p(adjusted, top, options.top_p)
            values = adjusted[ids].astype(np.float64)
        else:
            ids, values = np.arange(len(adjusted)), adjusted.astype(np.float64)
        least = top + math.log(options.min_p) if options.min_p > 0 else -math.inf
        keep_mask = (values >= least) & (values > -math.inf)
        return ids[keep_mask], values[keep_mask]


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Options of a :class:`Sampler`, a value; the defaults are llama.cpp's.

    Attributes:
        temperature: 0 always takes the best token; 1 keeps the model's distribution.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: keep the fewest best tokens that together have this probability; 1 keeps all.
        min_p: drop tokens whose probability is below this fraction of the best; 0 keeps all.
        repetition_penalty: divides (or multiplies, if negative) logits of tokens seen; 1 is none.
        presence_penalty: subtracted once from the logit of a token seen.
        frequency_penalty: subtracted from the logit of a token for each time it was seen.
        penalty_last_n: how many of the last tokens count as seen; 0 none, -1 all.
        logit_bias: added to logits by token id; -inf bans a token, inf allows only such tokens.
        seed: makes a run repeatable; None takes one from the system.

    Raises:
        OptionError: a value outside its range; names the option, the value and the range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None

    def __post_init__(self) -> None:
        self._real("temperature", 0.0, _MAX_REAL, "0 or more, finite")
        self._int("top_k", 0, _MAX_INT, f"in [0 (off), {_MAX_INT}]")
        self._real("top_p", math.ulp(0.0), 1.0, "in (0, 1]")
        self._real("min_p", 0.0, 1.0, "in [0, 1]")
        self._real("repetition_penalty", 1e-3, 1e3, "in [0.001, 1000]")
        self._real("presence_penalty", -1e3, 1e3, "in [-1000, 1000]")
        self._real("frequency_penalty", -1e3, 1e3, "in [-1000, 1000]")
        self._int("penalty_last_n", -1, _MAX_INT, f"that is -1 (all) or in [0 (off), {_MAX_INT}]")
        if self.seed is not None:
            self._int("seed", 0, 2**64 - 1, "in [0, 2**64), or None")
        object.__setattr__(self, "logit_bias", MappingProxyType(_check_bias(self.logit_bias)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it; the mapping proxy cannot be."""
        values = [getattr(self, field.name) for field in fields(self)]
        return SamplerOptions, tuple(dict(v) if isinstance(v, Mapping) else v for v in values)

    @property
    def has_penalties(self) -> bool:
        """Whether the history is used."""
        return self.penalty_last_n != 0 and (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def _real(self, name: str, low: float, high: float, allowed: str) -> None:
        value = _checked_real(name, getattr(self, name), low, high, allowed)
        object.__setattr__(self, name, value)

    def _int(self, name: str, low: int, high: int, allowed: str) -> None:
        value = _checked_int(name, getattr(self, name), low, high, allowed)
        object.__setattr__(self, name, value)


def log_softmax(logits: Float32Array) -> Float64Array:
    """Return log-probabilities, in double precision.

    Raises:
        ComputeError: the logits hold NaN or +inf, or nothing but -inf.
    """
    _check_logits(logits)
    values = logits.astype(np.float64)
    top = values.max()
    if top == -math.inf:
        raise ComputeError("all logits are -inf: no token is possible")
    values -= top
    values -= math.log(np.exp(values).sum())
    return values


def _check_logits(logits: Float32Array) -> None:
    check_kind("logits", logits, np.ndarray, made="one float a token")
    if logits.dtype.kind != "f":
        raise OptionError(f"logits have type {logits.dtype}: floats are needed, one a token")
    if logits.ndim != 1 or not len(logits):
        raise ComputeError(f"logits must be one row of numbers, found shape {logits.shape}")
    top = float(logits.max())  # NaN spreads to the maximum
    if math.isnan(top) or top == math.inf:
        raise ComputeError(
            f"logits hold {top}, first at token {int(np.argmax(logits))}: "
            "the model or its K/V cache is damaged"
        )


def _top_k(values: Float32Array, k: int) -> Int64Array:
    """Ids of the k largest, largest first, lowest id first among equals."""
    ids = _at_least_k(values, k)
    order = np.argsort(-values[ids], kind="stable")[:k]
    return ids[order]


def _at_least_k(values: Float32Array, k: int) -> Int64Array:
    """Ids, ascending, of k or more values among which the k largest are."""
    n_groups = len(values) // _GROUP
    if k > n_groups // 2:
        border = np.partition(values, len(values) - k)[len(values) - k]
    else:
        # The k-th best of the groups' best values is reached by k values at least, and by few
        # more: cheaper to find than the k-th best value, and as good a place to cut.
        maxima = values[: n_groups * _GROUP].reshape(_GROUP, n_groups).max(axis=0)
        border = np.partition(maxima, n_groups - k)[n_groups - k]
    return np.flatnonzero(values >= border)


def _top_p(values: Float32Array, top: float, p: float) -> Int64Array:
    """Ids of the fewest largest that have the probability p together, largest first."""
    total = float(np.exp(values.astype(np.float64) - top).sum())
    k = min(_FIRST_GUESS, len(values))
    while True:
        ids = _top_k(values, k)
        weights = np.exp(values[ids].astype(np.float64) - top)
        if k == len(values) or weights.sum() >= p * total:
            return ids[: _count_top_p(weights, p, total)]
        k = min(k * 16, len(values))


def _count_top_p(weights: Float64Array, p: float, total: float | None = None) -> int:
    cumulative = weights.cumsum()
    mass = cumulative[-1] if total is None else total
    return min(int(cumulative.searchsorted(p * mass)) + 1, len(weights))


def _checked_real(name: str, value: object, low: float, high: float, allowed: str) -> float:
    try:
        return check_real(name, value, low, high)
    except OptionError:
        raise OptionError(f"{name} must be {allowed}, found {shown(value)}") from None


def _checked_int(name: str, value: object, low: int, high: int, allowed: str) -> int:
    try:
        return check_range(name, value, low, high)
    except OptionError:
        raise OptionError(f"{name} must be an integer {allowed}, found {shown(value)}") from None


def _check_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise OptionError(f"logit_bias must map token ids to numbers, found {type(bias).__name__}")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token = _checked_int("a token id in logit_bias", key, 0, _MAX_INT, f"in [0, {_MAX_INT}]")
        named, allowed = f"logit_bias[{token}]", "±inf or within ±1e9"
        number = _checked_real(named, value, -math.inf, math.inf, allowed)
        if not math.isinf(number):
            _checked_real(named, number, -_MAX_BIAS, _MAX_BIAS, allowed)
        checked[token] = number
    return checked
