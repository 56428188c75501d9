"""Contexts whose size changes, and transactions over them, with a model that computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.errors import CacheError, CacheFull, ClosedError, OptionError
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.testing.golden import nmse
from kvcellar.testing.tiny_llama import TinyLlama
from tests.runtime.helpers import attention

PROMPT = [7, 9, 3, 4, 12, 12, 40, 1, 27, 5, 23, 11]
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    path.write_bytes(TinyLlama().to_bytes())
    with Model.from_gguf(path, n_threads=1) as loaded:
        yield loaded


@pytest.fixture(params=["rows", "across", "q8_0"])
def context(model: Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    kind = "q8_0" if request.param == "q8_0" else "f16"
    rows = request.param != "across"
    with model.context(n_ctx=64, n_seq_max=3, type_k=kind, type_v=kind, flash_attn=rows) as made:
        yield made


@pytest.mark.parametrize("sizes", [(200,), (16,), (300, 20, 64), (13, 700)])
def test_a_conversation_goes_on_after_a_resize(context: Context, sizes: tuple[int, ...]) -> None:
    whole = context.decode(Batch.of(PROMPT, logits="all"))
    context.cache.clear()
    context.decode(Batch.of([1, 2, 3], seq_id=2))
    context.decode(Batch.of(PROMPT[:5]))
    context.cache.seq_rm(2)

    rows = [context.decode(Batch.of(PROMPT[5:6]))[0]]
    for token, size in zip(PROMPT[6:], [*sizes, *[0] * 9], strict=False):
        if size:
            context.resize(size)
            assert context.spec.size == size
        rows.append(context.decode(Batch.of([token]))[0])

    assert nmse(rows, whole[5:]) < ROUNDING
    context.cache.check()


def test_graphs_of_the_old_buffers_are_never_run(context: Context) -> None:
    """Of any way to resize: they would write to memory that was given back."""
    first = context.decode(Batch.of([5]))[0].copy()
    context.cache.clear()
    context.cache.resize(48)
    np.testing.assert_array_equal(context.decode(Batch.of([5]))[0], first)
    context.cache.clear()
    context.cache.resize(64)
    np.testing.assert_array_equal(context.decode(Batch.of([5]))[0], first)


def test_a_full_context_can_grow(context: Context) -> None:
    context.decode(Batch.of([1] * 64))
    with pytest.raises(CacheFull):
        context.decode(Batch.of([1]))
    context.resize(65)
    context.decode(Batch.of([1]))
    with pytest.raises(CacheFull, match=r"resize\(64\) has no room"):
        context.resize(64)
    assert context.spec.size == 65


@pytest.mark.parametrize("size", [0, -1, 2**31, 1.5, True])
def test_sizes_out_of_range_are_refused(context: Context, size: int) -> None:
    with pytest.raises(OptionError, match="n_ctx="):
        context.resize(size)


def test_not_within_a_transaction_nor_after_the_end(model: Model) -> None:
    context = model.context(n_ctx=32)
    with context.cache.transaction(), pytest.raises(CacheError, match="transaction is open"):
        context.resize(64)
    context.close()
    with pytest.raises(ClosedError):
        context.resize(64)


def test_after_a_rollback_logits_are_the_same_bit_for_bit(context: Context) -> None:
    context.decode(Batch.of(PROMPT[:8]))
    with context.cache.transaction() as t:
        wanted = context.decode(Batch.of(PROMPT[8:], logits="all"))
        t.rollback()
    with context.cache.transaction() as t:
        context.cache.seq_rm(0, 2, 5)
        context.cache.seq_add(0, 5, -1, -3)
        context.decode(Batch.of([9, 9, 9]))
        context.cache.defrag()
        context.cache.seq_cp(0, 1, 0, 4)
        context.cache.seq_add(1, 0, -1, 7)
        context.decode(Batch.of([4, 4], seq_id=1))
        t.rollback()
    got = context.decode(Batch.of(PROMPT[8:], logits="all"))
    np.testing.assert_array_equal(got, wanted)


def test_a_context_compacts_when_asked_to(model: Model) -> None:
    with model.context(n_ctx=512, defrag_threshold=0.1) as context:
        context.decode(Batch.of([1] * 200))
        for position in range(0, 200, 2):
            context.cache.seq_rm(0, position, position + 1)
        context.decode(Batch.of([1]))
        assert attention(context).cell_max() == context.cache.used == 101
    with pytest.raises(OptionError, match=r"defrag_threshold=1\.5"):
        model.context(defrag_threshold=1.5)
