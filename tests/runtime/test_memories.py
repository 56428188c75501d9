"""Sequences over states and windows: what public reports told of, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.errors import CacheFull, NotSupported, OptionError
from kvcellar.runtime.context import Context
from kvcellar.runtime.options import ContextShift
from tests.runtime.archs import (
    F32,
    HYBRID,
    N_VOCAB,
    RECURRENT,
    WINDOWED,
    check_logits,
    opened,
    text,
)
from tests.runtime.helpers import attention

WITH_STATES = (*HYBRID, *RECURRENT)
PROMPT = text(1, 60)  # longer than the windows


def n_computed(context: Context) -> int:
    """How many tokens have been computed since this was asked last."""
    times = context.timings
    n = times.prefill_tokens + times.decode_tokens
    times.reset()
    return n


class TestEditedPrompts:
    @pytest.mark.report("llama.rn#187")
    @pytest.mark.parametrize("arch", [*WITH_STATES, *WINDOWED])
    def test_text_and_cache_do_not_diverge(self, shared: Path, arch: str) -> None:
        """llama.rn#187: the result of a removal was ignored, and the counter ran away."""
        with opened(shared, arch, **F32) as context:
            sequence = context.sequence(PROMPT)
            sequence.trim(21)
            assert sequence.tokens == PROMPT[:39]
            assert sequence.positions.tolist() == list(range(39))
            sequence.append([5, 6])
            assert context.cache.seq_tokens(sequence.seq_id).tolist() == [*PROMPT[:39], 5, 6]
            check_logits(context, sequence.logits, [*PROMPT[:39], 5, 6])
            context.cache.check()

    @pytest.mark.report("llama.cpp#23280", "llama-cpp-python#2306")
    @pytest.mark.parametrize("arch", [*WITH_STATES, *WINDOWED])
    def test_the_same_prompt_twice(self, shared: Path, arch: str) -> None:
        """#23280: backing off one token aborted; llama-cpp-python#2306: one must be computed."""
        with opened(shared, arch, **F32) as context:
            sequence = context.sequence(PROMPT)
            n_computed(context)
            sequence.trim(1).append(PROMPT[-1:])
            assert n_computed(context) >= 1
            check_logits(context, sequence.logits, PROMPT)

    @pytest.mark.report("llama.cpp#14157")
    @pytest.mark.parametrize("arch", WINDOWED)
    def test_a_window_goes_back_one_token(self, shared: Path, arch: str) -> None:
        """#14157: an identical prompt was computed from 0 again once the window had slid."""
        with opened(shared, arch, **F32) as context:
            sequence = context.sequence(PROMPT)
            n_computed(context)
            sequence.trim(1).append(PROMPT[-1:])
            assert n_computed(context) == 1

    @pytest.mark.slow
    @pytest.mark.report("koboldcpp#2151")
    @pytest.mark.parametrize("arch", WINDOWED)
    def test_a_prefix_behind_the_window_is_not_trusted(self, shared: Path, arch: str) -> None:
        """koboldcpp#2151: a new session went on from 16 tokens whose window was gone."""
        with opened(shared, arch, checkpoints=0, **F32) as context:
            sequence = context.sequence(PROMPT)
            for token in text(2, 300):  # reuses cells of the window's group
                sequence.append([token])
            sequence.trim(len(sequence) - 16)
            assert sequence.tokens == PROMPT[:16]
            n_computed(context)
            sequence.append([9])
            assert n_computed(context) == 17
            check_logits(context, sequence.logits, [*PROMPT[:16], 9])

    @pytest.mark.report("llama.cpp#14625")
    @pytest.mark.parametrize("arch", WITH_STATES)
    def test_an_edit_costs_what_follows_the_last_checkpoint(self, shared: Path, arch: str) -> None:
        """#14625 and many more: each edit of the history cost the whole prompt."""
        with opened(shared, arch, **F32) as context:
            sequence = context.sequence(PROMPT[:40]).append(PROMPT[40:])
            sequence.trim(5).append([3])
            n_computed(context)
            sequence.trim(10)
            sequence.append([9])
            assert n_computed(context) <= 56 - 10 + 1 - 40
            check_logits(context, sequence.logits, [*PROMPT[:46], 9])

    @pytest.mark.report("llama.cpp#26695", "llama.cpp#28019")
    @pytest.mark.parametrize("arch", WITH_STATES)
    def test_a_whole_batch_is_taken_back(self, shared: Path, arch: str) -> None:
        """#26695: True was returned and the state not restored; #28019: beside others."""
        with opened(shared, arch, **F32) as context:
            context.decode(Batch.of(PROMPT[:10], 0))
            context.decode(Batch.of(PROMPT[20:25], 1))
            context.decode(Batch.of(PROMPT[10:13], 0))
            assert context.cache.seq_rm(0, 10, -1)
            got = context.decode(Batch.of([7], 0))[-1]
            check_logits(context, got, [*PROMPT[:10], 7])
            got = context.decode(Batch.of([7], 1))[-1]
            check_logits(context, got, [*PROMPT[20:25], 7])

    @pytest.mark.parametrize("arch", WITH_STATES)
    @pytest.mark.parametrize("budget", [{"checkpoints": 0}, {"checkpoint_bytes": 0}])
    def test_without_checkpoints_all_is_computed_again(
        self, shared: Path, arch: str, budget: dict[str, int]
    ) -> None:
        with opened(shared, arch, "ggml", **budget, **F32) as context:
            sequence = context.sequence(PROMPT[:20]).append(PROMPT[20:30])
            n_computed(context)
            sequence.trim(3).append([9])
            assert n_computed(context) == 28
            check_logits(context, sequence.logits, [*PROMPT[:27], 9])


