"""Edits of sequences on a tiny model: remove, context shift, grouped positions, rollback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.errors import CacheFull, OptionError
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.runtime.options import ContextShift
from kvcellar.testing.gguf_writer import Value, gguf_bytes
from kvcellar.testing.tiny_llama import TinyLlama
from tests.runtime.helpers import attention
from tests.text.vocabularies import make_bpe

N_CTX = 32
TOKENS = list(range(40, 60))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Random weights under a vocabulary of bytes, so that it can generate text."""
    tiny = TinyLlama(n_vocab=256)
    vocabulary: dict[str, Value] = make_bpe()  # type: ignore[assignment]
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    path.write_bytes(gguf_bytes({**tiny.metadata(), **vocabulary}, tiny.tensors()))
    with Model.from_gguf(path, n_threads=1) as loaded:
        yield loaded


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with model.context(n_ctx=N_CTX, n_seq_max=4, type_k="f32", type_v="f32") as made:
        yield made
        made.cache.check()


def fresh_logits(model: Model, tokens: list[int]) -> np.ndarray:
    with model.context(n_ctx=64, n_seq_max=1, type_k="f32", type_v="f32") as context:
        return context.sequence(tokens).logits


def test_positions_stand_beside_tokens(context: Context) -> None:
    sequence = context.sequence(TOKENS[:5])
    sequence.push(7)
    sequence.push(8)
    assert sequence.positions.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert len(sequence.positions) == len(sequence.tokens)
    sequence.remove(1, 3, gap="keep")
    assert sequence.positions.tolist() == [0, 3, 4, 5, 6]


def test_removed_tokens_are_gone_and_the_rest_moves_up(context: Context) -> None:
    sequence = context.sequence(TOKENS)
    assert sequence.remove(3, 8) is sequence
    assert sequence.tokens == TOKENS[:3] + TOKENS[8:]
    assert sequence.positions.tolist() == list(range(15))
    assert context.cache.used == 15
    sequence.append([9])
    assert sequence.positions[-1] == 15


def test_a_gap_may_stay(context: Context) -> None:
    sequence = context.sequence(TOKENS)
    sequence.remove(3, 8, gap="keep")
    assert sequence.positions.tolist() == [0, 1, 2, *range(8, 20)]
    assert not attention(context).table.pending.any()
    sequence.append([9])
    assert sequence.positions[-1] == 20


def test_moved_rows_are_rotated_to_where_they_stand(model: Model) -> None:
    with (
        model.context(n_ctx=N_CTX, n_seq_max=1, type_k="f32", type_v="f32") as context,
        model.context(n_ctx=N_CTX, n_seq_max=1, type_k="f32", type_v="f32") as other,
    ):
        context.sequence(TOKENS).remove(0, 5)
        context.cache.update()
        other.sequence(TOKENS[5:])
        # K of the first layer depends on token and position only.
        moved, fresh = (
            attention(c).store.read(0, "k", attention(c).table.cells_of(0))
            for c in (context, other)
        )
        assert np.allclose(moved, fresh, atol=1e-5)


def test_logits_after_an_edit_are_those_of_the_edited_text(context: Context, model: Model) -> None:
    sequence = context.sequence(TOKENS)
    before = sequence.logits
    sequence.remove(15, 19)  # the last token is computed again, at its new place
    assert not np.array_equal(sequence.logits, before)
    assert sequence.tokens == [*TOKENS[:15], TOKENS[19]]
    assert np.allclose(sequence.logits, fresh_logits(model, sequence.tokens), atol=1e-4)


def test_the_last_token_is_computed_again_where_it_stood(context: Context) -> None:
    sequence = context.sequence(TOKENS).remove(5, 19, gap="keep")
    assert len(sequence.logits) == 256
    assert sequence.positions.tolist() == [0, 1, 2, 3, 4, 19]


