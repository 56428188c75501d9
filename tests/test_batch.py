"""Batches: how they are built, what is filled in, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.batch import Batch, Rows
from kvcellar.cellsets import unpack_owners
from kvcellar.errors import BatchError, PositionError, SequenceIdError
from kvcellar.types import MAX_POSITION


def resolve(batch: Batch, held: dict[int, int] | None = None, n_seq_max: int = 8) -> Rows:
    ends = held or {}
    return batch.resolve(n_seq_max, lambda seq: ends.get(seq, -1))


class TestBuilding:
    def test_tokens_of_one_sequence(self) -> None:
        rows = resolve(Batch.of([5, 6, 7], seq_id=2))

        assert rows.tokens is not None
        assert rows.tokens.tolist() == [5, 6, 7]
        assert rows.tokens.dtype == np.int32
        assert rows.positions.tolist() == [0, 1, 2]
        assert unpack_owners(rows.owners)[1].tolist() == [2, 2, 2]
        assert rows.wanted.tolist() == [False, False, True]
        assert len(rows) == 3

    def test_arrays_are_taken_as_lists_are(self) -> None:
        rows = resolve(Batch.of(np.array([5, 6], np.int32), positions=np.array([3, 9])))

        assert rows.positions.tolist() == [3, 9]

    def test_tokens_that_several_sequences_share(self) -> None:
        rows = resolve(Batch.of([5, 6], seq_id=[3, 1]))

        assert [ids.tolist() for ids in unpack_owners(rows.owners)] == [[0, 0, 1, 1], [1, 3, 1, 3]]

    @pytest.mark.parametrize(
        ("logits", "wanted"),
        [
            ("last", [False, True]),
            ("all", [True, True]),
            ("none", [False, False]),
            ([True, False], [True, False]),
            (np.array([False, True]), [False, True]),
        ],
    )
    def test_which_logits_are_wanted(self, logits: object, wanted: list[bool]) -> None:
        batch = Batch.of([1, 2], logits=logits)  # type: ignore[arg-type]

        assert resolve(batch).wanted.tolist() == wanted

    def test_token_by_token_as_in_llama_cpp(self) -> None:
        batch = Batch()
        batch.add(1, 0, [0]).add(2, 1, [0], logits=True)
        batch.add(9, seq_ids=5)

        rows = resolve(batch, {5: 41})

        assert rows.positions.tolist() == [0, 1, 42]
        assert rows.wanted.tolist() == [False, True, False]
        assert (len(batch), batch.n_tokens, batch.n_seqs) == (3, 3, 2)

    def test_a_cleared_batch_can_be_filled_anew(self) -> None:
        batch = Batch.of([1, 2, 3])
        batch.clear()
        batch.add(4)

        rows = resolve(batch)

        assert rows.tokens is not None
        assert rows.tokens.tolist() == [4]
        assert len(rows.positions) == len(rows.wanted) == 1

    def test_embeddings_take_the_place_of_tokens(self) -> None:
        array = np.arange(6, dtype=np.float64).reshape(2, 3)
        batch = Batch.of_embeddings(array, seq_id=1)
        array[:] = 0

        rows = resolve(batch, {1: 4})

        assert rows.tokens is None
        assert rows.embeddings is not None
        assert rows.embeddings.dtype == np.float32
        assert rows.embeddings.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert rows.positions.tolist() == [5, 6]

    def test_resolving_twice_gives_the_same(self) -> None:
        batch = Batch.of([1, 2])

        first, second = resolve(batch), resolve(batch)

        assert first.positions.tolist() == second.positions.tolist()


class TestPositions:
    def test_open_positions_go_on_where_each_sequence_ends(self) -> None:
        batch = Batch().add(1, seq_ids=0).add(2, seq_ids=1).add(3, seq_ids=0).add(4, 9, 1)
        batch.add(5, seq_ids=1)

        assert resolve(batch, {0: 6, 1: 2}).positions.tolist() == [7, 3, 8, 9, 10]

    def test_gaps_are_allowed(self) -> None:
        assert resolve(Batch.of([1, 2], positions=[5, 8]), {0: 1}).positions.tolist() == [5, 8]

    @pytest.mark.parametrize(
        ("positions", "message"),
        [
            ([4, 5], "position 4, but the sequence already reaches 4"),
            ([5, 5], "token 1 of sequence 0 stands at position 5, .* reaches 5"),
            ([7, 6], "position 6, .* reaches 7"),
        ],
    )
    def test_positions_that_do_not_rise_are_refused(
        self, positions: list[int], message: str
    ) -> None:
        with pytest.raises(PositionError, match=message):
            resolve(Batch.of([1, 2], positions=positions), {0: 4})

    @pytest.mark.parametrize("position", [-1, MAX_POSITION, 2**40])
    def test_positions_out_of_range_are_refused(self, position: int) -> None:
        with pytest.raises(PositionError, match=str(position)):
            resolve(Batch.of([1], positions=[position]))

    def test_a_full_range_of_positions_cannot_be_continued(self) -> None:
        with pytest.raises(PositionError, match=str(MAX_POSITION)):
            resolve(Batch.of([1]), {0: MAX_POSITION - 1})

    def test_sequences_that_end_differently_need_a_position_for_a_shared_token(self) -> None:
        batch = Batch.of([1], seq_id=[0, 1])

        with pytest.raises(PositionError, match=r"\[0, 1\].*\[3, 5\]"):
            resolve(batch, {0: 3, 1: 5})
        assert resolve(batch, {0: 3, 1: 3}).positions.tolist() == [4]

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12))
    def test_accepted_positions_rise_in_each_sequence(self, steps: list[tuple[int, int]]) -> None:
        batch = Batch()
        for seq, pos in steps:
            batch.add(0, pos, seq)
        by_sequence = {seq: [pos for s, pos in steps if s == seq] for seq, _ in steps}
        rises = all(sorted(set(p)) == p for p in by_sequence.values())

        if rises:
            assert resolve(batch).positions.tolist() == [pos for _, pos in steps]
        else:
            with pytest.raises(PositionError):
                resolve(batch)


class TestRefusals:
    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: Batch.of([1, 2], positions=[0]), "2 tokens but 1 positions"),
            (lambda: Batch.of([1, 2], logits=[True]), "2 tokens but a logits mask of 1"),
            (
                lambda: Batch.of([1], logits="first"),  # type: ignore[arg-type]
                "logits='first'",
            ),
            (
                lambda: Batch.of([[1, 2]]),  # type: ignore[list-item]
                "flat list of integers",
            ),
            (
                lambda: Batch.of([1.5]),  # type: ignore[list-item]
                "flat list of integers",
            ),
            (
                lambda: Batch.of([1], positions=[0.5]),  # type: ignore[list-item]
                "positions must be a flat list",
            ),
            (lambda: Batch.of([1], seq_id=[]), "without an owner"),
            (lambda: Batch().add(1, 0, []), "without an owner"),
            (lambda: Batch().add(1, 0, [2, 2]), "an owner twice"),
            (lambda: Batch.of_embeddings([1.0, 2.0]), r"shape \(2,\)"),
            (lambda: Batch.of_embeddings([[1.0], [np.nan]]), "embedding 1 holds NaN"),
            (lambda: Batch.of_embeddings([[np.inf], [1.0]]), "embedding 0 holds NaN or infinity"),
            (lambda: Batch.of_embeddings([[1.0]]).add(3), "cannot be added"),
        ],
    )
    def test_arguments_that_do_not_fit(self, build: Callable[[], Batch], message: str) -> None:
        with pytest.raises(BatchError, match=message):
            build()

    def test_a_failed_add_leaves_the_batch_as_it_was(self) -> None:
        batch = Batch.of([1])
        for args in ((2, 1, [0, 0]), (2, 1.5, [0]), (None, 1, [0])):
            with pytest.raises(BatchError):
                batch.add(*args)

        assert len(resolve(batch)) == 1

    def test_values_of_another_type_are_named(self) -> None:
        wrong: Any = "x"
        builds: list[Callable[[], Batch]] = [
            lambda: Batch().add(wrong),
            lambda: Batch().add(1, wrong),
            lambda: Batch().add(1, 0, wrong),
            lambda: Batch.of([1], seq_id=wrong),
            lambda: Batch.of([1], seq_id=2**63),
            lambda: Batch.of(wrong),
            lambda: Batch.of([[1, 2], [3]]),  # type: ignore[list-item]
            lambda: Batch.of([1], logits=5),  # type: ignore[arg-type]
            lambda: Batch.of_embeddings(wrong),
            lambda: Batch.of_embeddings([[1.0, 2.0], [3.0]]),
        ]
        for build in builds:
            with pytest.raises(BatchError, match=r"not '?(x|\[\[1|9223372036854775808)|logits=5"):
                build()

    def test_nothing_is_filled_in_beside_the_checks(self) -> None:
        with pytest.raises(TypeError):
            Batch([1, 2])  # type: ignore[call-arg]

    def test_an_empty_batch(self) -> None:
        for batch in (Batch(), Batch.of([]), Batch.of_embeddings(np.zeros((0, 4)))):
            with pytest.raises(BatchError, match="empty"):
                resolve(batch)

    @pytest.mark.parametrize("token", [-1, 2**31])
    def test_token_ids_out_of_range(self, token: int) -> None:
        with pytest.raises(BatchError, match=str(token)):
            resolve(Batch.of([0, token]))

    @pytest.mark.parametrize("seq_id", [-1, 8, 100])
    def test_sequence_ids_out_of_range(self, seq_id: int) -> None:
        with pytest.raises(SequenceIdError, match=rf"seq_id {seq_id} is outside \[0, 8\)"):
            resolve(Batch.of([1], seq_id=[0, seq_id]))

    def test_what_does_not_fit_the_model(self) -> None:
        Batch.of([9]).check_model(n_vocab=10)
        Batch.of_embeddings([[1.0, 2.0]]).check_model(n_vocab=10, n_embd=2)
        with pytest.raises(BatchError, match="token 10 is outside the vocabulary of 10"):
            Batch.of([3, 10]).check_model(n_vocab=10)
        with pytest.raises(BatchError, match="2 values, not 3"):
            Batch.of_embeddings([[1.0, 2.0]]).check_model(n_embd=3)
