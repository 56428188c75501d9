"""Choose the next token from logits.

Hooks change the logits first, then ``logit_bias`` is added and the constraint bans what it does not
allow. The samplers follow in the order of ``SamplerOptions.samplers``; llama.cpp's is the default.
What is left is drawn from. Temperature 0 takes the best token that is left. Invariants:

1. Of equal logits the lowest id comes first, in every step.
2. A random number depends on seed, choice and position alone; so the same options with the same
   seed give the same tokens for the same logits and histories.
3. The caller's logits are never written to.
4. What fails changes nothing: neither the sampler's state nor, before it accepts, the constraint's.
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvcellar.errors import (
    ComputeError,
    OptionError,
    check_callable,
    check_kind,
    check_range,
    check_real,
    shown,
)
from kvcellar.text.constraint import Constraint
from kvcellar.text.sampling import candidates as steps
from kvcellar.text.sampling.candidates import Candidates, Float64Array
from kvcellar.text.sampling.dry import Breakers, Spelling, apply_dry
from kvcellar.text.sampling.options import SAMPLERS, SamplerOptions
from kvcellar.text.sampling.penalties import Past, penalize
from kvcellar.text.sampling.selection import Randomness, selection_of
from kvcellar.types import MAX_POSITION, Float32Array, Int64Array

__all__ = ["SAMPLERS", "Hook", "Sampler", "SamplerOptions", "log_softmax"]

Hook = Callable[[Float32Array, Sequence[int]], "Float32Array | None"]
"""Takes a copy of the logits and the history; changes the copy, or returns another row."""


class Sampler:
    """Choose tokens for one text.

    Its state is how many tokens it has drawn and what mirostat and adaptive-p have seen; random
    numbers need none. A constraint has a state of its own, which moves with each token sampled.

    Args:
        options: None for the defaults.
        constraint: bans tokens before all else, and accepts each token that is sampled.
        hooks: functions that change logits, called in this order: each gets a copy of the row and
            the history, and changes the copy or returns another row.
        tokenizer: finds the tokens of ``dry_sequence_breakers``; only DRY with strings needs it.

    Raises:
        OptionError: DRY is on with strings as breakers, and there is no tokenizer.

    Attributes:
        options: as given.
        seed: the seed, also where the options leave it to the system.
        constraint: as given.
    """

    def __init__(
        self,
        options: SamplerOptions | None = None,
        *,
        constraint: Constraint | None = None,
        hooks: Iterable[Hook] = (),
        tokenizer: Spelling | None = None,
    ) -> None:
        if options is not None:
            check_kind("options", options, SamplerOptions)
        self.options = options or SamplerOptions()
        self.seed = secrets.randbits(32) if self.options.seed is None else self.options.seed
        self.constraint = _check_constraint(constraint)
        self._hooks = _check_hooks(hooks)
        self._chain = _chain(self.options, tokenizer)
        self._selection = selection_of(self.options)
        self._n_drawn = 0
        is_plain = self._chain == (_temperature,) and not self._selection.state
        self._only_best = is_plain and self.options.is_greedy
        bias = self.options.logit_bias
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))

    def copy(self) -> Sampler:
        """Return a sampler that draws the same from here on, and has its own constraint."""
        twin = object.__new__(Sampler)
        vars(twin).update(vars(self))
        twin._selection = copy.copy(self._selection)
        twin.constraint = None if self.constraint is None else self.constraint.copy()
        return twin

    __copy__ = copy  # two that share a state would disturb each other

    def state(self) -> Mapping[str, object]:
        """What the next tokens depend on, for :meth:`set_state`; JSON can hold it.

        The constraint is not in it: copy that, or let it accept the tokens again.
        """
        return {
            "seed": self.seed,
            "n_drawn": self._n_drawn,
            "selection": list(self._selection.state),
        }

    def set_state(self, state: Mapping[str, object]) -> None:
        """Continue from a state that :meth:`state` returned.

        Raises:
            OptionError: it is none, or of a sampler with other options.
        """
        try:
            self.seed, self._n_drawn, self._selection.state = _check_state(
                dict(state), len(self._selection.state)
            )
        except (TypeError, ValueError, LookupError, OverflowError, OptionError):
            raise OptionError(f"state={shown(state)}: give what Sampler.state() returned") from None

    def sample(
        self,
        logits: Float32Array,
        history: Sequence[int] = (),
        *,
        n_prompt: int = 0,
        position: int | None = None,
    ) -> int:
        """Return the next token, which the constraint accepts.

        Args:
            logits: one number per token.
            history: all tokens of the text, oldest first; only penalties and DRY use it.
            n_prompt: how many of the first are prompt; only ``penalty_over="answer"`` uses it.
            position: where the token will stand in the text, which chooses its random number.
                None: behind the history if there is one, else the number of tokens drawn so far.

        Raises:
            ComputeError: the logits hold NaN or +inf.
            OptionError: a bias for a token that does not exist, or no token is left to choose.
        """
        state = self._selection.state
        if self._only_best:
            token = self._best(logits, history, n_prompt, position)
        else:
            candidates, past, randomness = self._begin(logits, history, n_prompt, position)
            ids, probabilities = self._distribution(candidates, past, randomness)
            place = _draw(probabilities, randomness) if len(ids) > 1 else 0
            token = int(ids[place])
            state = self._selection.after(candidates, place, float(probabilities[place]))
        if self.constraint is not None:
            self.constraint.accept(token)
        self._selection.state = state
        self._n_drawn += 1
        return token

    def distribution(
        self,
        logits: Float32Array,
        history: Sequence[int] = (),
        *,
        n_prompt: int = 0,
        position: int | None = None,
    ) -> tuple[Int64Array, Float64Array]:
        """Return the tokens that :meth:`sample` may return here, and their probabilities.

        Nothing is drawn and no state changes. XTC has decided for this position: the distribution
        is the one that the token of this position comes from.

        Args:
            logits: see :meth:`sample`.
            history: likewise.
            n_prompt: likewise.
            position: likewise.

        Returns:
            Ids and probabilities, best first if top-k or top-p was applied.

        Raises:
            ComputeError, OptionError: as :meth:`sample`.
        """
        return self._distribution(*self._begin(logits, history, n_prompt, position))

    def _begin(
        self, logits: Float32Array, history: Sequence[int], n_prompt: int, position: int | None
    ) -> tuple[Candidates, Past, Randomness]:
        """Check the arguments; return what the samplers begin with."""
        row = self._adjust(logits, history)
        past = Past(history, n_prompt, len(row))
        place = len(past) or self._n_drawn if position is None else _check_position(position)
        randomness = Randomness(self.seed, self.options.choice, place)
        return Candidates(row, own=row is not logits), past, randomness

    def _best(
        self, logits: Float32Array, history: Sequence[int], n_prompt: int, position: int | None
    ) -> int:
        """Return the best token where nothing else is asked for, after the same checks."""
        row = self._adjust(logits, history)
        if n_prompt or not isinstance(history, tuple):
            Past(history, n_prompt, len(row))
        if position is not None:
            _check_position(position)
        return int(row.argmax())

    def _distribution(
        self, candidates: Candidates, past: Past, randomness: Randomness
    ) -> tuple[Int64Array, Float64Array]:
        for step in self._chain:
            step(candidates, self.options, past, randomness)
        return self._selection.shape(candidates)

    def _adjust(self, logits: Float32Array, history: Sequence[int]) -> Float32Array:
        """Return the row after hooks, bias and constraint, a copy if any of them did anything."""
        top, row = _check_logits(logits), logits
        for hook in self._hooks:
            row = _hooked(hook, row, history)
        if len(self._bias_ids):
            row = self._biased(row)
        if self.constraint is not None:
            row = _masked(row, self.constraint)
        if (top if row is logits else row.max()) == -math.inf:
            raise self._no_choice()
        return row

    def _biased(self, row: Float32Array) -> Float32Array:
        if self._bias_ids.max() >= len(row):
            raise OptionError(
                f"logit_bias names token {self._bias_ids.max()}, the vocabulary has {len(row)}"
            )
        forced = self._bias == math.inf
        if not forced.any():
            row = row.copy()
            row[self._bias_ids] += self._bias
            return row
        # Several forced tokens keep the model's distribution among them.
        ids = self._bias_ids[forced]
        biased: Float32Array = np.full_like(row, -np.inf)
        biased[ids] = np.maximum(row[ids], np.finfo(np.float32).min)
        return biased

    def _no_choice(self) -> Exception:
        if self.constraint is not None:
            return OptionError(
                "the constraint allows no token that is possible: allow more, or ban less with "
                "logit_bias and hooks"
            )
        if len(self._bias_ids):
            return OptionError("logit_bias bans every token: leave at least one")
        if self._hooks:
            return OptionError("the hooks ban every token: leave at least one")
        return ComputeError("all logits are -inf: no token is possible")


# -- the steps, by name


def _penalties(candidates: Candidates, o: SamplerOptions, past: Past, _: Randomness) -> None:
    penalize(candidates, o, past)


def _dry(
    breakers: Breakers, candidates: Candidates, o: SamplerOptions, past: Past, _: Randomness
) -> None:
    apply_dry(candidates, o, past, breakers)


def _top_n_sigma(candidates: Candidates, o: SamplerOptions, *_: object) -> None:
    steps.top_n_sigma(candidates, o.top_n_sigma)


def _top_k(candidates: Candidates, o: SamplerOptions, *_: object) -> None:
    steps.top_k(candidates, o.top_k)


def _typical_p(candidates: Candidates, o: SamplerOptions, *_: object) -> None:
    steps.typical_p(candidates, o.typical_p, o.min_keep)


def _top_p(candidates: Candidates, o: SamplerOptions, *_: object) -> None:
    steps.top_p(candidates, o.top_p, o.min_keep)


def _min_p(candidates: Candidates, o: SamplerOptions, *_: object) -> None:
    steps.min_p(candidates, o.min_p, o.min_keep)


def _xtc(candidates: Candidates, o: SamplerOptions, _: Past, randomness: Randomness) -> None:
    if randomness.for_xtc < o.xtc_probability:
        steps.xtc(candidates, o.xtc_threshold, o.min_keep)


def _temperature(candidates: Candidates, o: SamplerOptions, *_: object) -> None:
    spread = 0.0 if o.mirostat else o.dynatemp_range
    steps.temperature(candidates, o.temperature, spread, o.dynatemp_exponent)


Step = Callable[[Candidates, SamplerOptions, Past, Randomness], None]

_STEPS: Mapping[str, Step] = {
    "penalties": _penalties,
    "top_n_sigma": _top_n_sigma,
    "top_k": _top_k,
    "typ_p": _typical_p,
    "top_p": _top_p,
    "min_p": _min_p,
    "xtc": _xtc,
    "temperature": _temperature,
}
_KEEPS_BEST = frozenset({"top_n_sigma", "top_k", "top_p", "min_p", "temperature"})
"""Steps after which the best token is still the best."""


def _chain(options: SamplerOptions, tokenizer: Spelling | None) -> tuple[Step, ...]:
    if tokenizer is not None and not hasattr(tokenizer, "encode"):
        raise OptionError(f"tokenizer={shown(tokenizer)}: must be a Tokenizer, or None")
    names, known = _active(options), dict(_STEPS)
    if "dry" in names:
        known["dry"] = partial(_dry, Breakers(options.breakers, tokenizer))
    return tuple(known[name] for name in names)


def _active(options: SamplerOptions) -> list[str]:
    """The names of the steps that change anything, in order."""
    if options.mirostat:
        return ["temperature"]
    is_on = {
        "penalties": options.has_penalties,
        "dry": options.has_dry,
        "top_n_sigma": options.top_n_sigma > 0,
        "top_k": options.top_k > 0,
        "typ_p": options.typical_p < 1,
        "top_p": options.top_p < 1,
        "min_p": options.min_p > 0,
        "xtc": options.xtc_probability > 0 and options.xtc_threshold <= 0.5,
        "temperature": options.temperature != 1 or options.dynatemp_range > 0,
        "adaptive_p": False,  # it is how the token is drawn
    }
    names = [name for name in options.order if is_on[name]]
    if options.is_greedy:
        names = names[: names.index("temperature")]
        while names and names[-1] in _KEEPS_BEST:
            names.pop()
        names.append("temperature")
    return names


def _draw(probabilities: Float64Array, randomness: Randomness) -> int:
    cumulative = probabilities.cumsum()
    drawn = cumulative.searchsorted(randomness.for_token * cumulative[-1], side="right")
    if drawn == len(cumulative):  # rounding may reach the end, behind what has any probability
        drawn = cumulative.searchsorted(cumulative[-1])
    return int(drawn)


# -- what changes the row, and checks


def _hooked(hook: Hook, row: Float32Array, history: Sequence[int]) -> Float32Array:
    given = row.copy()
    returned = hook(given, history)
    changed = given if returned is None else returned
    name = f"the hook {getattr(hook, '__name__', type(hook).__name__)}"
    is_row = isinstance(changed, np.ndarray) and changed.dtype.kind == "f"
    if not is_row or changed.shape != row.shape:
        raise OptionError(
            f"{name} returned {shown(returned)}: a row of {len(row)} floats is needed, or None"
        )
    top = float(changed.max())
    if math.isnan(top) or top == math.inf:
        raise OptionError(f"{name} left {top} in the logits: numbers and -inf are allowed")
    return changed.astype(np.float32)


def _masked(row: Float32Array, constraint: Constraint) -> Float32Array:
    allowed = constraint.allowed()
    if len(allowed) > len(row):
        raise OptionError(
            f"the constraint is made for {len(allowed)} tokens, the logits have {len(row)}"
        )
    if len(allowed) < len(row):  # rows of a padded vocabulary
        allowed = np.concatenate((allowed, np.zeros(len(row) - len(allowed), np.bool_)))
    with np.errstate(divide="ignore"):  # a choice of two values for each token is slower
        banned = np.reciprocal(allowed.astype(np.float32)) - 1  # 0, or inf
    masked: Float32Array = row - banned
    return masked


def _check_position(position: int) -> int:
    return check_range("position", position, 0, MAX_POSITION)


def _check_constraint(constraint: Constraint | None) -> Constraint | None:
    if constraint is not None:
        check_kind("constraint", constraint, Constraint, made="Grammar.matcher() makes one")
    return constraint


def _check_hooks(hooks: Iterable[Hook]) -> tuple[Hook, ...]:
    if isinstance(hooks, (str, bytes, Mapping)) or not isinstance(hooks, Iterable):
        raise OptionError(f"hooks={shown(hooks)}: must be a list of functions")
    return tuple(check_callable("a hook", hook) for hook in hooks)


def _check_state(state: dict[str, Any], n: int) -> tuple[int, int, tuple[float, ...]]:
    selection = tuple(check_real("state", value, -1e300, 1e300) for value in state["selection"])
    if len(selection) != n or set(state) != {"seed", "n_drawn", "selection"}:
        raise ValueError("it is of a sampler with other options")
    seed = check_range("seed", state["seed"], 0, 2**64 - 1)
    return seed, check_range("n_drawn", state["n_drawn"], 0, 2**63), selection


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


def _check_logits(logits: Float32Array) -> float:
    """Return the best one."""
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
    return top