class TestRemoving:
    @pytest.mark.report("llama.cpp#16768")
    @pytest.mark.parametrize("arch", WITH_STATES)
    def test_the_middle_goes_and_the_rest_is_computed_again(self, shared: Path, arch: str) -> None:
        """#16768: a hybrid died on a context shift; its state must forget what was removed."""
        with opened(shared, arch, **F32) as context:
            sequence = context.sequence(PROMPT)
            other = context.sequence(PROMPT[:7])
            assert sequence.shift_context(keep=4, discard=20) == 20
            assert sequence.tokens == PROMPT[:4] + PROMPT[24:]
            assert sequence.positions.tolist() == list(range(40))
            check_logits(context, sequence.logits, sequence.tokens)
            assert other.tokens == PROMPT[:7]
            context.cache.check()

    @pytest.mark.parametrize("arch", WITH_STATES)
    def test_a_removal_reaches_over_what_waits(self, shared: Path, arch: str) -> None:
        with opened(shared, arch, checkpoints=0, **F32) as context:
            sequence = context.sequence(PROMPT[:20])
            sequence.remove(5, 8)  # everything waits now
            sequence.push(9)
            assert sequence.shift_context(keep=2, discard=3) == 3
            sequence.remove(10, 15)
            wanted = [*PROMPT[:2], *PROMPT[8:16], 9][:10]
            expected = [t for i, t in enumerate([*PROMPT[:5], *PROMPT[8:20], 9]) if not 2 <= i < 5]
            del expected[10:15]
            assert sequence.tokens == expected
            assert sequence.tokens[:10] == wanted
            assert sequence.positions.tolist() == list(range(len(expected)))
            check_logits(context, sequence.logits, expected)

    @pytest.mark.parametrize("arch", WITH_STATES)
    def test_a_gap_in_a_recurrent_sequence_is_refused(self, shared: Path, arch: str) -> None:
        with opened(shared, arch, **F32) as context:
            sequence = context.sequence(PROMPT[:20])
            with pytest.raises(NotSupported, match="follow on"):
                sequence.remove(3, 6, gap="keep")
            assert sequence.tokens == PROMPT[:20]
            sequence.remove(15, 20, gap="keep")  # nothing follows
            assert sequence.tokens == PROMPT[:15]

    @pytest.mark.report("ollama#9433")
    def test_a_model_that_cannot_rotate_computes_again(
        self, shared: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """ollama#9433: what cannot shift crashed; it has to clear and compute what is kept."""
        with opened(shared, "llama-dense", n_ctx=64, **F32) as context:
            store = type(attention(context).store)
            monkeypatch.setattr(store, "can_shift", property(lambda _: False))
            sequence = context.sequence(PROMPT)
            assert sequence.shift_context(keep=4, discard=20) == 20
            check_logits(context, sequence.logits, PROMPT[:4] + PROMPT[24:])
            for token in PROMPT[:40]:
                sequence.push(token)
                sequence.make_room(ContextShift(keep=4))
                assert len(sequence.logits) == N_VOCAB
            check_logits(context, sequence.logits, sequence.tokens)

    @pytest.mark.parametrize("arch", ["jamba-dense", "gemma3-dense"])
    def test_a_text_goes_on_beyond_the_context(self, shared: Path, arch: str) -> None:
        with opened(shared, arch, n_ctx=64, n_seq_max=1, **F32) as context:
            sequence = context.sequence(PROMPT)
            for token in text(3, 100):
                sequence.push(token)
                sequence.make_room(ContextShift(keep=4))
                assert len(sequence.logits) == N_VOCAB
                assert context.cache.used == len(sequence) <= 64
            assert sequence.tokens[:4] == PROMPT[:4]
            assert sequence.tokens[4:] == text(3, 100)[-len(sequence) + 4 :]
            if arch == "jamba-dense":
                check_logits(context, sequence.logits, sequence.tokens)

    def test_a_shift_that_others_leave_no_room_for_is_refused(self, shared: Path) -> None:
        with opened(shared, "jamba-dense", n_ctx=40, **F32) as context:
            parent = context.sequence(PROMPT[:40])
            child = parent.fork()
            child.push(3)
            with pytest.raises(CacheFull, match="other sequences"):
                child.make_room(ContextShift())
            assert child.tokens == [*PROMPT[:40], 3]


class TestRefusals:
    @pytest.mark.parametrize("arch", WITH_STATES)
    def test_states_have_no_positions_to_group(self, shared: Path, arch: str) -> None:
        with opened(shared, arch, **F32) as context:
            sequence = context.sequence(PROMPT)
            with pytest.raises(NotSupported, match="swa_full"):
                sequence.self_extend(2, 8)
            assert sequence.tokens == PROMPT

    def test_windows_of_full_size_are_grouped_together(self, shared: Path) -> None:
        with opened(shared, "gemma3-dense", **F32) as context:
            sequence = context.sequence(PROMPT)
            with pytest.raises(NotSupported, match="swa_full"):
                sequence.self_extend(2, 8)
        with opened(shared, "gemma3-dense", swa_full=True, **F32) as context:
            sequence = context.sequence(PROMPT[:20]).self_extend(4, 8)
            assert sequence.positions.tolist() == [i // 4 for i in range(16)] + [4, 5, 6, 7]
            assert sequence.tokens == PROMPT[:20]
            context.cache.check()
            sequence.trim(5).append([3])
            assert sequence.tokens == [*PROMPT[:15], 3]

    def test_what_came_as_an_embedding_cannot_be_computed_again(self, shared: Path) -> None:
        with opened(shared, "jamba-dense", checkpoints=0, **F32) as context:
            sequence = context.sequence()
            n_embd = context.model.spec.n_embd
            context.decode(Batch.of_embeddings(np.ones((3, n_embd)), sequence.seq_id))
            context.decode(Batch.of([4, 5, 6], sequence.seq_id))
            before = context.cache.seq_tokens(sequence.seq_id).tolist()
            assert before == [-1, -1, -1, 4, 5, 6]
            with pytest.raises(NotSupported, match="embedding"):
                sequence.trim(1)
            for start in (0, 3):
                with pytest.raises(NotSupported, match="embedding"):
                    sequence.remove(start, start + 1)
            assert sequence.tokens == before
            sequence.trim(6)
            assert len(sequence) == 0

    @pytest.mark.parametrize(
        "wrong", [{"checkpoints": -1}, {"checkpoint_bytes": -1}, {"checkpoints": "many"}]
    )
    def test_budgets_are_checked(self, shared: Path, wrong: dict[str, int]) -> None:
        with (
            pytest.raises(OptionError, match="checkpoint"),
            opened(shared, "jamba-dense", "ggml", **wrong),
        ):
            pass


class TestContexts:
    @pytest.mark.parametrize("arch", [*WITH_STATES, *WINDOWED])
    def test_cells_are_shown_and_counted(self, shared: Path, arch: str) -> None:
        with opened(shared, arch, **F32) as context:
            context.sequence(PROMPT)
            assert context.view().used_cells == context.cache.used > 0
            assert repr(context).startswith("<Context of ")
            assert context.memory_spec.n_bytes > 0

    @pytest.mark.parametrize("arch", [*HYBRID, *WINDOWED])
    def test_a_context_is_resized_with_what_it_holds(self, shared: Path, arch: str) -> None:
        with opened(shared, arch, n_ctx=300, **F32) as context:
            sequence = context.sequence(PROMPT)
            context.resize(600)
            assert context.spec.size == 600
            sequence.append([3])
            check_logits(context, sequence.logits, [*PROMPT, 3])
            with pytest.raises(CacheFull):
                context.resize(30)
            context.resize(64)
            sequence.append([4])
            check_logits(context, sequence.logits, [*PROMPT, 3, 4])

    @pytest.mark.parametrize("arch", [*WITH_STATES, *WINDOWED])
    def test_a_rollback_puts_sequences_back(self, shared: Path, arch: str) -> None:
        with opened(shared, arch, **F32) as context:
            sequence = context.sequence(PROMPT)
            with context.cache.transaction() as t:
                sequence.trim(30)
                sequence.append([1, 2, 3])
                made = context.sequence([9])
                t.rollback()
            assert made.is_closed
            assert sequence.tokens == PROMPT
            sequence.append([3])
            check_logits(context, sequence.logits, [*PROMPT, 3])


@pytest.mark.parametrize("arch", ["mamba-dense", "jamba-dense"])
def test_a_transaction_needs_no_checkpoints(shared: Path, arch: str) -> None:
    with opened(shared, arch, n_seq_max=1, checkpoints=0) as context:
        sequence = context.sequence(text(1, 5))
        before = sequence.logits.copy()
        with context.cache.transaction() as attempt:
            for token in text(2, 4):
                sequence.append([token])
            attempt.rollback()
        assert len(sequence) == 5
        assert np.array_equal(sequence.logits, before)
        context.cache.check()
