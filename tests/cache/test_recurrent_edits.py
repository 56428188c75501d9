"""Edits of a recurrent cache: faults that were reported of others, as operations."""

from __future__ import annotations

import pytest

from kvcellar.batch import Batch
from kvcellar.errors import SequenceIdError
from tests.cache.states import cache_of, compute, everything, put, row, state


@pytest.mark.report("llamAmpere#8")
def test_removing_everything_leaves_no_tails() -> None:
    """llamAmpere#8: cells were cleared, per-sequence tails stayed; the next decode asserted."""
    cache = cache_of()
    put(cache, 0, 1, 2, 3)
    assert cache.seq_rm(-1, -1, -1)
    cache.check()
    put(cache, 0, 4, 5)
    assert state(cache, 0) == (4, 5)


@pytest.mark.report("llama.cpp#9170")
def test_a_refused_removal_does_not_hurt_who_comes_next() -> None:
    """#9170: after a refused partial removal, another request on the slot met an assertion."""
    cache = cache_of()
    put(cache, 0, *range(8))
    before = everything(cache)
    assert not cache.seq_rm(0, 4, -1)
    assert everything(cache) == before
    assert cache.seq_rm(0)
    put(cache, 0, 70, 71)
    assert state(cache, 0) == (70, 71)


@pytest.mark.report("llama.cpp#12695")
def test_a_decode_follows_a_removal() -> None:
    """#12695: ``empty_cell.is_empty()`` failed in the decode behind a removal."""
    cache = cache_of()
    for seq in range(3):
        put(cache, seq, seq, seq + 10)
    assert cache.seq_rm(1)
    put(cache, 1, 5)
    put(cache, 2, 6)
    assert [state(cache, seq) for seq in range(3)] == [(0, 10), (5,), (2, 12, 6)]


def test_copying_a_sequence_onto_itself_keeps_it() -> None:
    """Own finding: ``seq_cp(s, s)`` erased the sequence."""
    cache = cache_of(2)
    put(cache, 1, 0, 1, 2)
    before = everything(cache)
    cache.seq_cp(1, 1)
    assert everything(cache) == before


def test_a_negative_id_owns_nothing() -> None:
    """Own finding: ``seq_cp(0, -1)`` stored the id, and the cells were never freed again."""
    cache = cache_of()
    put(cache, 0, 1, 2)
    with pytest.raises(SequenceIdError):
        cache.seq_cp(0, -1)
    assert cache.seq_rm(0)
    assert cache.used == 0


@pytest.mark.report("llama.cpp#13660")
def test_positions_left_open_follow_each_sequence() -> None:
    """#13660: automatic positions used the maximum of all sequences."""
    cache = cache_of()
    put(cache, 1, *range(10))
    put(cache, 0, 5)
    assert cache.seq_positions(0).tolist() == [0]


@pytest.mark.report("llama.cpp#4170")
def test_clearing_resets_every_count() -> None:
    """#4170: ``clear`` forgot the used counter."""
    cache = cache_of(4)
    put(cache, 0, 1, 2)
    cache.seq_cp(0, 1)
    cache.clear()
    assert (cache.used, cache.token_count, cache.seq_pos_max(0), cache.checkpoints(1)) == (
        *(0, 0, -1),
        (),
    )
    cache.check()


@pytest.mark.report("llama.cpp#23280")
def test_backing_off_one_token() -> None:
    """#23280: the same prompt twice aborted, as its last token could not be taken back alone."""
    cache = cache_of()
    put(cache, 0, *range(491))
    assert not cache.seq_rm(0, 490, -1)
    assert cache.rewind(0, 490) == 0
    put(cache, 0, *range(491))
    assert state(cache, 0) == tuple(range(491))


@pytest.mark.report("llama.cpp#26695")
def test_a_whole_batch_is_taken_back_with_its_state() -> None:
    """#26695: removing the last batch returned True, and the state was not restored."""
    cache = cache_of(4)
    put(cache, 0, *range(10))
    put(cache, 0, 10, 11, 12)
    assert cache.seq_rm(0, 10, -1)
    assert state(cache, 0) == tuple(range(10))
    put(cache, 0, 90)
    assert state(cache, 0) == (*range(10), 90)


@pytest.mark.report("llama.cpp#28019")
def test_going_back_does_not_touch_other_sequences() -> None:
    """#28019: several sequences and a rollback corrupted states."""
    cache = cache_of(8)
    for seq in range(3):
        put(cache, seq, seq * 10, seq * 10 + 1)
    compute(cache, Batch().add(5, 2, 0).add(5, 2, 1).add(5, 2, 2).add(6, 3, 1).add(6, 3, 0))
    assert cache.seq_rm(1, 2, -1)
    assert [state(cache, seq) for seq in range(3)] == [(0, 1, 5, 6), (10, 11), (20, 21, 5)]


@pytest.mark.report("ik_llama.cpp#2260")
def test_sequences_that_take_turns_use_their_own_rows() -> None:
    """ik_llama.cpp#2260: a graph was used again with another sequence's state."""
    cache = cache_of()
    for token in range(5):
        put(cache, 0, token)
        put(cache, 1, 100 + token)
        assert row(cache, 0) != row(cache, 1)
    assert state(cache, 0) == tuple(range(5))
    assert state(cache, 1) == tuple(range(100, 105))


@pytest.mark.report("ik_llama.cpp#1696")
def test_a_removed_sequence_starts_from_zeros_again() -> None:
    """ik_llama.cpp#1696: only metadata was cleared; the next request inherited the state."""
    cache = cache_of()
    put(cache, 0, 1, 2, 3)
    assert cache.seq_rm(0, 0, -1)
    put(cache, 0, 4)
    assert state(cache, 0) == (4,)


@pytest.mark.report("llama.cpp#16278")
def test_sequences_of_unequal_length_in_one_batch() -> None:
    """#16278: an assertion on the ids of a microbatch that several sequences shared."""
    cache = cache_of()
    batch = Batch()
    for at, seqs in enumerate([[0, 1, 2], [0, 2], [2], [2]]):
        for seq in seqs:
            batch.add(10 * seq + at, at, seq)
    compute(cache, batch, n_ubatch=4)
    assert state(cache, 0) == (0, 1)
    assert state(cache, 1) == (10,)
    assert state(cache, 2) == (20, 21, 22, 23)


@pytest.mark.report("llama.cpp#14625", "llama.cpp#21831")
def test_an_edit_costs_what_follows_the_newest_state_before_it() -> None:
    """#14625, #21831: any edit of the history cost the whole prompt."""
    cache = cache_of(8)
    for turn in range(4):
        put(cache, 0, *range(10 * turn, 10 * turn + 10))
    assert cache.rewind(0, 35) == 30
    assert state(cache, 0) == tuple(range(30))


@pytest.mark.report("llama.cpp#19041")
def test_nothing_is_removed_where_nothing_is_asked_for() -> None:
    """#19041: removing behind the end of a recurrent sequence is no partial removal."""
    cache = cache_of()
    put(cache, 0, 1, 2, 3)
    assert cache.seq_rm(0, 3, -1)
    assert state(cache, 0) == (1, 2, 3)
