"""Plans made by hand, for tests of a backend that need no cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcellar.batch import MicroBatch
from kvcellar.plan import CellPlan, Plan
from kvcellar.types import Float32Array


def causal_plan(
    tokens: Sequence[int] | None,
    start: int = 0,
    *,
    n_kv: int = 256,
    cells: Sequence[int] | None = None,
    outputs: Sequence[int] | None = None,
    embeddings: Float32Array | None = None,
) -> Plan:
    """One sequence, of which ``start`` tokens are there already, goes on with these.

    Args:
        tokens: their ids, or None where ``embeddings`` are given.
        start: position of the first.
        n_kv: cells looked at.
        cells: the cells of positions from 0 on; cell i for position i when None.
        outputs: the rows whose logits are wanted; all when None.
        embeddings: ``[n, n_embd]`` instead of tokens.
    """
    n = len(tokens) if embeddings is None and tokens is not None else len(np.asarray(embeddings))
    positions = np.arange(start, start + n, dtype=np.int32)
    places = np.arange(start + n) if cells is None else np.array(cells[: start + n])
    reached = np.full(n_kv, np.iinfo(np.int32).max, np.int32)
    reached[places] = np.arange(start + n)
    visible = reached[np.newaxis] <= positions[:, np.newaxis]
    micro = MicroBatch(
        rows=np.arange(n, dtype=np.int32),
        tokens=None if tokens is None else np.array(tokens, np.int32),
        embeddings=embeddings,
        positions=positions,
        owners=np.ones((1, n), np.uint64),
        outputs=np.array(range(n) if outputs is None else outputs, np.int32),
    )
    mask = np.where(visible, 0, -np.inf).astype(np.float16)
    return Plan(micro, (CellPlan(places[start:].astype(np.int64), mask),))
