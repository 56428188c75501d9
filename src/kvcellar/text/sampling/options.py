"""The options of a sampler, as a value.

Names and defaults are those of llama.cpp's ``common_params_sampling`` where it has the option.
``docs/sampling.md`` has them in a table, with the source of each rule.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any

from kvcellar.errors import (
    OptionError,
    check_choice,
    check_integers,
    check_range,
    check_real,
    shown,
)

_MAX_INT = 2**31 - 1
_MAX_REAL = sys.float_info.max
_MAX_BIAS = 1e9
_MAX_BREAKER = 40
"""Bytes of a sequence breaker; llama.cpp cuts longer ones."""

SAMPLERS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
    "adaptive_p",
)
"""Every sampler, in the default order, which is llama.cpp's."""

DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
PENALTY_OVER = ("window", "answer")

Breaker = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Options of a :class:`~kvcellar.text.sampler.Sampler`, a value; defaults are llama.cpp's.

    Attributes:
        temperature: 0 always takes the best token; 1 keeps the model's distribution.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: keep the fewest best tokens that together have this probability; 1 keeps all
            (Holtzman et al., 2019, "The curious case of neural text degeneration").
        min_p: drop tokens whose probability is below this fraction of the best; 0 keeps all
            (Nguyen et al., 2024, "Turning up the heat: min-p sampling").
        repetition_penalty: divides (or multiplies, if negative) logits of tokens seen; 1 is none
            (Keskar et al., 2019, "CTRL"; the sign as in llama.cpp).
        presence_penalty: subtracted once from the logit of a token seen (OpenAI's API).
        frequency_penalty: subtracted from the logit of a token for each time it was seen (the
            same).
        penalty_last_n: how many of the last tokens count as seen; 0 none, -1 all.
        logit_bias: added to logits by token id; -inf bans a token, inf allows only such tokens.
        seed: makes a run repeatable; None takes one from the system.
        penalty_over: which tokens the three penalties count: "window" is the last
            ``penalty_last_n`` tokens of the text, prompt included, as in llama.cpp; "answer" is
            every token behind the prompt, as OpenAI counts, whatever ``penalty_last_n``.
        min_keep: how many tokens top-p, min-p, typical-p and XTC leave at least; 0 is one.
        typical_p: keep the tokens whose surprise is nearest to the entropy, up to this
            probability; 1 keeps all (Meister et al., 2022, "Locally typical sampling").
        top_n_sigma: keep tokens within so many standard deviations of the best logit; 0 or -1
            keeps all (Tang et al., 2024, "Top-nσ: not all logits are you need").
        xtc_probability: how often XTC, "exclude top choices", drops the best tokens; 0 never
            (llama.cpp's ``llama_sampler_init_xtc``, after p-e-w's text-generation-webui#6335).
        xtc_threshold: then all tokens of at least this probability go, but the least likely of
            them; over 0.5 is off.
        dry_multiplier: scale of DRY, the penalty of tokens that would go on with a repetition; 0 is
            off (llama.cpp's ``llama_sampler_init_dry``, after text-generation-webui#5677).
        dry_base: the penalty is ``multiplier * base ** (length - allowed_length)``.
        dry_allowed_length: repetitions shorter than this cost nothing.
        dry_penalty_last_n: how many of the last tokens are searched for repetitions; 0 none, -1
            all.
        dry_sequence_breakers: what a repetition cannot reach across: strings, which need a
            tokenizer, token ids, or lists of token ids.
        mirostat: 1 or 2 holds the surprise of the text near ``mirostat_tau``, in place of all other
            samplers but the temperature, as in llama.cpp; 0 is off (Basu et al., 2020, "Mirostat").
        mirostat_tau: target surprise, in bits.
        mirostat_eta: how fast the limit follows.
        dynatemp_range: the temperature moves within ``temperature`` ± this, lower where the model
            is sure; 0 is off (llama.cpp's ``llama_sampler_init_temp_ext``).
        dynatemp_exponent: how the share of the largest entropy becomes a temperature.
        adaptive_target: prefer tokens of about this probability; negative is off (llama.cpp's
            ``llama_sampler_init_adaptive_p``).
        adaptive_decay: how much of the chosen tokens' average probability stays, a token.
        samplers: which samplers run, in which order; names of :data:`SAMPLERS`, each at most once.
            "adaptive_p" is always the last.
        choice: which of several answers to one prompt this is; each has random numbers of its own.

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
    penalty_over: str = "window"
    min_keep: int = 0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: Iterable[str | int | Iterable[int]] = DRY_SEQUENCE_BREAKERS
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    samplers: Iterable[str] = SAMPLERS
    choice: int = 0

    def __post_init__(self) -> None:
        for name, (low, high, allowed) in _REALS.items():
            value = checked_real(name, getattr(self, name), low, high, allowed)
            object.__setattr__(self, name, value)
        for name, (least, most, allowed) in _INTS.items():
            number = checked_int(name, getattr(self, name), least, most, allowed)
            object.__setattr__(self, name, number)
        if self.seed is not None:
            seed = checked_int("seed", self.seed, 0, 2**64 - 1, "in [0, 2**64), or None")
            object.__setattr__(self, "seed", seed)
        check_choice("penalty_over", self.penalty_over, PENALTY_OVER)
        object.__setattr__(self, "samplers", _check_samplers(self.samplers))
        breakers = _check_breakers(self.dry_sequence_breakers)
        object.__setattr__(self, "dry_sequence_breakers", breakers)
        object.__setattr__(self, "logit_bias", MappingProxyType(_check_bias(self.logit_bias)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it; the mapping proxy cannot be."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return partial(SamplerOptions, **values | {"logit_bias": dict(self.logit_bias)}), ()

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn: the best token is taken."""
        return self.temperature == 0 and "temperature" in self.order and not self.dynatemp_range

    @property
    def order(self) -> tuple[str, ...]:
        """The samplers as a tuple."""
        return tuple(self.samplers)

    @property
    def breakers(self) -> tuple[Breaker, ...]:
        """The sequence breakers: strings, and token ids as tuples."""
        return tuple(self.dry_sequence_breakers)  # type: ignore[arg-type]  # normalised when made

    @property
    def has_penalties(self) -> bool:
        """Whether repetition, presence or frequency penalties are on."""
        return (self.penalty_last_n != 0 or self.penalty_over == "answer") and (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def has_dry(self) -> bool:
        """Whether DRY is on."""
        return self.dry_multiplier != 0.0 and self.dry_penalty_last_n != 0

    @property
    def uses_history(self) -> bool:
        """Whether the tokens so far change what is sampled."""
        listed = {"penalties": self.has_penalties, "dry": self.has_dry}
        return not self.mirostat and any(listed.get(name, False) for name in self.order)


_COUNT = f"in [0 (off), {_MAX_INT}]"
_WINDOW = f"that is -1 (all) or in [0 (off), {_MAX_INT}]"
_PENALTY = (-1e3, 1e3, "in [-1000, 1000]")

_REALS: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, _MAX_REAL, "0 or more, finite"),
    "top_p": (math.ulp(0.0), 1.0, "in (0, 1]"),
    "min_p": (0.0, 1.0, "in [0, 1]"),
    "repetition_penalty": (1e-3, 1e3, "in [0.001, 1000]"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "typical_p": (math.ulp(0.0), 1.0, "in (0, 1]"),
    "top_n_sigma": (-1.0, 1e6, "in [-1, 1e6], where 0 or less is off"),
    "xtc_probability": (0.0, 1.0, "in [0 (off), 1]"),
    "xtc_threshold": (0.0, 1.0, "in [0, 1], where more than 0.5 is off"),
    "dry_multiplier": (0.0, 1e3, "in [0 (off), 1000]"),
    "dry_base": (1.0, 1e3, "in [1, 1000]"),
    "mirostat_tau": (0.0, 1e3, "in [0, 1000]"),
    "mirostat_eta": (0.0, 1e3, "in [0, 1000]"),
    "dynatemp_range": (0.0, 1e3, "in [0 (off), 1000]"),
    "dynatemp_exponent": (0.0, 1e3, "in [0, 1000]"),
    "adaptive_target": (-1.0, 1.0, "in [-1, 1], where less than 0 is off"),
    "adaptive_decay": (0.0, 0.99, "in [0, 0.99]"),
}
_INTS: dict[str, tuple[int, int, str]] = {
    "top_k": (0, _MAX_INT, _COUNT),
    "penalty_last_n": (-1, _MAX_INT, _WINDOW),
    "min_keep": (0, _MAX_INT, f"in [0, {_MAX_INT}]"),
    "dry_allowed_length": (1, _MAX_INT, f"in [1, {_MAX_INT}]"),
    "dry_penalty_last_n": (-1, _MAX_INT, _WINDOW),
    "mirostat": (0, 2, "that is 0 (off), 1 or 2"),
    "choice": (0, _MAX_INT, f"in [0, {_MAX_INT}]"),
}


def checked_real(name: str, value: object, low: float, high: float, allowed: str) -> float:
    """Return a number in ``[low, high]``, or say what is allowed."""
    try:
        return check_real(name, value, low, high)
    except OptionError:
        raise OptionError(f"{name} must be {allowed}, found {shown(value)}") from None


def checked_int(name: str, value: object, low: int, high: int, allowed: str) -> int:
    """Return a whole number in ``[low, high]``, or say what is allowed."""
    try:
        return check_range(name, value, low, high)
    except OptionError:
        raise OptionError(f"{name} must be an integer {allowed}, found {shown(value)}") from None


def _check_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise OptionError(f"logit_bias must map token ids to numbers, found {type(bias).__name__}")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token = checked_int("a token id in logit_bias", key, 0, _MAX_INT, f"in [0, {_MAX_INT}]")
        named, allowed = f"logit_bias[{token}]", "±inf or within ±1e9"
        number = checked_real(named, value, -math.inf, math.inf, allowed)
        if not math.isinf(number):
            checked_real(named, number, -_MAX_BIAS, _MAX_BIAS, allowed)
        checked[token] = number
    return checked


def _check_samplers(samplers: object) -> tuple[str, ...]:
    if isinstance(samplers, (str, bytes, Mapping)) or not isinstance(samplers, Iterable):
        raise OptionError(f"samplers must be a list of names, found {shown(samplers)}")
    names = tuple(samplers)
    for i, name in enumerate(names):
        if not isinstance(name, str) or name not in SAMPLERS:
            raise OptionError(
                f"samplers: there is none called {shown(name)}; known are {', '.join(SAMPLERS)}"
            )
        if name in names[:i]:
            raise OptionError(f"samplers: {name} is there twice; each can run once")
    return names


def _check_breakers(breakers: object) -> tuple[Breaker, ...]:
    if isinstance(breakers, (str, bytes, Mapping)) or not isinstance(breakers, Iterable):
        raise OptionError(
            f"dry_sequence_breakers must be a list of strings or token ids, found {shown(breakers)}"
        )
    return tuple(_check_breaker(breaker) for breaker in breakers)


def _check_breaker(breaker: object) -> Breaker:
    name = "a sequence breaker in dry_sequence_breakers"
    if isinstance(breaker, str):
        n_bytes = len(breaker.encode("utf-8", "surrogatepass"))
        if not 1 <= n_bytes <= _MAX_BREAKER:
            raise OptionError(f"{name} must have 1 to {_MAX_BREAKER} bytes, found {shown(breaker)}")
        return breaker
    listed = breaker if isinstance(breaker, Iterable) else [breaker]
    ids = tuple(check_integers(name, listed))
    if not ids or min(ids) < 0 or max(ids) > _MAX_INT:
        raise OptionError(f"{name} must be token ids in [0, {_MAX_INT}], found {shown(breaker)}")
    return ids
