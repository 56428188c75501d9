"""A cache of several parts: what is asked of whom, and that a verb is done by all or by none."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.cache.hybrid import HybridCache
from kvcellar.errors import (
    BatchError,
    CacheError,
    CacheFull,
    InvariantError,
    NotSupported,
    OptionError,
    PositionError,
    SequenceIdError,
    ShiftUnsupported,
)
from tests.cache.toy_parts import (
    BrokenStore,
    ToyStates,
    everything,
    group,
    hybrid,
    sliding,
    texts,
    unchanged,
)


def decode(cache: HybridCache, seq_id: int, n: int, n_ubatch: int = 4) -> None:
    """Decode n tokens of a sequence; each token is its position."""
    start = cache.seq_pos_max(seq_id) + 1
    batch = Batch.of(range(start, start + n), seq_id)
    with cache.place(batch, n_ubatch) as placement:
        for plan in placement.plans():
            assert len(plan.groups) == len(cache.groups)
            assert (plan.states is None) == (cache.states is None)


def count(n: int) -> list[tuple[int, int]]:
    return [(i, i) for i in range(n)]


def toy(cache: HybridCache) -> ToyStates:
    assert isinstance(cache.states, ToyStates)
    return cache.states


class TestQuestions:
    def test_the_widest_group_answers(self) -> None:
        cache = hybrid(group(24), group(8, window=4))
        decode(cache, 1, 6)
        assert cache.spec is cache.groups[0].spec
        assert (cache.used, cache.token_count, cache.n_free()) == (6, 6, 18)
        assert cache.seq_tokens(1).tolist() == cache.seq_positions(1).tolist() == list(range(6))
        assert (cache.seq_count(1), cache.seq_count(0)) == (6, 0)
        assert cache.view().n_cells == 24
        assert cache.parts == (*cache.groups, cache.states)
        assert cache.has_states

    def test_without_a_group_the_states_answer(self) -> None:
        cache = HybridCache([], ToyStates())
        decode(cache, 0, 3)
        assert cache.seq_tokens(0).tolist() == [0, 1, 2]
        assert cache.seq_pos_min(0) == cache.seq_pos_max(0) == 2

    def test_a_sequence_reaches_from_where_all_parts_hold_it(self) -> None:
        cache = hybrid(states=False)
        assert (cache.seq_pos_min(0), cache.seq_pos_max(0)) == (-1, -1)
        decode(cache, 0, 6)
        cache.groups[1].seq_rm(0, 0, 3)
        assert (cache.seq_pos_min(0), cache.seq_pos_max(0)) == (3, 5)
        assert not cache.has_states

    def test_all_parts_must_be_able_to_shift(self) -> None:
        assert hybrid().can_shift
        assert not hybrid(group(), group(can_shift=False)).can_shift

    def test_there_is_at_least_one_part(self) -> None:
        with pytest.raises(OptionError, match="at least one part"):
            HybridCache([])

    def test_a_cache_of_one_piece_is_its_own_part(self) -> None:
        alone = group()
        assert alone.parts == (alone,)
        assert not alone.has_states

    def test_check_sees_parts_that_part(self) -> None:
        cache = hybrid()
        decode(cache, 2, 5)
        cache.check()
        cache.groups[1].seq_rm(2, 4, -1)
        with pytest.raises(InvariantError, match=r"end sequence 2 at different \[4, 3, 4\]"):
            cache.check()


class TestRemoving:
    def test_what_a_state_refuses_changes_no_group(self) -> None:
        cache = hybrid()
        decode(cache, 0, 8)
        for p0, p1 in ((2, 5), (0, 3), (5, -1), (7, 8)):
            with unchanged(cache):
                assert cache.seq_rm(0, p0, p1) is False

    def test_what_a_state_can_do_all_do(self) -> None:
        cache = hybrid()
        decode(cache, 0, 5)
        decode(cache, 0, 3)
        assert cache.seq_rm(0, 5, -1)
        assert texts(cache, 0) == [count(5)] * 3
        decode(cache, 0, 1)
        assert cache.seq_rm(0)
        assert texts(cache, 0) == [[]] * 3

    def test_what_one_grants_and_the_next_refuses_is_taken_back(self) -> None:
        cache = hybrid(group(), group(window=4, stubborn=True))
        decode(cache, 0, 5)
        decode(cache, 0, 3)
        with unchanged(cache):
            assert cache.seq_rm(0, 5, -1) is False  # the states could, the window cannot
        assert not cache.in_transaction
        with unchanged(cache):
            assert cache.seq_rm(0, 6, -1) is False  # and the other way round
        decode(cache, 0, 1)
        decode(cache, 0, 1)
        assert cache.seq_rm(0, 9, -1)
        assert texts(cache, 0) == [count(9)] * 3

    def test_every_sequence_or_none(self) -> None:
        cache = hybrid()
        for seq, n in ((0, 4), (0, 2), (1, 6)):
            decode(cache, seq, n)
        with unchanged(cache):
            assert cache.seq_rm(-1, 4, -1) is False  # sequence 1 never ended at 4
        assert cache.seq_rm(-1)
        assert cache.used == 0

    def test_nothing_to_remove_is_no_refusal(self) -> None:
        cache = hybrid()
        decode(cache, 0, 4)
        with unchanged(cache):
            assert cache.seq_rm(0, 4, -1)
            assert cache.seq_rm(0, 2, 2)
            assert cache.seq_rm(3, 1, 2)

    def test_groups_alone_remove_from_the_middle(self) -> None:
        cache = hybrid(states=False)
        decode(cache, 0, 6)
        assert cache.seq_rm(0, 2, 4)
        cache.seq_add(0, 4, -1, -2)
        assert texts(cache, 0) == [[(0, 0), (1, 1), (4, 2), (5, 3)]] * 2

    def test_an_id_out_of_range_is_an_error(self) -> None:
        cache = hybrid(states=False)
        with unchanged(cache), pytest.raises(SequenceIdError):
            cache.seq_rm(4, 1, 2)


class TestRewinding:
    def test_it_ends_where_every_part_can(self) -> None:
        cache = hybrid(group(), group(window=4, stubborn=True))
        for n in (3, 2, 3, 2):  # a state can go back to 3, 5, 8
            decode(cache, 0, n)
        assert cache.rewind(0, 9) == 3  # 8 would do for the state, 6 for the window
        assert texts(cache, 0) == [count(3)] * 3
        assert cache.rewind(0, 2) == 0
        assert texts(cache, 0) == [[]] * 3

    def test_it_is_a_plain_cut_where_all_can(self) -> None:
        cache = hybrid(states=False)
        decode(cache, 0, 6)
        assert cache.rewind(0, 4) == 4
        assert cache.rewind(0, 9) == 4
        assert cache.rewind(0, -1) == 0
        assert cache.rewind(1, 3) == 0
        cache.check()

    def test_what_was_dropped_can_be_decoded_again(self) -> None:
        cache = hybrid()
        decode(cache, 0, 3)
        decode(cache, 0, 4)
        end = cache.rewind(0, 5)
        assert end == 3
        decode(cache, 0, 4)
        assert texts(cache, 0) == [count(7)] * 3


class TestCheckpoints:
    def test_every_part_that_slides_keeps_one(self) -> None:
        cache = hybrid(group(64), sliding(), states=False)
        for _ in range(3):
            decode(cache, 0, 1)
        assert cache.checkpoint(0)
        for _ in range(30):
            decode(cache, 0, 1)
        assert not cache.seq_rm(0, 4, -1)
        assert cache.rewind(0, 4) == 3
        assert texts(cache, 0) == [count(3)] * 2

    def test_there_may_be_nothing_to_keep(self) -> None:
        assert not hybrid(states=False).checkpoint(0)
        assert not hybrid(group(64), sliding(), states=False).checkpoint(0)


class TestSharing:
    def test_a_whole_sequence_is_shared_by_all(self) -> None:
        cache = hybrid()
        decode(cache, 0, 5)
        decode(cache, 1, 9)
        cache.seq_cp(0, 1, 0, 5)  # the same as (-1, -1): dst keeps nothing of its own
        assert texts(cache, 1) == [count(5)] * 3
        decode(cache, 1, 2)
        assert texts(cache, 0) == [count(5)] * 3
        cache.seq_cp(0, 0)
        cache.seq_keep(1)
        assert texts(cache, 0) == [[]] * 3
        assert texts(cache, 1) == [count(7)] * 3

    @pytest.mark.parametrize(("p0", "p1"), [(0, 3), (2, -1), (1, 4)])
    def test_a_state_has_no_parts_to_share(self, p0: int, p1: int) -> None:
        cache = hybrid()
        decode(cache, 0, 5)
        with unchanged(cache), pytest.raises(NotSupported, match="rewind the copy"):
            cache.seq_cp(0, 1, p0, p1)

    def test_a_prefix_is_shared_as_long_as_nothing_slid(self) -> None:
        cache = hybrid(states=False)
        decode(cache, 0, 5)
        cache.seq_cp(0, 1, 0, 3)
        assert texts(cache, 1) == [count(3)] * 2
        cache.groups[1].seq_rm(0, 0, 1)
        with unchanged(cache), pytest.raises(NotSupported, match="copy all of it"):
            cache.seq_cp(0, 2, 0, 3)


class TestMoving:
    def test_the_whole_moves_in_every_part(self) -> None:
        cache = hybrid()
        decode(cache, 0, 4)
        cache.seq_add(0, 0, -1, 3)
        assert texts(cache, 0) == [[(i, i + 3) for i in range(4)]] * 3
        cache.update()
        cache.seq_div(0, 0, -1, 2)
        assert [cache.seq_pos_max(0)] == [3]
        cache.check()

    def test_an_error_of_the_last_part_undoes_the_first(self) -> None:
        cache = hybrid(group(can_shift=False), group(window=4))
        decode(cache, 0, 4)
        with unchanged(cache), pytest.raises(ShiftUnsupported):
            cache.seq_add(0, 0, -1, 2)
        with unchanged(cache), pytest.raises(ShiftUnsupported):
            cache.seq_div(0, 0, -1, 2)
        with unchanged(cache), pytest.raises(OptionError, match="divisor"):
            cache.seq_div(0, 0, -1, 0)
        assert not cache.in_transaction

    def test_no_room_for_copies_in_one_part_undoes_the_others(self) -> None:
        cache = hybrid(group(8), group(24, window=4), states=False)
        decode(cache, 0, 5)
        cache.seq_cp(0, 1)
        with unchanged(cache), pytest.raises(CacheFull):
            cache.seq_add(1, 0, -1, 2)

    def test_parts_that_would_end_apart_do_not_move(self) -> None:
        cache = hybrid()
        decode(cache, 0, 6)
        with unchanged(cache), pytest.raises(NotSupported, match="up to the end"):
            cache.seq_add(0, 2, 4, 10)

    def test_a_state_forgets_no_token_below_zero(self) -> None:
        cache = hybrid()
        decode(cache, 0, 6)
        with unchanged(cache), pytest.raises(NotSupported, match="below 0"):
            cache.seq_add(0, 0, -1, -2)
        cache.seq_add(0, 0, -1, -6)  # all of it: the sequence is gone
        assert texts(cache, 0) == [[]] * 3


class TestPlacing:
    def test_states_want_equally_many_tokens_of_each(self) -> None:
        batch = Batch()
        for seq, n in ((0, 5), (1, 2)):
            for i in range(n):
                batch.add(i, seq_ids=seq)
        with hybrid().place(batch, 4) as placement:
            sizes = [plan.n_tokens for plan in placement.plans()]
        assert sizes == [4, 3]
        with hybrid(states=False).place(batch, 4) as placement:
            assert [plan.micro.rows.tolist() for plan in placement.plans()] == [
                [0, 1, 2, 3],
                [4, 5, 6],
            ]

    def test_each_group_has_its_mask(self) -> None:
        cache = hybrid(states=False)
        decode(cache, 0, 5)
        with cache.place(Batch.of([9]), 4) as placement:
            (plan,) = placement.plans(lists=(False, True))
            full, window = plan.groups
            assert np.flatnonzero(full.mask[0] == 0).tolist() == [0, 1, 2, 3, 4, 5]
            assert window.lists is not None
            assert window.lists.of(0).tolist() == [2, 3, 4, 5]

    def test_released_is_as_before(self) -> None:
        cache = hybrid()
        decode(cache, 0, 3)
        with unchanged(cache):
            placement = cache.place(Batch.of(range(6)), 4)
            with pytest.raises(CacheError, match="being decoded"):
                cache.seq_rm(0)
            with pytest.raises(CacheError, match="being decoded"):
                cache.transaction()
            next(placement.plans())
            placement.release()

    @pytest.mark.parametrize("sizes", [(6, 24), (24, 6)])
    def test_a_full_part_takes_nothing_in_the_others(self, sizes: tuple[int, int]) -> None:
        cache = hybrid(group(sizes[0]), group(sizes[1], window=4))
        decode(cache, 0, 4)
        with unchanged(cache), pytest.raises(CacheFull, match="3 cells needed, 2 free"):
            cache.place(Batch.of(range(3)), 4)

    def test_a_part_that_fails_late_gives_back_what_others_took(self) -> None:
        cache = hybrid()
        decode(cache, 0, 4)
        toy(cache).broken = "take"
        with unchanged(cache), pytest.raises(CacheError, match="take is broken"):
            cache.place(Batch.of(range(3)), 4)
        toy(cache).broken = ""
        decode(cache, 0, 3)
        assert texts(cache, 0) == [count(7)] * 3

    def test_a_gap_in_a_recurrent_sequence_is_refused(self) -> None:
        cache = hybrid()
        decode(cache, 0, 4)
        with unchanged(cache), pytest.raises(PositionError, match="follow on"):
            cache.place(Batch.of([1], positions=[7]), 4)

    def test_a_bad_batch_is_refused(self) -> None:
        cache = hybrid()
        with unchanged(cache), pytest.raises(BatchError, match="vocabulary of 4"):
            cache.place(Batch.of([4]), 4, n_vocab=4)
        with unchanged(cache), pytest.raises(OptionError, match="n_ubatch"):
            cache.place(Batch.of([1]), 0)


class TestTransactions:
    def test_all_parts_go_back(self) -> None:
        cache = hybrid()
        decode(cache, 0, 4)
        with unchanged(cache):
            with cache.transaction() as t:
                assert cache.in_transaction
                decode(cache, 0, 3)
                cache.seq_cp(0, 1)
                cache.seq_add(1, 0, -1, 4)
                cache.update()
                cache.seq_rm(0)
                t.rollback()
            assert not t.is_open
            t.rollback()

    def test_they_nest_and_an_outer_rollback_takes_inner_commits_back(self) -> None:
        cache = hybrid()
        with unchanged(cache), cache.transaction() as outer:
            decode(cache, 0, 2)
            with cache.transaction():
                decode(cache, 0, 2)
            inner = cache.transaction()
            decode(cache, 1, 2)
            with pytest.raises(CacheError, match="within this one"):
                outer.commit()
            outer.rollback()
            assert not inner.is_open

    def test_what_is_committed_stays(self) -> None:
        cache = hybrid()
        with cache.transaction() as t:
            decode(cache, 0, 2)
        assert texts(cache, 0) == [count(2)] * 3
        with pytest.raises(CacheError, match="committed already"):
            t.commit()
        with pytest.raises(CacheError, match="cannot be taken back"):
            t.rollback()

    def test_a_batch_that_is_decoded_is_released(self) -> None:
        cache = hybrid()
        with unchanged(cache):
            t = cache.transaction()
            held = cache.place(Batch.of(range(3)), 4)
            assert held.is_open
            with pytest.raises(CacheError, match="being decoded"):
                t.commit()
            t.rollback()

    def test_watchers_are_told_of_rollbacks_only(self) -> None:
        cache, told = hybrid(), list[str]()
        cache.watch(lambda: lambda: told.append("undone"))
        decode(cache, 0, 2)
        with cache.transaction():
            cache.seq_add(0, 0, -1, 1)
        with pytest.raises(NotSupported):
            cache.seq_add(0, 0, 2, 9)  # a transaction of its own, which is nobody's business
        assert told == []
        cache.transaction().rollback()
        assert told == ["undone"]

    def test_a_part_that_cannot_begin_leaves_none_open(self) -> None:
        cache = hybrid()
        toy(cache).broken = "transaction"
        with unchanged(cache), pytest.raises(CacheError, match="transaction is broken"):
            cache.transaction()
        assert not any(part.in_transaction for part in cache.parts)


class TestUpkeep:
    def test_clearing_empties_all(self) -> None:
        cache = hybrid()
        decode(cache, 0, 4)
        cache.clear()
        assert texts(cache, 0) == [[]] * 3

    def test_compaction_happens_in_every_group(self) -> None:
        cache = hybrid(states=False)
        for seq in (0, 1, 0, 1):
            decode(cache, seq, 2)
        cache.seq_rm(0)
        cache.defrag()
        cache.update()
        assert [part.cell_max() for part in cache.groups if hasattr(part, "cell_max")] == [4, 4]
        assert texts(cache, 1) == [count(4)] * 2

    def test_a_part_that_cannot_compact_spares_the_others(self) -> None:
        cache = hybrid(group(), group(window=4, can_copy=False), states=False)
        for seq in (0, 1):
            decode(cache, seq, 2)
        cache.seq_rm(0)
        with pytest.raises(NotSupported):
            cache.defrag()
        with unchanged(cache):
            cache.update()

    def test_resizing_is_for_the_groups_of_full_size(self) -> None:
        cache = hybrid(group(16), group(16, window=8), group(8, window=4))
        decode(cache, 0, 6)
        cache.resize(32)
        assert [part.spec.size for part in cache.groups] == [32, 32, 8]
        assert cache.spec.size == 32
        with unchanged(cache), pytest.raises(CacheFull):
            cache.resize(5)
        cache.resize(8)
        cache.resize(12)
        assert [part.spec.size for part in cache.groups] == [12, 12, 8]
        with cache.transaction(), pytest.raises(CacheError, match="before resizing"):
            cache.resize(20)

    def test_a_part_that_cannot_be_resized_keeps_the_others(self) -> None:
        cache = hybrid(group(16), group(16, window=8), states=False)
        decode(cache, 0, 6)
        before = everything(cache)
        store = cache.groups[1].store
        assert isinstance(store, BrokenStore)
        store.broken = True
        with pytest.raises(MemoryError):
            cache.resize(32)
        assert everything(cache) == before
        assert [part.spec.size for part in cache.groups] == [16, 16]
