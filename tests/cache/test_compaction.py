"""The planner of moves against the loop, and compaction through the cache."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cache import AttentionCache
from kvcellar.cache import rows as upkeep
from kvcellar.cache.rows import fragmentation, plan_moves
from kvcellar.errors import NotSupported, OptionError
from kvcellar.testing.duel import snapshot as all_bytes
from kvcellar.testing.machine import attention_spec
from kvcellar.testing.naive import naive_moves
from kvcellar.testing.signs import Setup
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import Int64Array
from tests.cache.helpers import arrange, layout, make, put, snapshot
from tests.cache.stores import SETUPS, signed


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
    with pytest.raises(OptionError, match=f"max_moves={max_moves}"):
        cache.defrag(max_moves)
    with pytest.raises(OptionError, match=f"max_moves={max_moves}"):
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


class TestFixedCells:
    @given(
        st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30),
        st.integers(1, 6) | st.none(),
    )
    def test_equals_the_loop(self, cells: list[tuple[bool, bool]], max_moves: int | None) -> None:
        occupied = [used for used, _ in cells]
        fixed = [stuck for _, stuck in cells]

        moves = plan_moves(np.array(occupied, np.bool_), max_moves, np.array(fixed, np.bool_))

        pairs = list(zip(moves.src.tolist(), moves.dst.tolist(), strict=True))
        stuck = [i for i, is_fixed in enumerate(fixed) if is_fixed]
        limit = 99 if max_moves is None else max_moves
        assert pairs == naive_moves(occupied, limit, stuck)
        assert not {cell for pair in pairs for cell in pair} & {*stuck}

    def test_the_others_close_up_around_them(self) -> None:
        picture = "0.#.0#0..0#"
        occupied = np.array([c == "0" for c in picture])
        moves = plan_moves(occupied, None, np.array([c == "#" for c in picture]))
        assert (moves.src.tolist(), moves.dst.tolist()) == ([9], [1])


class TestThreshold:
    def made(self, threshold: float | None) -> AttentionCache:
        spec = attention_spec(512)
        cache = AttentionCache(spec, SignatureStore(spec), defrag_threshold=threshold)
        arrange(cache, ("0" * 3 + ".") * 100 + "." * 112)
        return cache

    def test_an_update_compacts_when_more_holes_are_there_than_wanted(self) -> None:
        cache = self.made(0.2)
        cache.update()
        assert layout(cache) == "0" * 300 + "." * 212
        assert cache.head == 300

    @pytest.mark.parametrize("threshold", [None, 0.26, 0.9])
    def test_fewer_holes_are_left_alone(self, threshold: float | None) -> None:
        cache = self.made(threshold)
        before = layout(cache)
        cache.update()
        assert layout(cache) == before

    def test_it_comes_before_cells_are_searched(self) -> None:
        cache = self.made(0.2)
        assert put(cache, 1, 20) == list(range(300, 320))

    def test_passes_are_bounded_and_converge(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(upkeep, "AUTOMATIC_MOVES", 16)
        spec = attention_spec(300)
        cache = AttentionCache(spec, SignatureStore(spec), defrag_threshold=0.0)
        arrange(cache, "0." * 150)
        tops = []
        for _ in range(5):
            cache.update()
            cache.check()
            tops.append(cache.cell_max())
        assert tops == [267, 235, 203, 171, 150]

    def test_a_request_comes_first(self) -> None:
        cache = self.made(0.2)
        cache.defrag(max_moves=1)
        cache.update()
        assert cache.cell_max() > 300
        cache.update()
        assert cache.cell_max() == 300

    def test_small_caches_are_left_alone(self) -> None:
        spec = attention_spec(127)
        cache = AttentionCache(spec, SignatureStore(spec), defrag_threshold=0.0)
        arrange(cache, "." * 126 + "0")
        cache.update()
        assert cache.cell_max() == 127

    def test_cells_that_a_transaction_keeps_are_no_holes(self) -> None:
        cache = self.made(None)
        spec = attention_spec(512)
        cache = AttentionCache(spec, SignatureStore(spec), defrag_threshold=0.2)
        arrange(cache, "0" * 400 + "." * 112)
        with cache.transaction():
            cache.seq_rm(0, 100, 399)
            cache.update()
            assert cache.cell_max() == 400
        cache.update()
        assert cache.cell_max() == 101

    @pytest.mark.parametrize("threshold", [-0.1, 1.0, float("nan")])
    def test_other_values_are_refused(self, threshold: float) -> None:
        with pytest.raises(OptionError, match="defrag_threshold="):
            self.made(threshold)

    def test_a_store_that_cannot_copy_is_refused(self) -> None:
        spec = attention_spec(8)
        store = SignatureStore(spec, can_copy=False)
        with pytest.raises(NotSupported, match="defrag_threshold needs a store that can copy"):
            AttentionCache(spec, store, defrag_threshold=0.1)


@pytest.mark.parametrize("setup", SETUPS)
def test_real_rows_travel_bit_for_bit(setup: Setup) -> None:
    with signed(setup) as it:
        for _ in range(3):
            it.put(0, 2)
            it.put(1, 2)
        it.cache.seq_rm(0, 1, 5)
        rows = it.rows(0), it.rows(1)
        it.cache.defrag()
        it.cache.update()
        assert it.cache.cell_max() == it.cache.used == 8
        assert (it.rows(0), it.rows(1)) == rows
        it.check(1, [1000, 1001, 1002, 1003, 1004, 1005])


@pytest.mark.parametrize("setup", SETUPS)
def test_a_copy_that_fails_leaves_rows_and_cells_and_can_be_repeated(setup: Setup) -> None:
    with signed(setup) as it:
        it.put(0, 6)
        it.cache.seq_rm(0, 1, 4)
        before = all_bytes(it.cache, only_used=True)
        copy = it.store.copy

        def fail(src: Int64Array, dst: Int64Array) -> NoReturn:
            copy(src, dst)
            raise MemoryError

        it.store.copy = fail  # type: ignore[method-assign]
        it.cache.defrag()
        with pytest.raises(MemoryError):
            it.cache.update()
        assert all_bytes(it.cache, only_used=True) == before
        it.store.copy = copy  # type: ignore[method-assign]
        it.cache.update()
        assert layout(it.cache) == "000............."
        it.check(0, [0, 4, 5])
