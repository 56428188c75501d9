"""The cache of states by example: sharing, removing, going back, positions."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.cache.base import CheckpointBudget, CheckpointPolicy
from kvcellar.cache.recurrent import state_rows
from kvcellar.errors import (
    NotSupported,
    OptionError,
    PositionError,
)
from kvcellar.types import MAX_POSITION, StateLayer, StateSpec
from tests.cache.states import (
    N_SEQ,
    cache_of,
    compute,
    everything,
    put,
    refused,
    row,
    state,
    store_of,
)


class TestStates:
    def test_an_empty_cache(self) -> None:
        cache = cache_of()
        assert (cache.used, cache.token_count, cache.n_free()) == (0, 0, 64)
        for seq in range(N_SEQ):
            assert (cache.seq_pos_min(seq), cache.seq_pos_max(seq)) == (-1, -1)
            assert (cache.seq_count(seq), cache.checkpoints(seq)) == (0, ())
            assert len(cache.seq_tokens(seq)) == len(cache.seq_positions(seq)) == 0
        assert cache.can_shift
        cache.check()

    def test_one_cell_a_sequence(self) -> None:
        cache = cache_of()
        put(cache, 1, 7, 8, 9)
        put(cache, 2, 5)
        assert (cache.used, cache.token_count, cache.n_free()) == (2, 2, 64)
        assert (cache.seq_pos_min(1), cache.seq_pos_max(1)) == (2, 2)
        assert cache.seq_count(1) == 3
        assert cache.seq_tokens(1).tolist() == [7, 8, 9]
        assert cache.seq_positions(1).tolist() == [0, 1, 2]
        assert state(cache, 1) == (7, 8, 9)

    def test_a_decode_never_writes_the_row_it_starts_from(self) -> None:
        cache = cache_of()
        put(cache, 0, 1)
        old = row(cache, 0)
        put(cache, 0, 2)
        assert row(cache, 0) != old
        assert store_of(cache).text(old) == (1,)

    def test_later_microbatches_go_on_in_place(self) -> None:
        cache = cache_of()
        put(cache, 0, 1)
        with cache.place(Batch.of([2, 3, 4, 5, 6], 0), 2) as placement:
            states = [plan.states for plan in placement.plans()]
        first = states[0]
        assert first is not None
        assert first.sources.tolist() != first.targets.tolist()
        for one in states[1:]:
            assert one is not None
            assert one.sources.tolist() == one.targets.tolist() == first.targets.tolist()

    def test_a_sequence_without_a_state_reads_the_row_of_zeros(self) -> None:
        cache = cache_of()
        with cache.place(Batch.of([1], 0), 1) as placement:
            (plan,) = placement.plans()
        assert plan.states is not None
        assert plan.states.sources.tolist() == [cache.store.spec.n_rows]

    def test_embeddings_are_absorbed_too(self) -> None:
        cache = cache_of()
        compute(cache, Batch.of_embeddings(np.ones((2, 3), np.float32), 0))
        put(cache, 0, 5)
        assert cache.seq_tokens(0).tolist() == [-1, -1, 5]

    def test_what_is_handed_out_is_a_copy(self) -> None:
        cache = cache_of()
        put(cache, 0, 1, 2)
        cache.seq_tokens(0)[:] = 9
        cache.seq_positions(0)[:] = 9
        assert cache.seq_tokens(0).tolist() == [1, 2]
        assert cache.seq_positions(0).tolist() == [0, 1]

    def test_the_view_shows_rows_with_their_owners(self) -> None:
        cache = cache_of()
        put(cache, 0, 1, 2)
        cache.seq_cp(0, 3)
        put(cache, 1, 5)
        view = cache.view()
        assert (view.used_cells, view.token_count) == (2, 3)

    def test_a_text_may_start_anywhere(self) -> None:
        cache = cache_of()
        put(cache, 0, 1, 2, at=10)
        assert cache.seq_positions(0).tolist() == [10, 11]
        put(cache, 0, 3)
        assert cache.seq_pos_max(0) == 12


class TestSharing:
    def test_a_copy_shares_until_one_of_them_decodes(self) -> None:
        cache = cache_of()
        put(cache, 0, 1, 2)
        cache.seq_cp(0, 1)
        assert row(cache, 0) == row(cache, 1)
        assert (cache.used, cache.token_count) == (1, 2)
        put(cache, 1, 3)
        assert (state(cache, 0), state(cache, 1)) == ((1, 2), (1, 2, 3))
        assert cache.used == 2
        put(cache, 0, 4, 5)
        put(cache, 1, 6)
        for seq, tokens in ((0, (1, 2, 4, 5)), (1, (1, 2, 3, 6))):
            assert state(cache, seq) == tokens
            assert tuple(cache.seq_tokens(seq).tolist()) == tokens

    def test_the_range_is_ignored_and_the_old_state_is_let_go(self) -> None:
        cache = cache_of()
        put(cache, 0, 1, 2)
        put(cache, 1, 7, 8, 9)
        cache.seq_cp(0, 1, 1, 2)
        assert state(cache, 1) == (1, 2)
        assert cache.used == 1
        cache.seq_cp(3, 1)  # of nothing
        assert cache.seq_count(1) == 0

    def test_those_that_share_may_be_decoded_together(self) -> None:
        cache = cache_of()
        put(cache, 0, 1)
        cache.seq_cp(0, 1)
        put(cache, [0, 1], 2, 3)
        assert state(cache, 0) == state(cache, 1) == (1, 2, 3)
        assert cache.used == 1

    def test_those_that_share_may_part_within_a_batch(self) -> None:
        cache = cache_of()
        batch = Batch().add(1, 0, [0, 1]).add(2, 1, 0).add(3, 1, 1)
        compute(cache, batch)
        assert (state(cache, 0), state(cache, 1)) == ((1, 2), (1, 3))
        assert cache.used == 2

    def test_only_one_is_kept(self) -> None:
        cache = cache_of()
        put(cache, 0, 1)
        put(cache, 1, 2)
        cache.seq_keep(1)
        assert (cache.seq_count(0), state(cache, 1)) == (0, (2,))
        cache.seq_keep(3)
        assert cache.used == 0

    def test_positions_of_one_are_not_those_of_who_shares(self) -> None:
        cache = cache_of()
        put(cache, 0, 1, 2)
        cache.seq_cp(0, 1)
        cache.seq_add(1, -1, -1, 5)
        assert (cache.seq_pos_max(0), cache.seq_pos_max(1)) == (1, 6)
        assert row(cache, 0) == row(cache, 1)
        put(cache, 1, 3, at=7)
        assert state(cache, 1) == (1, 2, 3)


class TestRemoving:
    @pytest.mark.parametrize("n_kept", [0, 4])
    @pytest.mark.parametrize(("p0", "p1"), [(1, 2), (0, 2), (2, 3), (1, 1), (2, 4)])
    def test_a_part_cannot_go(self, n_kept: int, p0: int, p1: int) -> None:
        cache = cache_of(n_kept)
        put(cache, 0, 1, 2, 3, 4)
        before = everything(cache)
        assert not cache.seq_rm(0, p0, p1)
        assert everything(cache) == before

    @pytest.mark.parametrize(("p0", "p1"), [(4, -1), (9, 12), (-1, 0)])
    def test_a_range_beside_it_is_nothing(self, p0: int, p1: int) -> None:
        cache = cache_of()
        put(cache, 0, 1, 2, 3, 4)
        assert cache.seq_rm(0, p0, p1)
        assert state(cache, 0) == (1, 2, 3, 4)

    @pytest.mark.parametrize(("p0", "p1"), [(-1, -1), (0, -1), (0, 4), (-1, 9)])
    def test_all_of_it_goes(self, p0: int, p1: int) -> None:
        cache = cache_of()
        put(cache, 0, 1, 2, 3, 4)
        assert cache.seq_rm(0, p0, p1)
        assert (cache.seq_count(0), cache.used) == (0, 0)

    def test_the_end_goes_where_a_state_was_kept(self) -> None:
        cache = cache_of(4)
        put(cache, 0, 1, 2)
        put(cache, 0, 3, 4, 5)
        assert cache.checkpoints(0) == (1, 4)
        assert cache.seq_rm(0, 2, -1)
        assert state(cache, 0) == (1, 2)
        assert cache.seq_tokens(0).tolist() == [1, 2]
        assert cache.checkpoints(0) == (1,)
        put(cache, 0, 9)
        assert state(cache, 0) == (1, 2, 9)

    def test_the_middle_stays_also_behind_a_state_that_was_kept(self) -> None:
        cache = cache_of(4)
        put(cache, 0, 1, 2)
        put(cache, 0, 3, 4, 5)
        before = everything(cache)
        assert not cache.seq_rm(0, 2, 4)
        assert not cache.seq_rm(0, 3, -1)
        assert everything(cache) == before

    def test_every_sequence_or_none(self) -> None:
        cache = cache_of(4)
        put(cache, 0, 1, 2)
        put(cache, 0, 3, 4)
        put(cache, 1, 1, 2, 3)
        before = everything(cache)
        assert not cache.seq_rm(-1, 2, -1)  # sequence 1 cannot
        assert everything(cache) == before
        put(cache, 1, 4)
        assert cache.seq_rm(1, 3, -1)
        assert cache.seq_rm(1, -1, -1)
        assert cache.seq_rm(-1, 2, -1)
        assert state(cache, 0) == (1, 2)


class TestGoingBack:
    def test_as_far_as_it_has_to(self) -> None:
        cache = cache_of(4)
        put(cache, 0, 1, 2)
        put(cache, 0, 3, 4, 5)
        assert cache.rewind(0, 9) == 5  # nothing to drop
        assert cache.rewind(0, 4) == 2
        assert state(cache, 0) == (1, 2)
        assert cache.rewind(0, 1) == 0
        assert cache.seq_count(0) == 0
        assert cache.rewind(0, 3) == 0

    def test_to_exactly_where_a_state_was_kept(self) -> None:
        cache = cache_of(4)
        put(cache, 0, 1, 2)
        put(cache, 0, 3, 4)
        assert cache.rewind(0, 2) == 2
        assert state(cache, 0) == (1, 2)

    def test_without_a_budget_to_the_start(self) -> None:
        cache = cache_of(0)
        put(cache, 0, 1, 2)
        put(cache, 0, 3, 4)
        assert not cache.checkpoint(0)
        assert cache.checkpoints(0) == ()
        assert cache.rewind(0, 3) == 0

    def test_a_copy_can_go_back_as_well(self) -> None:
        cache = cache_of(4)
        put(cache, 0, 1, 2)
        cache.seq_cp(0, 1)
        put(cache, 1, 3, 4)
        cache.seq_rm(0)
        assert cache.rewind(1, 3) == 2
        assert state(cache, 1) == (1, 2)

    def test_single_tokens_are_kept_now_and_then(self) -> None:
        cache = cache_of(9, every=4)
        for token in range(11):
            put(cache, 0, token)
        assert cache.checkpoints(0) == (3, 7)

    def test_one_can_be_asked_for(self) -> None:
        cache = cache_of(2)
        assert not cache.checkpoint(0)  # nothing to keep
        put(cache, 0, 1)
        assert cache.checkpoint(0)
        assert cache.checkpoint(0)  # there already
        assert cache.checkpoints(0) == (0,)
        put(cache, 0, 2)
        assert cache.seq_rm(0, 1, -1)
        assert state(cache, 0) == (1,)

    def test_the_oldest_goes_first(self) -> None:
        cache = cache_of(2)
        for token in range(4):
            put(cache, 0, token)
            cache.checkpoint(0)
        assert cache.checkpoints(0) == (2, 3)

    def test_bytes_are_a_limit_too(self) -> None:
        spec = StateSpec(9, 1, (StateLayer(2, 8),))  # 40 bytes a state
        for n_bytes, limit in ((39, 0), (40, 1), (99, 2), (4000, 8)):
            policy = CheckpointPolicy(CheckpointBudget(8, n_bytes))
            assert policy.limit(spec.row_bytes) == limit

    def test_they_move_with_the_text(self) -> None:
        cache = cache_of(4)
        put(cache, 0, 1, 2)
        put(cache, 0, 3, 4)
        cache.seq_add(0, -1, -1, 10)
        assert cache.checkpoints(0) == (11, 13)
        assert cache.seq_rm(0, 12, -1)
        assert cache.seq_positions(0).tolist() == [10, 11]


class TestPositions:
    def test_only_recorded_ones_change(self) -> None:
        cache = cache_of()
        put(cache, 0, 1, 2, 3, 4)
        cache.seq_add(0, 2, -1, 3)
        assert cache.seq_positions(0).tolist() == [0, 1, 5, 6]
        cache.seq_div(0, 5, -1, 2)
        assert cache.seq_positions(0).tolist() == [0, 1, 2, 3]
        assert state(cache, 0) == (1, 2, 3, 4)

    def test_what_falls_below_0_as_a_whole_is_gone(self) -> None:
        cache = cache_of()
        put(cache, 0, 1, 2)
        cache.seq_add(0, -1, -1, -5)
        assert (cache.seq_count(0), cache.used) == (0, 0)

    def test_refusals(self) -> None:
        cache = cache_of()
        put(cache, 0, 1, 2, 3)
        refused(cache, NotSupported, "below 0", lambda: cache.seq_add(0, -1, -1, -1))
        refused(cache, PositionError, "order", lambda: cache.seq_add(0, 2, -1, -2))
        refused(cache, PositionError, "order", lambda: cache.seq_add(0, 0, 1, 7))
        refused(cache, PositionError, "below", lambda: cache.seq_add(0, -1, -1, MAX_POSITION))
        refused(cache, OptionError, "divisor", lambda: cache.seq_div(0, -1, -1, 0))
        cache.seq_div(0, -1, -1, 10**12)
        assert cache.seq_positions(0).tolist() == [0, 0, 0]


class TestTidying:
    def test_clearing_zeroes_the_rows_or_not(self) -> None:
        cache = cache_of(2)
        put(cache, 0, 1, 2)
        old = row(cache, 0)
        cache.clear(data=False)
        assert (cache.used, store_of(cache).text(old)) == (0, (1, 2))
        put(cache, 0, 5)
        assert state(cache, 0) == (5,)
        cache.clear()
        assert all(store_of(cache).text(number) == () for number in range(state_rows(N_SEQ, 2)))

    def test_nothing_is_ever_pending(self) -> None:
        cache = cache_of()
        put(cache, 0, 1)
        before = everything(cache)
        cache.defrag()
        cache.defrag(1)
        cache.update()
        assert everything(cache) == before

    def test_resizing_changes_what_the_context_is_for(self) -> None:
        cache = cache_of()
        put(cache, 0, *range(9))
        cache.resize(4)
        assert (cache.spec.size, cache.n_free()) == (4, 4)
        assert state(cache, 0) == tuple(range(9))
        refused(cache, OptionError, "size=0", lambda: cache.resize(0))
