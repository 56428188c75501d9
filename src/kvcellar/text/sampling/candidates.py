"""The tokens that may still be drawn, with their logits, and what is cut from them.

A row of logits stays one array of single precision until something is dropped; what is left then is
ids with logits in double precision. Invariants:

1. Of equal logits the lowest id is the better one, in every step.
2. The row that was given is never written to: it is copied before the first change.
3. The best token is never dropped by top-k, top-p, min-p and top-n-sigma; at least one token stays.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvcellar.types import BoolArray, Float32Array, Int64Array

Float64Array = npt.NDArray[np.float64]

_GROUP = 64
_FIRST_GUESS = 256
"""Candidates that nearly always have the probability that is asked for."""

_TINY = 1e-250
"""Logits of single precision divided by this are still numbers of double precision."""

_MANY = 4096
"""Of so many tokens weights are computed in single precision, which is many times as fast."""


class Candidates:
    """Tokens and logits.

    Args:
        row: logits of the whole vocabulary; at least one is not -inf.
        own: whether the row may be written to.

    Attributes:
        ids: the tokens; None: all of the vocabulary.
        values: their logits.
        ordered: whether the best comes first; otherwise ids ascend.
        floor: logits below it are dropped already, though they are still in the row.
    """

    __slots__ = ("_own", "floor", "ids", "ordered", "values")

    def __init__(self, row: Float32Array, *, own: bool) -> None:
        self.ids: Int64Array | None = None
        self.values: Float32Array | Float64Array = row
        self.ordered = False
        self.floor = -math.inf
        self._own = own

    def __len__(self) -> int:
        return len(self.values)

    @property
    def top(self) -> float:
        """The best logit."""
        return float(self.values[0] if self.ordered else self.values.max())

    def listed(self) -> tuple[Int64Array, Float64Array]:
        """Return ids and logits of the tokens that are possible, and go on with these."""
        if self.ids is None:
            possible = self._possible(self.values)
            if possible.all():
                ids, values = np.arange(len(self.values)), self.values.astype(np.float64)
            else:
                ids = np.flatnonzero(possible)
                values = self.values[ids].astype(np.float64)
            self._become(ids, values, ordered=False)
        return self.ids, self.values  # type: ignore[return-value]

    def weights(self) -> Float64Array:
        """Probabilities over the best one's: 1 for the best; 0 where impossible."""
        self.settle()
        values = self.values.astype(np.float64)
        values -= self.top
        if len(values) > _MANY:
            return np.exp(values.astype(np.float32)).astype(np.float64)
        weights: Float64Array = np.exp(values, out=values)
        return weights

    def settle(self) -> None:
        """Drop what is below the floor."""
        if self.floor > -math.inf:
            self.listed()

    def order(self) -> None:
        """Put the best first."""
        if not self.ordered:
            ids, values = self.listed()
            order = np.argsort(-values, kind="stable")
            self._become(ids[order], values[order], ordered=True)

    def take(self, places: Int64Array | BoolArray | slice) -> None:
        """Keep what is at these places of :meth:`listed`, in their order.

        The order by value must be kept too, if there is one.
        """
        ids, values = self.listed()
        self._become(ids[places], values[places], ordered=self.ordered)

    def take_ids(self, ids: Int64Array, *, ordered: bool) -> None:
        """Keep these tokens of the whole vocabulary, where they are possible."""
        values = self.values[ids].astype(np.float64)
        least = values[-1] if ordered else values.min()
        if least < self.floor or least == -math.inf:
            possible = self._possible(values)
            ids, values = ids[possible], values[possible]
        self._become(ids, values, ordered=ordered)

    def find(self, tokens: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return where tokens are, for those that are left, and which of them these are.

        Args:
            tokens: ascending, each once.
        """
        self.settle()
        if self.ids is None:
            return tokens, np.arange(len(tokens))
        _, places, which = np.intersect1d(self.ids, tokens, assume_unique=True, return_indices=True)
        return places, which

    def set(self, places: Int64Array, values: Float64Array) -> None:
        """Change logits."""
        if not self._own:
            self.values = self.values.copy()
            self._own = True
        self.values[places] = values
        if self.ids is not None and self.ordered:
            by_id = self.ids.argsort()
            self._become(self.ids[by_id], self.values[by_id].astype(np.float64), ordered=False)

    def scale(self, temperature: float) -> None:
        """Divide logits by a temperature above 0."""
        self.settle()
        if temperature >= _TINY:
            self.values = self.values.astype(np.float64) / temperature
        else:  # quotients may have no number, but differences to the best do
            self.listed()
            with np.errstate(over="ignore"):
                self.values = (self.values - self.top) / temperature
            self.take(self.values > -math.inf)
        self._own = True

    def _possible(self, values: npt.NDArray[np.floating]) -> BoolArray:
        return values >= self.floor if self.floor > -math.inf else values > -math.inf

    def _become(self, ids: Int64Array, values: Float64Array, *, ordered: bool) -> None:
        self.ids, self.values, self.ordered, self._own = ids, values, ordered, True
        self.floor = -math.inf


def top_k(candidates: Candidates, k: int) -> None:
    """Keep the k best."""
    if k >= len(candidates):
        return
    if candidates.ids is None:
        candidates.take_ids(best_places(candidates.values, k), ordered=True)
        return
    if not candidates.ordered:
        candidates.take(np.sort(best_places(candidates.values, k)))
    candidates.order()
    candidates.take(slice(k))


def top_p(candidates: Candidates, p: float, min_keep: int) -> None:
    """Keep the fewest best that have the probability p together."""
    if candidates.ordered:
        cumulative = candidates.weights().cumsum()
        candidates.take(slice(_count(cumulative, p * cumulative[-1], min_keep)))
        return
    weights = candidates.weights()
    ids = _fewest(candidates.values, weights, p * float(weights.sum()), min_keep)
    if candidates.ids is None:
        candidates.take_ids(ids, ordered=True)
    else:
        candidates.order()
        candidates.take(slice(len(ids)))


def min_p(candidates: Candidates, p: float, min_keep: int) -> None:
    """Keep what has at least this fraction of the best one's probability."""
    _keep_from(candidates, candidates.top + math.log(p), min_keep)


def top_n_sigma(candidates: Candidates, n: float) -> None:
    """Keep what is within n standard deviations of the best logit.

    The deviation is that of all logits that are left, not only of those that could be drawn; tokens
    with -inf count in neither.
    """
    candidates.settle()
    values = candidates.values.astype(np.float64)
    total = float(values.sum())
    if total == -math.inf:
        values = values[values > -math.inf]
        total = float(values.sum())
    top = candidates.top
    mean = total / len(values)
    sigma = math.sqrt(max(0.0, float(values @ values) / len(values) - mean * mean))
    _keep_from(candidates, top - n * sigma, 0)


def typical_p(candidates: Candidates, p: float, min_keep: int) -> None:
    """Keep the tokens nearest to the expected surprise that have more than p together."""
    candidates.listed()
    weights = candidates.weights()
    total = float(weights.sum())
    surprise = math.log(total) - (candidates.values - candidates.top)
    entropy = float(weights @ surprise) / total
    places = _fewest(-np.abs(surprise - entropy), weights, p * total, min_keep, exceeding=True)
    candidates.take(np.sort(places))


def xtc(candidates: Candidates, threshold: float, min_keep: int) -> None:
    """Drop all tokens of at least this probability but the least likely of them."""
    _, values = candidates.listed()
    weights = candidates.weights()
    likely = np.flatnonzero(weights >= threshold * float(weights.sum()))
    n_dropped = len(likely) - 1
    if n_dropped < 1 or len(values) - n_dropped < min_keep:
        return
    keep = np.ones(len(values), np.bool_)
    keep[likely[np.argsort(-values[likely], kind="stable")[:-1]]] = False
    candidates.take(keep)


def temperature(candidates: Candidates, value: float, spread: float, exponent: float) -> None:
    """Divide logits by a temperature, which ``spread`` makes depend on the entropy."""
    if spread > 0:
        _, values = candidates.listed()
        if len(values) == 1:
            return
        share = _entropy(candidates.weights()) / math.log(len(values))
        least = max(0.0, value - spread)
        value = least + (value + spread - least) * float(min(max(share, 0.0), 1.0) ** exponent)
    if value > 0:
        candidates.scale(value)
    else:
        place = int(candidates.values.argmax())
        if candidates.ids is None:
            candidates.take_ids(np.array([place]), ordered=True)
        else:
            candidates.take(slice(place, place + 1))


def _entropy(weights: Float64Array) -> float:
    """In nats."""
    probabilities = weights / weights.sum()
    probabilities = probabilities[probabilities > 0]
    return -float(probabilities @ np.log(probabilities))


def _keep_from(candidates: Candidates, border: float, min_keep: int) -> None:
    """Keep logits of at least this, and ``min_keep`` of them in any case."""
    if candidates.ids is None and not min_keep:
        candidates.floor = max(candidates.floor, border)
        return
    candidates.settle()
    values = candidates.values
    keep = values >= border
    n_kept = int(np.count_nonzero(keep))
    if n_kept < min(min_keep, len(values)):
        top_k(candidates, min_keep)
    elif candidates.ids is None:
        candidates.take_ids(np.flatnonzero(keep), ordered=False)
    elif n_kept < len(values):
        candidates.take(slice(n_kept) if candidates.ordered else keep)


def best_places(values: npt.NDArray[np.floating], k: int) -> Int64Array:
    """Places of the k largest, largest first, lowest place first among equals."""
    places = _at_least_k(values, k)
    order = np.argsort(-values[places], kind="stable")[:k]
    return places[order]


def _at_least_k(values: npt.NDArray[np.floating], k: int) -> Int64Array:
    """Places, ascending, of k or more values among which the k largest are."""
    n_groups = len(values) // _GROUP
    if k > n_groups // 2:
        border = np.partition(values, len(values) - k)[len(values) - k]
    else:
        # The k-th best of the groups' best values is reached by k values at least, and by few
        # more: cheaper to find than the k-th best value, and as good a place to cut.
        maxima = values[: n_groups * _GROUP].reshape(_GROUP, n_groups).max(axis=0)
        border = np.partition(maxima, n_groups - k)[n_groups - k]
    return np.flatnonzero(values >= border)


def _fewest(
    keys: npt.NDArray[np.floating],
    weights: Float64Array,
    mass: float,
    min_keep: int,
    *,
    exceeding: bool = False,
) -> Int64Array:
    """Places of the fewest largest keys whose weights reach a mass, or exceed it."""
    k = min(max(_FIRST_GUESS, min_keep), len(keys))
    while True:
        places = best_places(keys, k)
        cumulative = weights[places].cumsum()
        if k == len(keys) or cumulative[-1] > mass:
            return places[: _count(cumulative, mass, min_keep, exceeding=exceeding)]
        k = min(k * 16, len(keys))


def _count(cumulative: Float64Array, mass: float, min_keep: int, *, exceeding: bool = False) -> int:
    reached = int(cumulative.searchsorted(mass, side="right" if exceeding else "left")) + 1
    return min(max(reached, min_keep), len(cumulative))