def test_removing_the_end_is_trimming(context: Context, model: Model) -> None:
    sequence = context.sequence(TOKENS)
    sequence.push(7)
    sequence.push(8)
    sequence.remove(18, 21)
    assert sequence.tokens == [*TOKENS[:18], 8]
    sequence.remove(0, 0).remove(19, 19)
    assert np.allclose(sequence.logits, fresh_logits(model, sequence.tokens), atol=1e-4)


def test_what_is_empty_forgets_other_types(context: Context) -> None:
    """What comes next is computed here, however the rest went."""
    for n_removed in (20, 0, 9):
        with context.sequence(TOKENS) as sequence:
            sequence.stored_as = "loaded from other types"
            sequence.trim(1).append(TOKENS[-1:]).remove(19, 20).append(TOKENS[-1:])
            assert sequence.stored_as
            sequence.remove(0, n_removed).trim(20 - n_removed)
            assert sequence.stored_as == ""


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 3), (0, 21), (21, 21)])
def test_ranges_outside_the_text_are_refused(context: Context, start: int, stop: int) -> None:
    sequence = context.sequence(TOKENS)
    with pytest.raises(OptionError, match="st"):
        sequence.remove(start, stop)
    with pytest.raises(OptionError, match="gap"):
        sequence.remove(0, 1, gap="fill")  # type: ignore[arg-type]
    assert sequence.tokens == TOKENS


def test_a_fork_does_not_notice_a_removal(context: Context) -> None:
    parent = context.sequence(TOKENS[:10])
    child = parent.fork()
    expected = child.logits
    parent.remove(2, 4)
    assert child.tokens == TOKENS[:10]
    assert child.positions.tolist() == list(range(10))
    assert np.array_equal(child.trim(1).append([TOKENS[9]]).logits.argmax(), expected.argmax())


def test_a_shift_says_how_many_went(context: Context) -> None:
    sequence = context.sequence(TOKENS)
    assert sequence.shift_context(keep=4) == 8
    assert sequence.tokens == TOKENS[:4] + TOKENS[12:]
    assert sequence.shift_context(keep=4, discard=100) == 7
    assert sequence.tokens == [*TOKENS[:4], TOKENS[19]]
    while len(sequence) > 1:
        assert sequence.shift_context() >= 1
    with pytest.raises(OptionError, match="2 tokens"):
        sequence.shift_context()
    assert sequence.tokens == [TOKENS[19]]


def test_ten_shifts_keep_what_is_to_be_kept(model: Model) -> None:
    with model.context(n_ctx=N_CTX, n_seq_max=1, type_k="f32", type_v="f32") as context:
        sequence = context.sequence(TOKENS)
        kept = attention(context).store.read(1, "k", np.arange(6))
        oracle = list(TOKENS)
        for i in range(10):
            gone = sequence.shift_context(keep=6, discard=7)
            del oracle[6 : 6 + gone]
            added = list(range(100 + i, 107 + i))
            sequence.append(added)
            oracle += added
            assert sequence.tokens == oracle
            assert sequence.positions.tolist() == list(range(20))
            context.cache.check()
        assert sequence.tokens[:6] == TOKENS[:6]
        assert np.array_equal(attention(context).store.read(1, "k", np.arange(6)), kept)


def test_a_long_generation_shifts_by_itself(context: Context) -> None:
    sequence = context.sequence(TOKENS[:8])
    shift = ContextShift(keep=4, discard=6)
    pieces = []
    for piece in sequence.stream(150, shift=shift):
        pieces.append(piece)
        assert context.cache.used <= N_CTX
        assert sequence.positions.max() <= N_CTX
        assert sequence.tokens[:4] == TOKENS[:4]
    assert sequence.finish_reason == "length"
    assert len(pieces) > 100
    assert N_CTX - 6 <= len(sequence) <= N_CTX + 1


