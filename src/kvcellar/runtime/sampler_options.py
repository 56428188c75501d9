"""How the next token is chosen, checked once."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType

from kvcellar.errors import OptionError

_MAX_INT = 2**31 - 1
_MAX_REAL = sys.float_info.max
_MAX_BIAS = 1e9


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Options of a :class:`Sampler`; the defaults are llama.cpp's.

    Attributes:
        temperature: 0 takes the best token always; 1 leaves the model's distribution.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: keep the fewest best tokens that have this probability together; 1 keeps all.
        min_p: drop tokens less likely than this part of the best; 0 keeps all.
        repetition_penalty: divides (or multiplies, if negative) logits of tokens seen; 1 is none.
        presence_penalty: taken once from the logit of a token seen.
        frequency_penalty: taken from the logit of a token for each time it was seen.
        penalty_last_n: how many of the last tokens count as seen; 0 none, -1 all.
        logit_bias: added to logits by token id; -inf bans a token, inf allows only such tokens.
        seed: makes a run repeatable; None takes fresh entropy.

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
        _check_real("temperature", self.temperature, 0.0, _MAX_REAL, "0 or more, finite")
        _check_int("top_k", self.top_k, 0, _MAX_INT, f"in [0 (off), {_MAX_INT}]")
        _check_real("top_p", self.top_p, math.ulp(0.0), 1.0, "in (0, 1]")
        _check_real("min_p", self.min_p, 0.0, 1.0, "in [0, 1]")
        _check_real("repetition_penalty", self.repetition_penalty, 1e-3, 1e3, "in [0.001, 1000]")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_real(name, getattr(self, name), -1e3, 1e3, "in [-1000, 1000]")
        allowed = f"that is -1 (all) or in [0 (off), {_MAX_INT}]"
        _check_int("penalty_last_n", self.penalty_last_n, -1, _MAX_INT, allowed)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1, "in [0, 2**64), or None")
        object.__setattr__(self, "logit_bias", MappingProxyType(_check_bias(self.logit_bias)))

    @property
    def has_penalties(self) -> bool:
        """Whether the history matters at all."""
        return self.penalty_last_n != 0 and (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _check_real(name: str, value: object, low: float, high: float, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high:
        raise OptionError(f"{name} must be {allowed}, found {value!r}")


def _check_int(name: str, value: object, low: int, high: int, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise OptionError(f"{name} must be an integer {allowed}, found {value!r}")


def _check_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise OptionError(f"logit_bias must map token ids to numbers, found {type(bias).__name__}")
    checked: dict[int, float] = {}
    for token, value in bias.items():
        _check_int("a token id in logit_bias", token, 0, _MAX_INT, f"in [0, {_MAX_INT}]")
        if value not in (math.inf, -math.inf):
            _check_real(f"logit_bias[{token}]", value, -_MAX_BIAS, _MAX_BIAS, "±inf or within ±1e9")
        checked[int(token)] = float(value)
    return checked
