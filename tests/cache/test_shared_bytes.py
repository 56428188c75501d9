"""Copy-on-write with real rows: who moves gets a copy, who stays keeps every bit."""

from __future__ import annotations

from typing import NoReturn

import pytest

from kvcellar.errors import CacheFull
from kvcellar.testing.duel import snapshot as all_bytes
from kvcellar.testing.signs import Setup
from kvcellar.types import Int64Array
from tests.cache.stores import SETUPS, Signed, signed


def shared(it: Signed) -> None:
    """Sequences 1 and 2 share five tokens of sequence 0; 0 goes on alone."""
    it.put(0, 5)
    it.cache.seq_cp(0, 1, 0, 5)
    it.cache.seq_cp(0, 2, 0, 5)
    it.put(0, 2)


@pytest.mark.parametrize("setup", SETUPS)
def test_add_moves_a_copy_and_leaves_the_others_alone(setup: Setup) -> None:
    with signed(setup) as it:
        shared(it)
        rows = it.rows(0), it.rows(2)
        it.cache.seq_add(1, 2, -1, 6)
        it.update()
        assert (it.rows(0), it.rows(2)) == rows
        it.check(1, [0, 1, 2, 3, 4])
        assert it.cache.table.positions[it.cache.table.cells_of(1)].tolist() == [0, 1, 8, 9, 10]
        assert it.cache.used == 7 + 3


@pytest.mark.parametrize("setup", SETUPS)
def test_div_moves_a_copy_and_leaves_the_others_alone(setup: Setup) -> None:
    with signed(setup) as it:
        shared(it)
        rows = it.rows(0), it.rows(2)
        it.cache.seq_div(1, 0, -1, 2)
        it.update()
        assert (it.rows(0), it.rows(2)) == rows
        assert it.cache.table.positions[it.cache.table.cells_of(1)].tolist() == [0, 0, 1, 1, 2]
        assert it.cache.used == 7 + 4  # position 0 did not move
        assert it.cache.table.owners_of(0) == (0, 1, 2)


@pytest.mark.parametrize("setup", SETUPS)
def test_copies_are_made_of_rows_that_wait_to_be_rotated(setup: Setup) -> None:
    with signed(setup) as it:
        it.put(0, 4)
        it.cache.seq_add(0, 0, -1, 3)
        it.cache.seq_cp(0, 1)
        it.cache.seq_add(1, 0, -1, 2)
        it.update()
        it.check(0, [0, 1, 2, 3])
        it.check(1, [0, 1, 2, 3])
        assert it.cache.seq_pos_min(0) == 3
        assert it.cache.seq_pos_min(1) == 5


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("verb", ["seq_add", "seq_div"])
def test_without_room_for_the_copies_no_byte_changes(setup: Setup, verb: str) -> None:
    with signed(setup, 9) as it:
        shared(it)
        before = all_bytes(it.cache)
        move = it.cache.seq_add if verb == "seq_add" else it.cache.seq_div
        with pytest.raises(CacheFull, match="2 free"):
            move(1, 0, -1, 2)
        assert all_bytes(it.cache) == before


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("done", [False, True])
def test_a_copy_that_fails_changes_no_row_that_is_held(setup: Setup, done: bool) -> None:
    with signed(setup) as it:
        shared(it)
        before = all_bytes(it.cache, only_used=True)
        copy = it.store.copy

        def fail(src: Int64Array, dst: Int64Array) -> NoReturn:
            if done:
                copy(src, dst)
            raise MemoryError

        it.store.copy = fail  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            it.cache.seq_add(1, 0, -1, 4)
        with pytest.raises(MemoryError):
            it.cache.seq_add(1, 3, -1, -2)
        assert all_bytes(it.cache, only_used=True) == before
        it.store.copy = copy  # type: ignore[method-assign]
        it.cache.seq_add(1, 0, -1, 4)
        it.update()
        it.check(1, [0, 1, 2, 3, 4])
        it.check(0, [0, 1, 2, 3, 4, 5, 6], turns=0)
