"""Make tokens that were seen less likely: repetition, presence and frequency penalties.

The rule is llama.cpp's ``llama_sampler_penalties_apply``: the logit of a token seen is divided by
the repetition penalty, or multiplied where it is not above 0; then the presence penalty and, as
often as it was seen, the frequency penalty are subtracted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvcellar.errors import OptionError, check_integers, check_range, shown
from kvcellar.text.sampling.candidates import Candidates
from kvcellar.text.sampling.options import SamplerOptions
from kvcellar.types import MAX_POSITION, Int64Array

_FEW = 256


class Past:
    """The tokens before the one to choose; what is asked for is checked, once.

    Args:
        history: all tokens of the text.
        n_prompt: how many of the first are prompt; it may be more than are left of the text.
        n_vocab: ids are below this.

    Raises:
        OptionError: ``history`` is no list, or ``n_prompt`` no number of tokens.
    """

    __slots__ = ("_checked", "_history", "n_answer", "n_vocab")

    def __init__(self, history: Sequence[int], n_prompt: int, n_vocab: int) -> None:
        if not isinstance(history, (Sequence, np.ndarray)):
            raise OptionError(f"history={shown(history)}: must be a list of tokens")
        self._history = history
        self._checked: list[int] = []
        self.n_answer = max(0, len(history) - check_range("n_prompt", n_prompt, 0, MAX_POSITION))
        self.n_vocab = n_vocab

    def __len__(self) -> int:
        return len(self._history)

    def last(self, n: int) -> list[int]:
        """Return the last n tokens, or all if there are fewer or n is -1.

        Raises:
            OptionError: one of them is no token of the vocabulary.
        """
        n = min(n, len(self._history)) if n >= 0 else len(self._history)
        if n > len(self._checked):
            self._checked = self._check(n)
        return self._checked[len(self._checked) - n :]

    def _check(self, n: int) -> list[int]:
        tokens = check_integers("history", self._history[len(self._history) - n :])
        if min(tokens) < 0 or max(tokens) >= self.n_vocab:
            raise OptionError(f"history holds a token outside [0, {self.n_vocab})")
        return tokens


def penalize(candidates: Candidates, options: SamplerOptions, past: Past) -> None:
    """Apply the three penalties to the tokens that count as seen."""
    window = past.n_answer if options.penalty_over == "answer" else options.penalty_last_n
    seen = past.last(window)
    if not len(seen):
        return
    tokens, counts = _count(seen)
    places, which = candidates.find(tokens)
    values = candidates.values[places].astype(np.float64)
    factor = options.repetition_penalty
    values = np.where(values <= 0, values * factor, values / factor)
    values -= counts[which] * options.frequency_penalty + options.presence_penalty
    candidates.set(places, values)


def _count(seen: list[int]) -> tuple[Int64Array, Int64Array]:
    """Return the tokens, ascending, and how often each is there."""
    if len(seen) > _FEW:
        return np.unique(np.array(seen), return_counts=True)
    counted = sorted(Counter(seen).items())  # faster, of few
    tokens, counts = np.array(counted, np.int64).T
    return tokens, counts
