"""Comparing results with recorded ones, as the reference data's own page says to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcellar.batch import Batch
from kvcellar.runtime.context import Context
from kvcellar.text.sampler import log_softmax

FLOOR = -6.0
"""Log-probabilities below this are not compared."""


def nmse(got: npt.ArrayLike, wanted: npt.ArrayLike) -> float:
    """Mean squared error over the mean square of what was wanted."""
    a, b = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(((a - b) ** 2).mean() / (b**2).mean())


def logprob_errors(logits: npt.ArrayLike, best: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """Absolute differences of the listed tokens' log-probabilities, those below -6 left out."""
    wanted = np.asarray(best["logprobs"], np.float64)
    got = log_softmax(np.asarray(logits, np.float32))[best["ids"]]
    errors: npt.NDArray[np.float64] = np.abs(got - wanted)[wanted > FLOOR]
    return errors


def mean_nll(context: Context, tokens: Sequence[int]) -> float:
    """Mean negative log-likelihood of a text's tokens after the first, in one batch."""
    logits = context.decode(Batch.of(tokens, logits="all"))
    context.cache.clear()
    rows = np.array([log_softmax(row)[token] for row, token in zip(logits, tokens[1:])])  # noqa: B905
    return float(-rows.mean())


def certain_prefix(margins: Sequence[float], at_least: float = 0.3) -> int:
    """How many greedy tokens may be compared: up to the first step that was nearly a tie."""
    for i, margin in enumerate(margins):
        if margin < at_least:
            return i
    return len(margins)


def play_step(context: Context, step: Mapping[str, Any]) -> dict[int, float]:
    """Play one step of ``archs/*.json``; return the errors of the rows of logits it lists.

    Raises:
        AssertionError: ``seq_rm`` returns something else than recorded.
    """
    cache, op = context.cache, step["op"]
    if op == "decode":
        return _decode(context, step)
    if op == "seq_rm":
        assert cache.seq_rm(step["seq"], step["p0"], step["p1"]) == step["ret"]
    elif op == "seq_cp":
        cache.seq_cp(step["src"], step["dst"], step["p0"], step["p1"])
    elif op == "seq_add":
        cache.seq_add(step["seq"], step["p0"], step["p1"], step["delta"])
    else:
        raise AssertionError(f"unknown step {op!r}")
    return {}


def _decode(context: Context, step: Mapping[str, Any]) -> dict[int, float]:
    wanted = {int(row): values for row, values in step["logits"].items()}
    batch = Batch()
    for i, (token, position, seq_ids) in enumerate(step["tokens"]):
        batch.add(token, position, seq_ids, logits=i in wanted)
    logits = context.decode(batch)
    rows = sorted(wanted)
    return {row: nmse(got, wanted[row]) for row, got in zip(rows, logits, strict=True)}
