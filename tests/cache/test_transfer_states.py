"""States exported and imported: who shares a row, and what checkpoints there is room for."""

from __future__ import annotations

import pytest

from kvcellar.cache.transfer import state_get, state_set
from kvcellar.errors import CacheFull
from tests.cache.kinds import check_texts, everything, put, recurrent, text_of


def test_shared_states_take_one_row() -> None:
    source = recurrent()
    put(source, 0, 3)
    for seq in (1, 2):
        source.seq_cp(0, seq)
    put(source, 2, 1)
    target = recurrent(like=source)
    content = state_get(source, [0, 1, 2], checkpoints=False)
    assert content.states is not None
    assert content.states.states.shape == (2, 1)
    state_set(target, content, [3, 0, 1])
    assert target.used == 2
    assert target.states.of[3] is target.states.of[0]
    assert target.checkpoints(1) == ()
    check_texts(target, {3: text_of(source, 0), 0: text_of(source, 0), 1: text_of(source, 2)})


def test_the_budget_keeps_the_latest_checkpoints() -> None:
    source = recurrent()
    for _ in range(4):
        put(source, 0, 2)
    assert source.checkpoints(0) == (1, 3, 5, 7)
    content = state_get(source, [0])
    for n_kept, ends in ((0, ()), (2, (5, 7)), (3, (3, 5, 7))):
        target = recurrent(n_kept, like=source)
        state_set(target, content, [1])
        assert target.checkpoints(1) == ends
        assert target.rewind(1, 6) == (0 if n_kept == 0 else 6)
        target.check()


def test_short_rows_take_checkpoints_first_and_then_the_place_of_states() -> None:
    source = recurrent()
    put(source, 0, 2)
    put(source, 0, 2)
    put(source, 1, 1)
    content = state_get(source, [0, 1])
    target = recurrent(like=source, n_rows=3)
    put(target, 3, 1)
    state_set(target, content, [0, 1])
    assert target.checkpoints(0) == (3,)  # the state itself is one: it needs no row of its own
    check_texts(target, {0: text_of(source, 0), 1: text_of(source, 1)})
    full = recurrent(like=source, n_rows=2)
    put(full, 3, 1)
    before = everything(full)
    with pytest.raises(CacheFull, match="2 cells needed, 1 free: all rows of states"):
        state_set(full, content, [0, 1])
    assert everything(full) == before


def test_within_a_transaction_rows_that_it_wants_back_are_not_filled() -> None:
    source = recurrent()
    put(source, 0, 2)
    target = recurrent(0, like=source, n_rows=2)
    put(target, 1, 1)
    before = everything(target)
    with target.transaction() as attempt:
        target.seq_rm(1)
        state_set(target, state_get(source, [0]), [1])
        target.seq_rm(1)
        state_set(target, state_get(source, [0]), [2])
        check_texts(target, {2: text_of(source, 0)})
        attempt.rollback()
    assert everything(target) == before


def test_a_piece_has_the_end_of_a_text_and_no_checkpoints() -> None:
    cache = recurrent()
    put(cache, 0, 3)
    put(cache, 0, 3)
    piece = state_get(cache, [0], 3)
    assert piece.states is not None
    assert piece.states.held[0] is not None
    assert piece.states.held[0].positions.tolist() == [3, 4, 5]
    assert piece.states.held[0].checkpoints == ()


def test_positions_with_a_gap_can_be_cut_in_it() -> None:
    cache = recurrent()
    put(cache, 0, 2)
    put(cache, 0, 2)
    cache.seq_add(0, 2, -1, 5)
    for end in (2, 4, 7):
        content = state_get(cache, [0], -1, end)
        assert content.span(0) == (0, 1)