def test_an_automatic_shift_is_what_one_would_do_by_hand(context: Context) -> None:
    automatic = context.sequence(TOKENS[:8])
    automatic.generate(30, shift=ContextShift(keep=2, discard=9))
    tokens = automatic.tokens
    automatic.close()

    by_hand = context.sequence(TOKENS[:8])
    for _ in range(30):
        if len(by_hand) > N_CTX:
            by_hand.shift_context(keep=2, discard=9)
        by_hand.push(int(by_hand.logits.argmax()))
    assert by_hand.tokens == tokens


def test_without_being_asked_nothing_is_shifted(context: Context) -> None:
    sequence = context.sequence(TOKENS)
    with pytest.raises(CacheFull):
        sequence.generate(50)
    assert sequence.tokens[: len(TOKENS)] == TOKENS
    assert len(sequence) == N_CTX + 1
    sequence.generate(5, shift=ContextShift(keep=1))
    assert sequence.tokens[0] == TOKENS[0]


def test_prompts_are_never_shifted(context: Context) -> None:
    sequence = context.sequence(TOKENS)
    with pytest.raises(CacheFull, match="20 cells needed, 12 free"):
        sequence.append(TOKENS)
    assert sequence.tokens == TOKENS


def test_a_crowded_cache_is_shifted_before_positions_run_out(context: Context) -> None:
    other = context.sequence(TOKENS[:12])
    sequence = context.sequence(TOKENS[:6])
    sequence.generate(40, shift=ContextShift(keep=2))
    assert context.cache.used <= N_CTX
    assert other.tokens == TOKENS[:12]
    assert sequence.tokens[:2] == TOKENS[:2]


def test_a_shift_that_frees_nothing_ends_the_generation_and_loses_nothing(
    context: Context,
) -> None:
    parent = context.sequence([*TOKENS, *range(10)])
    child = parent.fork()
    child.generate(1)
    text = child.tokens
    with pytest.raises(CacheFull, match="other sequences"):
        child.append([1]).generate(9, shift=ContextShift())
    assert child.tokens[: len(text)] == text
    assert parent.tokens == [*TOKENS, *range(10)]


def test_positions_end_where_training_did(model: Model) -> None:
    with model.context(n_ctx=1024, n_seq_max=1) as context:
        sequence = context.sequence(TOKENS)
        sequence.generate(600, shift=ContextShift(keep=4))
        assert model.spec.n_ctx_train == 512
        assert sequence.positions.max() <= 512
        assert sequence.tokens[:4] == TOKENS[:4]


