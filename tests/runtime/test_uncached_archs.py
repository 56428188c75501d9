"""Every architecture on the NumPy backend against a plain forward pass, without a cache or states.

In microbatches, after a fork and an edit of another sequence, and side by side against alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.runtime.context import Context
from kvcellar.testing.golden import nmse
from kvcellar.testing.uncached import uncached_logits
from kvcellar.types import Float32Array
from tests.runtime.archs import ARCHS, F32, HYBRID, RECURRENT, opened

ROUNDING = 1e-9  # f32 K and V
WITH_STATES = (*HYBRID, *RECURRENT)
TEXT = np.random.default_rng(5).integers(0, 128, 40).tolist()  # longer than the windows of 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "n_ubatch"), [(arch, (16, 7)[i % 2]) for i, arch in enumerate(sorted(ARCHS))]
)
def test_cached_equals_uncached(shared: Path, arch: str, n_ubatch: int) -> None:
    """In microbatches, then as a copy whose original has gone another way, token by token."""
    with opened(shared, arch, "numpy", n_ubatch=n_ubatch, **F32) as context:
        expected = uncached_logits(context.model.architecture, TEXT)
        got = [context.decode(Batch.of(TEXT[:30], logits="all"))]
        context.decode(Batch.of(TEXT[5:12], seq_id=1))
        context.cache.seq_cp(0, 2)
        assert context.cache.seq_rm(1)
        context.decode(Batch.of([1, 2, 3], seq_id=0))
        assert context.cache.seq_rm(0)
        context.decode(Batch.of(TEXT[5:12], seq_id=0))
        got += [context.decode(Batch.of([token], seq_id=2)) for token in TEXT[30:]]
    assert nmse(np.concatenate(got), expected) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_another_text_is_far_away(shared: Path, arch: str) -> None:
    """The comparisons would notice a single token that differs."""
    with opened(shared, arch, "numpy") as context:
        model = context.model.architecture
        expected = uncached_logits(model, TEXT[:20])
        other = uncached_logits(model, [TEXT[0] ^ 1, *TEXT[1:20]])
    assert nmse(other[1], expected[1]) > 1000 * ROUNDING


def _alone(context: Context, texts: list[list[int]]) -> list[Float32Array]:
    """Logits of every token of each text, decoded on its own."""
    logits = []
    for text in texts:
        logits.append(context.decode(Batch.of(text, seq_id=3, logits="all")))
        assert context.cache.seq_rm(3)
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("arch", WITH_STATES)
@pytest.mark.parametrize("n_ubatch", [512, 5, 2])
def test_side_by_side_equals_alone(shared: Path, arch: str, n_ubatch: int) -> None:
    """Three texts of unlike lengths whose tokens alternate, twice."""
    texts = [TEXT[:10], TEXT[10:17], TEXT[17:21]]
    halves = [[text[: len(text) // 2], text[len(text) // 2 :]] for text in texts]
    got: list[list[Float32Array]] = [[], [], []]
    with opened(shared, arch, "numpy", n_ubatch=n_ubatch, **F32) as context:
        expected = _alone(context, texts)
        for part in (0, 1):
            batch, order = Batch(), []
            for i in range(5):
                for seq_id, half in enumerate(halves):
                    if i < len(half[part]):
                        batch.add(half[part][i], seq_ids=seq_id, logits=True)
                        order.append(seq_id)
            for seq_id, row in zip(order, context.decode(batch), strict=True):
                got[seq_id].append(row)
    for rows, wanted in zip(got, expected, strict=True):
        assert nmse(np.array(rows), wanted) < ROUNDING
