"""Tiny models with recurrent layers on the NumPy backend.

Against logits recorded from llama.cpp, against a pass without any state, and side by side against
alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.testing.golden import nmse
from kvcellar.testing.uncached import uncached_logits
from kvcellar.types import Float32Array, KVType
from tests.models.recurrent_driver import Recurrent

TOLERANCE = 2e-5
ROUNDING = 1e-9  # f32 K and V
NAMES = ["mamba", "mamba2", "jamba", "falcon-h1", "lfm2"]
TEXT = np.random.default_rng(5).integers(0, 128, 40).tolist()  # longer than lfm2's window of 32


def _open(shared: Path, name: str) -> Recurrent:
    return Recurrent(shared / "models" / f"{name}-dense.gguf", KVType.F32)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_references(shared: Path, name: str) -> None:
    golden = json.loads((shared / "golden" / "archs" / f"{name}-dense.json").read_text())
    context = Recurrent(shared / "models" / golden["model"])
    n_compared = 0
    for number, step in enumerate(golden["steps"]):
        errors = context.play(step)
        assert all(error < TOLERANCE for error in errors.values()), (number, errors)
        n_compared += len(errors)
    assert n_compared == 9


@pytest.mark.parametrize("name", NAMES)
def test_cached_equals_uncached(shared: Path, name: str) -> None:
    """In microbatches, then as a copy whose original has gone another way, token by token."""
    context = _open(shared, name)
    expected = uncached_logits(context.model, TEXT)
    got = [context.decode(Batch.of(TEXT[:30], logits="all"), n_ubatch=7)]
    context.seq_cp(0, 2)
    context.decode(Batch.of([1, 2, 3], seq_id=0))
    assert context.seq_rm(0)
    context.decode(Batch.of(TEXT[5:12], seq_id=0))
    got += [context.decode(Batch.of([token], seq_id=2)) for token in TEXT[30:]]
    assert nmse(np.concatenate(got), expected) < ROUNDING


@pytest.mark.parametrize("name", NAMES)
def test_another_text_is_far_away(shared: Path, name: str) -> None:
    """The comparisons would notice a single token that differs."""
    model = _open(shared, name).model
    expected = uncached_logits(model, TEXT[:20])
    other = uncached_logits(model, [TEXT[0] ^ 1, *TEXT[1:20]])
    assert nmse(other[1], expected[1]) > 1000 * ROUNDING


def _alone(context: Recurrent, texts: list[list[int]]) -> list[Float32Array]:
    """Logits of every token of each text, decoded on its own."""
    logits = []
    for text in texts:
        logits.append(context.decode(Batch.of(text, seq_id=3, logits="all")))
        assert context.seq_rm(3)
    return logits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_ubatch", [512, 5, 2])
def test_side_by_side_equals_alone(shared: Path, name: str, n_ubatch: int) -> None:
    """Three texts of unlike lengths whose tokens alternate, twice."""
    context = _open(shared, name)
    texts = [TEXT[:10], TEXT[10:17], TEXT[17:21]]
    expected = _alone(context, texts)
    halves = [[text[: len(text) // 2], text[len(text) // 2 :]] for text in texts]
    got: list[list[Float32Array]] = [[], [], []]
    for part in (0, 1):
        batch, order = Batch(), []
        for i in range(5):
            for seq_id, half in enumerate(halves):
                if i < len(half[part]):
                    batch.add(half[part][i], seq_ids=seq_id, logits=True)
                    order.append(seq_id)
        for seq_id, row in zip(order, context.decode(batch, n_ubatch), strict=True):
            got[seq_id].append(row)
    for rows, wanted in zip(got, expected, strict=True):
        assert nmse(np.array(rows), wanted) < ROUNDING
