"""Sequences that nobody refers to any more are freed when an id or a cell is wanted, not before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar.errors import CacheFull, SequenceIdError
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.runtime.sequence import Sequence
from kvcellar.testing.gguf_writer import gguf_bytes
from kvcellar.testing.tiny_llama import TinyLlama


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    tiny, path = TinyLlama(), tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(tiny.metadata(), tiny.tensors()))
    with (
        Model.from_gguf(path, n_threads=1) as model,
        model.context(n_ctx=32, n_seq_max=3, n_ubatch=8) as context,
    ):
        yield context


def test_a_loop_that_closes_nothing_goes_on_for_ever(context: Context) -> None:
    first = context.sequence([1, 2, 3]).logits.tolist()
    for _ in range(20):
        sequence = context.sequence([1, 2, 3])
        assert sequence.logits.tolist() == first
        sequence.fork().append([4])
    context.cache.check()


def test_ids_are_given_back_when_one_is_wanted(context: Context) -> None:
    kept = context.sequence([1, 2])
    context.sequence([3])
    context.sequence([4])
    assert [sequence.seq_id for sequence in context.sequences] == [0, 1, 2]
    assert context.sequences[1].tokens == [3]  # nothing is lost before it is in the way
    assert context.cache.used == 4
    new = context.sequence([5])
    assert (new.seq_id, kept.tokens, context.cache.used) == (1, [1, 2], 3)
    held = context.sequence([6])
    with pytest.raises(SequenceIdError, match="all 3 sequences are taken"):
        context.sequence()
    assert [kept.tokens, new.tokens, held.tokens] == [[1, 2], [5], [6]]


def test_cells_are_given_back_when_some_are_wanted(context: Context) -> None:
    kept = context.sequence(range(10))
    context.sequence(range(20))
    assert context.cache.used == 30
    kept.append(range(10))
    assert (len(kept), context.cache.used) == (20, 20)
    other = context.sequence(range(10))
    with pytest.raises(CacheFull):
        kept.append(range(10))
    assert (len(kept), len(other)) == (20, 10)


def refer_to_itself(sequence: Sequence) -> None:
    sequence.itself = sequence  # type: ignore[attr-defined]


def test_those_that_only_refer_to_each_other_too(context: Context) -> None:
    gc.collect()
    gc.disable()
    try:
        for token in range(3):
            refer_to_itself(context.sequence([token]))
        assert context.sequence([9]).tokens == [9]
    finally:
        gc.enable()


def test_a_transaction_brings_back_what_was_freed_within_it(context: Context) -> None:
    context.sequence([1, 2])
    context.sequence([3, 4])
    with context.cache.transaction() as transaction:
        context.sequence([5])
        assert context.sequence([6]).tokens == [6]
        transaction.rollback()
    assert [sequence.tokens for sequence in context.sequences] == [[1, 2], [3, 4]]


def test_one_that_is_reached_again_is_not_freed(context: Context) -> None:
    context.sequence([1, 2])
    again = context.sequences[0]
    assert again is context.sequences[0]
    others = context.sequence([3]), context.sequence([4])
    with pytest.raises(SequenceIdError):
        context.sequence([5])
    assert [again.tokens, *(other.tokens for other in others)] == [[1, 2], [3], [4]]