class TestSelfExtend:
    def test_whole_windows_are_grouped(self, context: Context) -> None:
        sequence = context.sequence(TOKENS)
        assert sequence.self_extend(group=2, width=8) is sequence
        self_extended = [i // 2 for i in range(16)]
        assert sequence.positions.tolist() == [*self_extended, 8, 9, 10, 11]
        assert sequence.tokens == TOKENS
        sequence.self_extend(2, 8)  # no window is full
        assert sequence.positions[-1] == 11

    def test_it_goes_on_as_the_text_grows(self, context: Context) -> None:
        grown = context.sequence(TOKENS[:9]).self_extend(4, 8)
        grown.append(TOKENS[9:]).self_extend(4, 8)
        positions = grown.positions.tolist()
        assert grown.tokens == TOKENS
        grown.close()
        assert context.sequence(TOKENS).self_extend(4, 8).positions.tolist() == positions

    def test_groups_are_trimmed_token_by_token(self, context: Context) -> None:
        sequence = context.sequence(TOKENS).self_extend(4, 8)
        for n in (17, 14, 11, 8, 5, 2):
            sequence.trim(3)
            assert sequence.tokens == TOKENS[:n]
            assert sequence.positions.tolist() == sorted(sequence.positions.tolist())
        sequence.append([5])
        assert sequence.tokens[-1] == 5

    def test_logits_are_had_although_the_last_token_is_grouped(self, context: Context) -> None:
        sequence = context.sequence(TOKENS[:8]).self_extend(4, 8)
        sequence.remove(0, 4)
        assert len(sequence.logits) == 256
        assert sequence.tokens == TOKENS[4:8]

    def test_a_group_is_not_parted(self, context: Context) -> None:
        sequence = context.sequence(TOKENS).self_extend(4, 8)
        with pytest.raises(OptionError, match="share position"):
            sequence.remove(2, 8)
        assert sequence.tokens == TOKENS
        sequence.remove(4, 8)
        assert sequence.tokens == TOKENS[:4] + TOKENS[8:]
        assert sequence.shift_context(keep=1, discard=3) == 4
        assert sequence.tokens == TOKENS[:4] + TOKENS[12:]

    def test_a_fork_knows_the_order_too(self, context: Context) -> None:
        child = context.sequence(TOKENS[:9]).self_extend(4, 8).fork()
        assert child.tokens == TOKENS[:9]
        child.append(TOKENS[9:16]).self_extend(4, 8)
        assert child.tokens == TOKENS[:16]

    def test_a_group_of_one_changes_nothing(self, context: Context) -> None:
        sequence = context.sequence(TOKENS).self_extend(1, 4)
        assert sequence.positions.tolist() == list(range(20))


class TestRollback:
    def test_a_sequence_is_as_it_was(self, context: Context) -> None:
        sequence = context.sequence(TOKENS[:10])
        sequence.generate(2)
        tokens, logits = sequence.tokens, sequence.fork().logits
        with context.cache.transaction() as t:
            sequence.append([1, 2, 3])
            sequence.shift_context(keep=2, discard=3)
            t.rollback()
        assert sequence.tokens == tokens
        assert np.allclose(sequence.logits, logits, atol=1e-5)

    def test_what_was_made_is_closed_and_what_was_closed_is_back(self, context: Context) -> None:
        old = context.sequence(TOKENS[:6])
        with context.cache.transaction() as t:
            old.close()
            new = context.sequence([1, 2])
            assert new.seq_id == old.seq_id
            t.rollback()
        assert new.is_closed
        assert not old.is_closed
        assert old.tokens == TOKENS[:6]
        assert context.sequences == (old,)
        old.close()
        assert context.cache.used == 0
        assert context.sequence([1]).seq_id == 0

    def test_groups_are_forgotten(self, context: Context) -> None:
        sequence = context.sequence(TOKENS)
        with context.cache.transaction() as t:
            sequence.self_extend(2, 4)
            t.rollback()
        assert sequence.self_extend(2, 20).positions.tolist() == [i // 2 for i in range(20)]

    def test_what_is_committed_stays(self, context: Context) -> None:
        sequence = context.sequence(TOKENS[:6])
        with context.cache.transaction():
            sequence.append([1, 2])
        assert sequence.tokens == [*TOKENS[:6], 1, 2]


class TestView:
    def test_a_contexts_view_knows_the_texts(self, context: Context) -> None:
        context.sequence([65 - 33, 66 - 33])  # bytes that print come first in this vocabulary
        rows = context.view().as_dict()["cells"]
        assert [row["text"] for row in rows] == [
            context.model.tokenizer.decode([token]) for token in (32, 33)
        ]

    def test_without_a_tokenizer_there_are_none(self, shared: Path) -> None:
        path = shared / "models" / "llama-dense.gguf"
        with Model.from_gguf(path, n_threads=1) as bare, bare.context(n_ctx=32) as context:
            context.sequence([1, 2, 3])
            assert context.view() == context.cache.view()


def test_a_rollback_takes_back_how_positions_were_divided(context: Context) -> None:
    sequence = context.sequence(TOKENS)
    with context.cache.transaction() as attempt:
        sequence.self_extend(2, 4)
        divided = sequence.positions.tolist()
        attempt.rollback()
    assert sequence.positions.tolist() == list(range(20))
    assert sequence.inexact_from is None
    assert sequence.self_extend(2, 4).positions.tolist() == divided
