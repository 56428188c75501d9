"""Draw a token: random numbers that depend on nothing but their place, and what steers a draw.

A random number is a function of seed, choice and position: Philox2x64 with 10 rounds (Salmon et
al., 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by the seed, with position and
choice as counter. So one that is drawn again is the same, whatever was drawn in between.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from kvcellar.text.sampling.candidates import Candidates, Float64Array, best_places, top_k
from kvcellar.text.sampling.options import SamplerOptions
from kvcellar.types import Int64Array

_MASK = 2**64 - 1
_ROUNDS = 10
_MIROSTAT_M = 100
"""Tokens from which mirostat 1 estimates the shape of the distribution: the paper's m."""

_WIDTH, _PEAK, _SHARPNESS = 0.3, 5.0, 10.0
"""Of adaptive-p's curve; llama.cpp's constants."""


class Randomness:
    """The random numbers in [0, 1) of one draw; none is computed before it is asked for."""

    def __init__(self, seed: int, choice: int, position: int) -> None:
        self._seed = seed
        self._counter = position, choice

    @cached_property
    def _block(self) -> tuple[int, int]:
        return philox(self._seed, self._counter)

    @property
    def for_token(self) -> float:
        """Chooses among the candidates."""
        return (self._block[0] >> 11) * 2.0**-53

    @property
    def for_xtc(self) -> float:
        """Chooses whether XTC drops tokens."""
        return (self._block[1] >> 11) * 2.0**-53


def philox(key: int, counter: tuple[int, int]) -> tuple[int, int]:
    """Return the block of two 64-bit numbers of a key and a counter, by Philox2x64-10."""
    first, second = counter
    for _ in range(_ROUNDS):
        product = 0xD2B74407B1CE6E93 * first
        first, second = (product >> 64) ^ key ^ second, product & _MASK
        key = key + 0x9E3779B97F4A7C15 & _MASK
    return first, second


class Plain:
    """Draw from the distribution as it is."""

    state: tuple[float, ...] = ()

    def shape(self, candidates: Candidates) -> tuple[Int64Array, Float64Array]:
        """Return the tokens that may be drawn and their probabilities."""
        ids, _ = candidates.listed()
        weights = candidates.weights()
        return ids, weights / weights.sum()

    def after(self, candidates: Candidates, place: int, probability: float) -> tuple[float, ...]:
        """Return the state after the token at this place of :meth:`shape` was taken."""
        del candidates, place, probability
        return self.state


class Mirostat(Plain):
    """Cut the candidates so that the surprise of the text stays near a target.

    ``mu`` is the largest surprise that is let through; each token moves it by the learning rate
    times what its own surprise, in bits, is off the target. Version 1 estimates from the best
    tokens how many come up to mu, version 2 looks at each (llama.cpp's
    ``llama_sampler_mirostat_apply`` and ``llama_sampler_mirostat_v2_apply``).
    """

    def __init__(self, options: SamplerOptions) -> None:
        self._options = options
        self.state = (2 * options.mirostat_tau,)

    def shape(self, candidates: Candidates) -> tuple[Int64Array, Float64Array]:
        """See :class:`Plain`."""
        if self._options.mirostat == 1:
            top_k(candidates, self._rank(candidates))
        else:
            self._cut(candidates)
        return super().shape(candidates)

    def after(self, candidates: Candidates, place: int, probability: float) -> tuple[float, ...]:
        """See :class:`Plain`."""
        del candidates, place
        error = -math.log2(probability) - self._options.mirostat_tau
        return (self.state[0] - self._options.mirostat_eta * error,)

    def _rank(self, candidates: Candidates) -> int:
        candidates.settle()
        values = candidates.values
        n = int(np.count_nonzero(values > -math.inf))
        best = values[best_places(values, min(_MIROSTAT_M, n))].astype(np.float64)
        gaps = best[:-1] - best[1:]
        ranks = np.arange(1, len(gaps) + 1)
        steps = np.log((ranks + 1) / ranks)
        exponent = float(steps @ gaps) / float(steps @ steps) if len(gaps) else 1.0
        return _mirostat_k(exponent, self.state[0], len(values), n)

    def _cut(self, candidates: Candidates) -> None:
        candidates.listed()
        total = math.log(float(candidates.weights().sum()))
        border = candidates.top + total - self.state[0] * math.log(2)
        keep = candidates.values >= border
        if keep.any():
            candidates.take(keep)
        else:
            top_k(candidates, 1)


def _mirostat_k(exponent: float, mu: float, n_vocab: int, n: int) -> int:
    """How many of n tokens come up to mu, if ranks follow Zipf's law with that exponent."""
    epsilon, size = exponent - 1, math.log(n_vocab)
    if not size:
        return 1
    # (epsilon * 2**mu / (1 - N**-epsilon)) ** (1 / exponent), as a logarithm.
    with np.errstate(over="ignore"):
        share = 1 / size if epsilon == 0 else float(epsilon / -np.expm1(-epsilon * size))
    logarithm = mu * math.log(2) + (math.log(share) if share > 0 else -math.inf)
    if exponent > 0:
        logarithm /= exponent
    else:
        logarithm = math.copysign(math.inf, logarithm)
    return n if logarithm >= math.log(n) else max(1, int(math.exp(logarithm)))


class AdaptiveP(Plain):
    """Prefer tokens whose probability is near a target, which makes up for those before.

    The state is two sums over the chosen tokens, decayed: of their probabilities, and of their
    number. The rule is llama.cpp's ``llama_sampler_adaptive_p_apply``.
    """

    def __init__(self, options: SamplerOptions) -> None:
        self._target, self._decay = options.adaptive_target, options.adaptive_decay
        n = 1 / (1 - self._decay)
        self.state = (self._target * n, n)

    def shape(self, candidates: Candidates) -> tuple[Int64Array, Float64Array]:
        """See :class:`Plain`."""
        ids, probabilities = super().shape(candidates)
        chosen, n = self.state
        target = min(max(2 * self._target - chosen / n, 0.0), 1.0)
        distance = np.abs(probabilities - target) / _WIDTH
        logits = _PEAK - _SHARPNESS * distance * distance / (1 + distance)
        weights = np.exp(logits - logits.max())
        return ids, weights / weights.sum()

    def after(self, candidates: Candidates, place: int, probability: float) -> tuple[float, ...]:
        """See :class:`Plain`."""
        del probability
        original = float(super().shape(candidates)[1][place])
        return original + self._decay * self.state[0], 1 + self._decay * self.state[1]


def selection_of(options: SamplerOptions) -> Plain:
    """Return what draws with these options."""
    if options.mirostat:
        return Mirostat(options)
    if options.adaptive_target >= 0 and "adaptive_p" in options.order:
        return AdaptiveP(options)
    return Plain()
