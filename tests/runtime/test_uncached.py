"""Cached decodes equal a plain forward pass, token by token, whatever was done to the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.testing.golden import nmse
from kvcellar.testing.uncached import uncached_logits
from kvcellar.types import Float32Array
from tests.runtime.helpers import attention

TEXT = [7, 99, 3, 64, 12, 12, 40, 1, 77, 5, 23, 118, 9, 9, 31, 2]
HALF = len(TEXT) // 2
ROUNDING = 1e-11  # f32 K and V
HALF_ROUNDING = 2e-6  # f16 K and V

Edit = Callable[[Context], int]
"""Changes a cache that holds the first half of the text as sequence 0; says where it is then."""


@pytest.fixture(scope="module", params=["llama-dense", "llama-moe"])
def model(shared: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    with Model.from_gguf(shared / "models" / f"{request.param}.gguf", backend="numpy") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected(model: Model) -> Float32Array:
    """Logits of every token of the text, without a cache."""
    return uncached_logits(model.architecture, TEXT)


@pytest.fixture(params=[True, False], ids=["rows", "across"])
def context(model: Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    options = {"type_k": "f32", "type_v": "f32", "flash_attn": request.param}
    with model.context(n_ctx=64, n_seq_max=4, **options) as made:
        yield made


def _one_by_one(context: Context, seq_id: int, tokens: list[int]) -> list[Float32Array]:
    return [context.decode(Batch.of([token], seq_id))[0] for token in tokens]


def _nothing(context: Context) -> int:  # noqa: ARG001
    return 0


def _fork(context: Context) -> int:
    """A second sequence that shares the first half; the first one goes another way."""
    context.cache.seq_cp(0, 1)
    context.decode(Batch.of([50, 51, 52], seq_id=0))
    return 1


def _remove_and_add_again(context: Context) -> int:
    context.cache.seq_rm(0, 3, -1)
    context.decode(Batch.of(TEXT[3:HALF], seq_id=0))
    return 0


def _take_back(context: Context) -> int:
    """A draft that is removed again."""
    context.decode(Batch.of([60, 61, 62], seq_id=0))
    context.cache.seq_rm(0, HALF, -1)
    return 0


def _compact(context: Context) -> int:
    """Holes before and between the cells, closed."""
    context.decode(Batch.of([1] * 20, seq_id=3))
    context.cache.seq_cp(0, 2, 0, 4)
    context.decode(Batch.of(TEXT[4:HALF], seq_id=2))
    context.cache.seq_rm(0)
    context.cache.seq_rm(3)
    context.cache.defrag()
    context.cache.update()
    assert attention(context).cell_max() == HALF
    return 2


def _shift_and_back(context: Context) -> int:
    cache = context.cache
    for delta in (5, 20, -17, -8):
        cache.seq_add(0, 0, -1, delta)
        cache.update()
    assert cache.seq_pos_min(0) == 0
    return 0


def _shift_a_copy(context: Context) -> int:
    """The cells that others share are copied, not moved."""
    context.cache.seq_cp(0, 1)
    context.cache.seq_add(1, 0, -1, 9)
    context.cache.update()
    return 0


def _resize(context: Context) -> int:
    context.cache.resize(100)
    context.cache.resize(40)
    return 0


def _roll_back(context: Context) -> int:
    with context.cache.transaction() as transaction:
        context.cache.seq_rm(0, 2, 5)
        context.decode(Batch.of([80, 81], seq_id=0))
        transaction.rollback()
    return 0


EDITS: list[Edit] = [
    _nothing,
    _fork,
    _remove_and_add_again,
    _take_back,
    _compact,
    _shift_and_back,
    _shift_a_copy,
    _resize,
    _roll_back,
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__.strip("_"))
def test_cached_equals_uncached(context: Context, expected: Float32Array, edit: Edit) -> None:
    before = _one_by_one(context, 0, TEXT[:HALF])
    assert nmse(before, expected[:HALF]) < ROUNDING
    seq_id = edit(context)
    after = _one_by_one(context, seq_id, TEXT[HALF:])
    assert nmse(after, expected[HALF:]) < ROUNDING
    context.cache.check()


def test_another_text_is_far_away(model: Model, expected: Float32Array) -> None:
    """The comparison would notice a single token that differs, or two that are swapped."""
    swapped = [TEXT[0], TEXT[2], TEXT[1], *TEXT[3:]]
    for other in ([8, *TEXT[1:]], swapped):
        got = uncached_logits(model.architecture, other)
        assert nmse(got[-1], expected[-1]) > 10 * HALF_ROUNDING


@pytest.mark.parametrize(("kind", "tolerance"), [("f16", HALF_ROUNDING), ("q8_0", 1e-4)])
def test_smaller_types_are_near(
    model: Model, expected: Float32Array, kind: str, tolerance: float
) -> None:
    with model.context(n_ctx=64, type_k=kind, type_v=kind) as context:
        got = context.decode(Batch.of(TEXT, logits="all"))
    assert 0 < nmse(got, expected) < tolerance


def test_the_ggml_backend_equals_uncached(
    model: Model, shared: Path, expected: Float32Array
) -> None:
    path = shared / "models" / model.path.name
    with Model.from_gguf(path, n_threads=1) as fast, fast.context(n_ctx=64) as context:
        got = np.array(_one_by_one(context, 0, TEXT))
    assert nmse(got, expected) < HALF_ROUNDING
