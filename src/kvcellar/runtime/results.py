"""Values that a generation returns: tokens, log-probabilities, timings, cache reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from kvcellar.text.sampler import log_softmax
from kvcellar.text.tokenizer import Tokenizer
from kvcellar.types import Float32Array

FinishReason = Literal["length", "stop_token", "stop_string", "constraint", "cache_full"]
"""Why a generation ended."""


class TokenLogprob(NamedTuple):
    """One of the most likely tokens.

    Attributes:
        id: the token.
        text: what it stands for, control tokens by their name; None without a tokenizer.
        logprob: its log-probability in the model's distribution.
    """

    id: int
    text: str | None
    logprob: float


class Token(NamedTuple):
    """A token and what it adds to the text.

    Attributes:
        id: the token.
        text: what the text gains by it, whole characters only; "" while bytes of a character are
            missing and for control tokens; None without a tokenizer.
        logprob: its log-probability in the model's distribution; None unless asked for, and for
            the first token of a text, which nothing predicts.
        sampled_logprob: its log-probability in the distribution that it was drawn from; None unless
            asked for, and if it was not drawn.
        top_logprobs: the most likely tokens there, best first.
    """

    id: int
    text: str | None
    logprob: float | None = None
    sampled_logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationTimings:
    """How long a generation took.

    Attributes:
        n_prompt: tokens that were computed before the first was drawn.
        prompt_seconds: how long that took.
        n_tokens: tokens that were generated.
        token_seconds: how long that took, the first one's logits being the prompt's.
    """

    n_prompt: int = 0
    prompt_seconds: float = 0.0
    n_tokens: int = 0
    token_seconds: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        """Seconds a generated token; 0 if there is none."""
        return self.token_seconds / self.n_tokens if self.n_tokens else 0.0


@dataclass(frozen=True, slots=True)
class CacheReport:
    """How much of the text before a generation was in the cache.

    Attributes:
        n_prompt: its tokens.
        n_computed: how many of them were computed for this generation.
    """

    n_prompt: int
    n_computed: int

    @property
    def n_reused(self) -> int:
        """How many were there."""
        return max(0, self.n_prompt - self.n_computed)

    def __str__(self) -> str:
        return f"{self.n_reused} of {self.n_prompt} tokens reused"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a generation.

    Attributes:
        text: what was generated, up to a stop string; None without a tokenizer.
        ids: all tokens that were generated, those of a stop string included.
        finish_reason: why it ended: "length" after ``max_tokens``, "stop_token" at one (which is
            not added), "stop_string", "constraint" where nothing else may follow, "cache_full".
        seed: with it the sampler gives the same again.
        timings: how long it took.
        cache: how much of the prompt had to be computed.
        logprobs: a token for each id, with log-probabilities; None unless asked for.
    """

    text: str | None
    ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    timings: GenerationTimings
    cache: CacheReport
    logprobs: tuple[Token, ...] | None = None


def scored(token: Token, logits: Float32Array, n_top: int, tokenizer: Tokenizer) -> Token:
    """Return the token with its log-probability, and the ``n_top`` most likely ones.

    Args:
        token: without them.
        logits: of the distribution, ``[n_vocab]``.
        n_top: at most as many as there are tokens.
        tokenizer: for their texts.

    Raises:
        ComputeError: the logits are not finite.
    """
    logprobs = log_softmax(logits)
    best: list[TokenLogprob] = []
    if n_top := min(n_top, len(logprobs)):
        least = np.partition(logprobs, len(logprobs) - n_top)[len(logprobs) - n_top]
        ids = np.flatnonzero(logprobs >= least)
        ids = ids[np.argsort(-logprobs[ids], kind="stable")[:n_top]]
        best = [TokenLogprob(i, spelled(tokenizer, i), float(logprobs[i])) for i in ids.tolist()]
    return token._replace(logprob=float(logprobs[token.id]), top_logprobs=tuple(best))


def spelled(tokenizer: Tokenizer, token: int) -> str | None:
    """Return what a token stands for by itself; None if the vocabulary does not tell."""
    if not tokenizer.has_text:
        return None
    if token >= tokenizer.n_vocab:
        return ""
    return tokenizer.token_bytes(token).decode("utf-8", "replace")
