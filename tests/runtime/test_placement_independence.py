"""Invariant 8: logits depend neither on where cells lie nor on what others hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.testing.golden import nmse
from kvcellar.types import Float32Array
from tests.runtime.helpers import attention

PROMPT = [7, 99, 3, 64, 12, 12, 40, 1, 77, 5, 23, 118]
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def model(shared: Path) -> Iterator[Model]:
    with Model.from_gguf(shared / "models" / "llama-dense.gguf", n_threads=1) as loaded:
        yield loaded


@pytest.fixture(params=["kernel", "flash", "products", "q8_0"])
def context(model: Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    kind = "q8_0" if request.param == "q8_0" else "f16"
    options = {"flash_attn": request.param != "products", "kernel": request.param == "kernel"}
    if options["kernel"]:
        pytest.importorskip("llvmlite")
    with model.context(n_ctx=64, n_seq_max=4, type_k=kind, type_v=kind, **options) as made:
        yield made


def alone(context: Context) -> Float32Array:
    """Logits of every token of the prompt, in one batch, in an empty cache."""
    context.cache.clear()
    logits = context.decode(Batch.of(PROMPT, logits="all"))
    context.cache.clear()
    return logits


def scatter(context: Context) -> None:
    """Leave free cells that are no neighbours: every second of most, and a few at the end."""
    context.decode(Batch.of([1] * 60, seq_id=3))
    for position in range(0, 60, 2):
        context.cache.seq_rm(3, position, position + 1)


def test_token_by_token_equals_one_batch(context: Context) -> None:
    expected = alone(context)
    rows = [context.decode(Batch.of([token]))[0] for token in PROMPT]
    assert nmse(rows, expected) < ROUNDING


def test_small_microbatches_equal_one_batch(model: Model) -> None:
    with (
        model.context(n_ctx=64, n_ubatch=512) as whole,
        model.context(n_ctx=64, n_ubatch=5) as pieces,
    ):
        assert nmse(pieces.decode(Batch.of(PROMPT, logits="all")), alone(whole)) < ROUNDING


def test_scattered_cells_equal_neighbouring_ones(context: Context) -> None:
    expected = alone(context)
    scatter(context)
    with context.cache.place(Batch.of(PROMPT, logits="all"), 512) as placement:
        assert not np.all(np.diff(placement.cells) == 1)
    got = context.decode(Batch.of(PROMPT, logits="all"))
    assert nmse(got, expected) < ROUNDING


def test_the_same_cells_give_the_very_same_logits(context: Context) -> None:
    assert np.array_equal(alone(context), alone(context))


def test_what_others_hold_changes_nothing(context: Context) -> None:
    """Same cells, same shapes: other sequences are masked away to the last bit."""
    context.cache.clear()
    context.decode(Batch.of([5] * 20, seq_id=1))
    expected = context.decode(Batch.of(PROMPT, logits="all"))
    context.cache.clear()
    context.decode(Batch.of(list(range(100, 120)), seq_id=1))
    assert np.array_equal(context.decode(Batch.of(PROMPT, logits="all")), expected)


def test_beside_another_sequence_in_one_batch(context: Context) -> None:
    expected = alone(context)
    batch = Batch()
    for i, token in enumerate(PROMPT):
        batch.add(token, seq_ids=0, logits=True)
        batch.add(100 - i, seq_ids=1, logits=True)
    assert nmse(context.decode(batch)[::2], expected) < ROUNDING


def test_a_shared_prefix_counts_like_ones_own(context: Context) -> None:
    expected = alone(context)
    context.decode(Batch.of(PROMPT[:6], seq_id=1))
    context.cache.seq_cp(1, 0)
    context.decode(Batch.of([9, 9, 9], seq_id=1))
    assert nmse(context.decode(Batch.of(PROMPT[6:], logits="all")), expected[6:]) < ROUNDING


def test_compaction_keeps_the_logits(context: Context) -> None:
    context.decode(Batch.of([1] * 10, seq_id=3))
    context.decode(Batch.of(PROMPT[:-1]))
    context.cache.seq_cp(0, 1)
    expected = context.decode(Batch.of(PROMPT[-1:], seq_id=1))
    context.cache.seq_rm(1)
    context.cache.seq_rm(3)
    context.cache.defrag()
    context.cache.update()
    assert attention(context).cell_max() == len(PROMPT) - 1
    assert nmse(context.decode(Batch.of(PROMPT[-1:])), expected) < ROUNDING


def test_embeddings_of_tokens_equal_the_tokens(context: Context, model: Model) -> None:
    from kvcellar.backends.ggml.binding import array_at
    from kvcellar.backends.ggml.gguf import GgufFile

    file = GgufFile(model.path)
    info = file.tensors["token_embd.weight"]
    table = array_at(file.address + info.offset, "f4", info.shape)
    expected = alone(context)
    got = context.decode(Batch.of_embeddings(table[PROMPT], logits="all"))
    assert np.array_equal(got, expected)


# -- what docs/format.md says of logits after a load


def continued(model: Model, path: Path, others: str, **options: Any) -> Float32Array:
    """Logits of single tokens after a text was saved and loaded beside others, or was not."""
    with model.context(n_ctx=512, n_seq_max=4, **options) as context:
        if others == "never saved":
            sequence = context.sequence(LONG)
            sequence.save(path)
        else:
            first = context.sequence(LONG[:37]) if others != "alone" else None
            if others == "scattered" and first is not None:
                context.sequence(LONG[:5])
                first.close()
            sequence = context.load(path)
        rows = [sequence.append([token]).logits for token in PROMPT]
        if others != "never saved":
            batch = Batch().add(9, seq_ids=sequence.seq_id, logits=True)
            batch.add(3, seq_ids=context.sequence([5] * 20).seq_id, logits=True)
            return np.stack([*rows, context.decode(batch)[0]])
        return np.stack([*rows, sequence.append([9]).logits])


LONG = np.random.default_rng(1).integers(0, 128, 100).tolist()
GGML = {"kernel": False}
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "kernel": ({"kernel": True}, 0.0),
    "kernel, q8_0": ({"kernel": True, "type_k": "q8_0", "type_v": "q8_0"}, 0.0),
    "flash": (GGML, 5e-6),
    "flash, f32": ({**GGML, "type_k": "f32", "type_v": "f32"}, 1e-10),
    "products, f32": ({**GGML, "flash_attn": False, "type_k": "f32", "type_v": "f32"}, 1e-10),
}


@pytest.mark.parametrize(
    ("way", "n_threads"),
    [
        *((way, 1) for way in WAYS),
        *(pytest.param(way, 2, marks=pytest.mark.alone) for way in ("kernel", "flash")),
    ],
)
def test_after_a_load_logits_are_as_documented(
    shared: Path, tmp_path: Path, way: str, n_threads: int
) -> None:
    options, error = WAYS[way]
    if options["kernel"]:
        pytest.importorskip("llvmlite")
    path = tmp_path / "text"
    with Model.from_gguf(shared / "models" / "llama-dense.gguf", n_threads=n_threads) as model:
        wanted = continued(model, path, "never saved", **options)
        for others in ("alone", "beside", "scattered"):
            got = continued(model, path, others, **options)
            if error == 0.0:
                assert np.array_equal(got, wanted)
            elif others == "alone":
                assert np.array_equal(got[:-1], wanted[:-1])
            assert nmse(got, wanted) <= error
