"""Invariants 8 and 9: what other cells hold never reaches a sequence's logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from tests.runtime.helpers import attention

RNG_TOKENS = np.random.default_rng(7).integers(0, 128, 96).tolist()


@pytest.fixture(scope="module")
def model(shared: Path) -> Iterator[Model]:
    with Model.from_gguf(shared / "models" / "llama-dense.gguf", n_threads=1) as loaded:
        yield loaded


@pytest.fixture(params=["kernel", "flash", "products"])
def context(model: Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    options = {"flash_attn": request.param != "products", "kernel": request.param == "kernel"}
    if options["kernel"]:
        pytest.importorskip("llvmlite")
    with model.context(n_ctx=512, n_seq_max=4, **options) as made:
        yield made


def poison(context: Context, seq_id: int) -> None:
    """Make every K and V row of a sequence NaN, as an overflow while computing could."""
    cells = attention(context).table.cells_of(seq_id)
    for layer in range(len(context.spec.layers)):
        for part in ("k", "v"):
            rows = attention(context).store.read_raw(layer, part, cells)
            attention(context).store.write_raw(layer, part, cells, np.full_like(rows, 0xFF))


def logits_beside_freed_cells(context: Context, n_tokens: int, poisoned: bool) -> np.ndarray:
    """Free 40 cells below those of another sequence, then decode a third one."""
    context.cache.clear()
    context.decode(Batch.of(RNG_TOKENS[:40], seq_id=0))
    context.decode(Batch.of(RNG_TOKENS[:10], seq_id=2))
    if poisoned:
        poison(context, 0)
    context.cache.seq_rm(0, -1, -1)
    return context.decode(Batch.of(RNG_TOKENS[:n_tokens], seq_id=1, logits="all"))


@pytest.mark.parametrize("n_tokens", [1, 5, 96])
def test_nan_in_freed_cells_reaches_no_logits(context: Context, n_tokens: int) -> None:
    expected = logits_beside_freed_cells(context, n_tokens, poisoned=False)
    got = logits_beside_freed_cells(context, n_tokens, poisoned=True)
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("n_tokens", [1, 5, 40])
def test_with_the_kernel_nan_of_living_sequences_reaches_no_others(
    model: Model, n_tokens: int
) -> None:
    pytest.importorskip("llvmlite")
    with model.context(n_ctx=256, n_seq_max=4, kernel=True) as context:
        context.decode(Batch.of(RNG_TOKENS[:50], seq_id=0))
        context.decode(Batch.of(RNG_TOKENS[50:90], seq_id=1))
        expected = context.decode(Batch.of(RNG_TOKENS[:n_tokens], seq_id=1, logits="all"))
        context.cache.seq_rm(1, 40, -1)
        poison(context, 0)
        got = context.decode(Batch.of(RNG_TOKENS[:n_tokens], seq_id=1, logits="all"))
        assert np.array_equal(got, expected)


def test_a_failed_decode_leaves_no_nan_behind(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = context.decode(Batch.of(RNG_TOKENS, seq_id=1, logits="all"))
    context.cache.clear()
    run = context._executor.run

    def fail(plan: object) -> np.ndarray:
        logits = run(plan)  # type: ignore[arg-type]
        poison(context, 0)
        logits[:] = np.nan
        return logits

    monkeypatch.setattr(context._executor, "run", fail)
    with pytest.raises(Exception, match="not finite"):
        context.decode(Batch.of(RNG_TOKENS[:40], seq_id=0))
    monkeypatch.undo()
    assert context.cache.used == 0
    got = context.decode(Batch.of(RNG_TOKENS, seq_id=1, logits="all"))
    assert np.array_equal(got, expected)
