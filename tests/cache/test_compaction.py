"""The planner of moves against the loop, and compaction through the cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cache.compaction import fragmentation, plan_moves
from kvcellar.errors import NotSupported, OptionError
from kvcellar.testing.naive import naive_moves
from tests.cache.helpers import arrange, layout, make, snapshot


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 6) | st.none())
def test_equals_the_loop(occupied: list[bool], max_moves: int | None) -> None:
    moves = plan_moves(np.array(occupied, np.bool_), max_moves)

    pairs = list(zip(moves.src.tolist(), moves.dst.tolist(), strict=True))
    assert pairs == naive_moves(occupied, 99 if max_moves is None else max_moves)
    assert moves.n_runs <= (99 if max_moves is None else max_moves)
    assert all(dst < src for src, dst in pairs)
    assert not set(moves.src.tolist()) & set(moves.dst.tolist())


@given(st.lists(st.booleans(), max_size=40))
def test_without_a_limit_no_hole_is_left(occupied: list[bool]) -> None:
    moves = plan_moves(np.array(occupied, np.bool_))

    after = np.array(occupied, np.bool_)
    after[moves.src] = False
    after[moves.dst] = True

    assert after.sum() == sum(occupied)
    assert after[: sum(occupied)].all()


@pytest.mark.parametrize(
    ("before", "after", "n_runs"),
    [
        ("00..11..22..33..", "00331122........", 2),
        ("0.1.2.3.", "0312....", 2),
        ("000.....111", "000111.....", 1),
        ("....000", "000....", 1),
        ("000.", "000.", 0),
        ("....", "....", 0),
    ],
)
def test_the_reference_examples(before: str, after: str, n_runs: int) -> None:
    cache, _ = make(len(before))
    arrange(cache, before)
    assert plan_moves(cache.table.positions >= 0).n_runs == n_runs

    cache.defrag()
    cache.update()

    cache.check()
    assert layout(cache) == after
    assert cache.head == (cache.used if n_runs else 0)


def test_bytes_and_tokens_travel_with_their_cells() -> None:
    cache, store = make(16)
    arrange(cache, "00..11..22..33..")
    cache.seq_add(2, 1, -1, 5)
    want = {s: cache.table.tokens_of(s).tolist() for s in range(4)}

    cache.defrag()
    cache.update()

    for seq in range(4):
        cells = cache.table.cells_of(seq)
        positions = cache.table.positions[cells]
        assert cache.table.tokens_of(seq).tolist() == want[seq]
        assert store.rotation[cells].tolist() == positions.tolist()
        assert store.content[cells].tolist() == [1000 * seq, 1000 * seq + 1]


def test_a_limit_leaves_holes_that_the_next_passes_fill() -> None:
    cache, _ = make(20)
    arrange(cache, "0." * 10)
    pictures = []
    for _ in range(3):
        cache.defrag(max_moves=2)
        cache.update()
        pictures.append(layout(cache).rstrip("."))

    assert pictures == ["00000.0.0.0.0.0", "000000000.0", "0000000000"]


def test_a_request_is_served_once() -> None:
    cache, _ = make(4)
    arrange(cache, "0.1.")
    cache.defrag()
    assert layout(cache) == "0.1."
    cache.update()
    assert layout(cache) == "01.."
    cache.seq_rm(0)
    cache.update()
    assert layout(cache) == ".1.."


@pytest.mark.parametrize("max_moves", [0, -1])
def test_limits_below_one_are_refused(max_moves: int) -> None:
    cache, _ = make(4)
    with pytest.raises(OptionError, match=f"max_moves is {max_moves}"):
        cache.defrag(max_moves)
    with pytest.raises(OptionError, match=f"max_moves is {max_moves}"):
        plan_moves(np.zeros(3, np.bool_), max_moves)


def test_a_store_that_cannot_copy_refuses_at_once() -> None:
    cache, _ = make(4, can_copy=False)
    arrange(cache, "0.1.")
    before = snapshot(cache)
    with pytest.raises(NotSupported, match="defrag needs a store that can copy"):
        cache.defrag()
    cache.update()
    assert snapshot(cache) == before


def test_fragmentation_is_the_share_of_holes() -> None:
    assert fragmentation(200, 150) == 0.25
    assert fragmentation(200, 200) == 0.0
    assert fragmentation(127, 1) == 0.0
