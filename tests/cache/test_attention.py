"""The attention cache: shared cells, K rotation, refusals, and what stays unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.cache import AttentionCache, Cache
from kvcellar.errors import (
    BatchError,
    CacheFull,
    KVCellarError,
    NotSupported,
    OptionError,
    PositionError,
    SequenceIdError,
    ShiftUnsupported,
)
from kvcellar.testing.machine import attention_spec
from kvcellar.testing.stores import NullStore, SignatureStore
from kvcellar.types import MAX_POSITION
from tests.cache.helpers import arrange, layout, make, put, snapshot


def positions(cache: AttentionCache, seq: int) -> list[int]:
    """Positions of a sequence, ascending."""
    found: list[int] = cache.table.positions[cache.table.cells_of(seq)].tolist()
    return found


def contents(cache: AttentionCache, store: SignatureStore, seq: int) -> list[int]:
    """What the cells of a sequence hold, by position; K rows must stand where they should."""
    cells = cache.table.cells_of(seq)
    stands = cache.table.positions[cells] - cache.table.pending[cells]
    assert store.rotation[cells].tolist() == stands.tolist()
    held: list[int] = store.content[cells].tolist()
    return held


def test_it_is_a_cache() -> None:
    spec = attention_spec(4)
    cache: Cache = AttentionCache(spec, NullStore(spec))
    assert cache.spec is spec
    assert cache.can_shift


def test_an_unknown_way_to_treat_shared_cells_is_refused() -> None:
    spec = attention_spec(4)
    with pytest.raises(OptionError, match="on_shared='both'"):
        AttentionCache(spec, NullStore(spec), "both")  # type: ignore[arg-type]


class TestVerbs:
    def test_a_conversation(self) -> None:
        cache, _ = make(16)
        put(cache, 0, 4)
        cache.seq_cp(0, 1)
        put(cache, 0, 2)
        put(cache, 1, 3)

        assert layout(cache) == "++++00111......."
        assert (cache.used, cache.token_count, cache.cell_max()) == (9, 13, 9)
        assert (cache.seq_pos_min(1), cache.seq_pos_max(1)) == (0, 6)

        assert cache.seq_rm(0, 2, -1) is True
        assert layout(cache) == "++11..111......."
        assert cache.head == 4
        cache.seq_keep(1)
        assert layout(cache) == "1111..111......."
        cache.check()

    def test_clear_zeroes_the_store_unless_told_not_to(self) -> None:
        cache, store = make(4)
        put(cache, 0, 2)
        cache.clear(data=False)
        assert (store.content[:2] >= 0).all()
        put(cache, 0, 2)
        cache.clear()
        assert (store.content == -1).all()
        assert (cache.used, cache.head) == (0, 0)

    def test_clear_forgets_a_request_for_compaction(self) -> None:
        cache, _ = make(4)
        cache.defrag()
        cache.clear()
        arrange(cache, "..0.")
        cache.update()
        assert layout(cache) == "..0."


class TestRotation:
    def test_place_rotates_what_is_pending_first(self) -> None:
        cache, store = make(8)
        put(cache, 0, 4)
        cache.seq_rm(0, 0, 2)
        cache.seq_add(0, 2, -1, -2)
        assert store.rotations == 0

        put(cache, 0, 1)

        assert store.rotations == 1
        assert positions(cache, 0) == [0, 1, 2]
        assert store.rotation[cache.table.cells_of(0)].tolist() == [0, 1, 2]
        cache.update()
        assert store.rotations == 1

    def test_models_without_rope_only_change_positions(self) -> None:
        cache, store = make(8, rope=False, can_shift=False)
        put(cache, 0, 3)

        assert cache.can_shift
        cache.seq_add(0, 1, -1, 5)
        cache.update()

        assert positions(cache, 0) == [0, 6, 7]
        assert store.rotations == 0
        assert not cache.table.pending.any()
        cache.check()

    @pytest.mark.parametrize(
        "shift",
        [lambda c: c.seq_add(0, 1, -1, 5), lambda c: c.seq_div(0, -1, -1, 2)],
    )
    def test_a_store_that_cannot_rotate_refuses_at_once(
        self, shift: Callable[[AttentionCache], None]
    ) -> None:
        cache, _ = make(8, can_shift=False)
        put(cache, 0, 3)
        before = snapshot(cache)

        assert not cache.can_shift
        with pytest.raises(ShiftUnsupported, match="decode their tokens again"):
            shift(cache)

        assert snapshot(cache) == before
        put(cache, 0, 1)

    def test_nothing_to_rotate_is_nothing_to_refuse(self) -> None:
        cache, _ = make(8, can_shift=False)
        put(cache, 0, 3)

        cache.seq_add(0, 5, -1, 5)
        cache.seq_add(0, 0, -1, 0)
        cache.seq_add(1, 0, -1, 5)
        cache.seq_div(0, 0, 1, 2)
        cache.seq_div(0, 0, -1, 1)
        cache.seq_add(0, 0, 2, -2)

        cache.check()
        assert positions(cache, 0) == [2]


class TestSharedCells:
    def test_add_gives_the_moving_sequence_copies(self) -> None:
        cache, store = make(8)
        put(cache, 0, 4)
        cache.seq_cp(0, 1)

        cache.seq_add(1, 2, -1, 3)

        cache.check()
        assert layout(cache) == "++0011.."
        assert positions(cache, 0) == [0, 1, 2, 3]
        assert positions(cache, 1) == [0, 1, 5, 6]
        assert contents(cache, store, 0) == contents(cache, store, 1) == [0, 1, 2, 3]
        assert cache.table.tokens_of(1).tolist() == [100, 101, 102, 103]

    def test_div_copies_only_what_it_moves(self) -> None:
        cache, store = make(8)
        put(cache, 0, 3)
        cache.seq_cp(0, 1)

        cache.seq_div(1, -1, -1, 2)

        cache.check()
        assert layout(cache) == "+0011..."
        assert positions(cache, 0) == [0, 1, 2]
        assert positions(cache, 1) == [0, 0, 1]
        assert sorted(contents(cache, store, 1)) == [0, 1, 2]

    def test_cells_that_would_fall_below_zero_are_only_left(self) -> None:
        cache, _ = make(6)
        put(cache, 0, 4)
        cache.seq_cp(0, 1)

        cache.seq_add(1, -1, -1, -2)

        cache.check()
        assert layout(cache) == "000011"
        assert positions(cache, 1) == [0, 1]
        assert cache.head == 0

    def test_without_free_cells_it_fails_unchanged(self) -> None:
        cache, _ = make(5)
        put(cache, 0, 4)
        cache.seq_cp(0, 1)
        before = snapshot(cache)

        with pytest.raises(CacheFull, match="2 cells needed, 1 free"):
            cache.seq_add(1, 2, -1, 3)
        with pytest.raises(CacheFull, match="3 cells needed, 1 free"):
            cache.seq_div(1, 0, -1, 2)

        assert snapshot(cache) == before

    def test_a_store_that_cannot_copy_fails_unchanged(self) -> None:
        cache, _ = make(8, can_copy=False)
        put(cache, 0, 4)
        cache.seq_cp(0, 1)
        before = snapshot(cache)

        with pytest.raises(NotSupported, match="shared cells needs a store that can copy"):
            cache.seq_add(1, 2, -1, 3)

        assert snapshot(cache) == before
        cache.seq_rm(0)
        cache.seq_add(1, 2, -1, 3)
        assert positions(cache, 1) == [0, 1, 5, 6]

    def test_a_copy_that_fails_leaves_the_table_as_it_was(self) -> None:
        cache, store = make(8)
        put(cache, 0, 4)
        cache.seq_cp(0, 1)
        before = snapshot(cache)

        def fail(*_: object) -> NoReturn:
            raise MemoryError

        store.copy = fail  # type: ignore[assignment,method-assign]
        with pytest.raises(MemoryError):
            cache.seq_add(1, -1, -1, -2)

        assert snapshot(cache) == before

    def test_a_pending_shift_goes_along_with_the_copy(self) -> None:
        cache, store = make(8)
        put(cache, 0, 2)
        cache.seq_add(0, -1, -1, 10)
        cache.seq_cp(0, 1)

        cache.seq_add(1, -1, -1, 5)
        cache.update()

        cache.check()
        assert positions(cache, 1) == [15, 16]
        assert contents(cache, store, 1) == [0, 1]

    def test_move_takes_every_owner_along(self) -> None:
        cache, _ = make(8, on_shared="move")
        put(cache, 0, 4)
        cache.seq_cp(0, 1)

        cache.seq_add(1, 2, -1, 3)

        assert layout(cache) == "++++...."
        assert positions(cache, 0) == positions(cache, 1) == [0, 1, 5, 6]


class TestFailuresChangeNothing:
    @pytest.mark.parametrize(
        ("error", "call"),
        [
            (SequenceIdError, lambda c: c.seq_rm(4)),
            (SequenceIdError, lambda c: c.seq_rm(-2)),
            (SequenceIdError, lambda c: c.seq_cp(0, -1)),
            (SequenceIdError, lambda c: c.seq_cp(9, 0)),
            (SequenceIdError, lambda c: c.seq_keep(-1)),
            (SequenceIdError, lambda c: c.seq_add(-1, 0, -1, 1)),
            (SequenceIdError, lambda c: c.seq_div(4, 0, -1, 2)),
            (SequenceIdError, lambda c: c.seq_pos_max(4)),
            (SequenceIdError, lambda c: c.seq_pos_min(-1)),
            (OptionError, lambda c: c.seq_div(0, 0, -1, 0)),
            (OptionError, lambda c: c.place(Batch.of([1]), 0)),
            (PositionError, lambda c: c.seq_add(0, 0, -1, MAX_POSITION)),
            (PositionError, lambda c: c.place(Batch.of([1], positions=[1]), 1)),
            (PositionError, lambda c: c.place(Batch.of([1, 2], positions=[6, 5]), 1)),
            (SequenceIdError, lambda c: c.place(Batch.of([1], 4), 1)),
            (BatchError, lambda c: c.place(Batch(), 1)),
            (BatchError, lambda c: c.place(Batch.of([7]), 1, n_vocab=7)),
            (CacheFull, lambda c: c.place(Batch.of(range(5)), 2)),
        ],
    )
    def test_named_error(
        self, error: type[KVCellarError], call: Callable[[AttentionCache], object]
    ) -> None:
        cache, _ = make(8)
        arrange(cache, "0.1.0.1.")
        cache.seq_add(1, -1, -1, 3)
        cache.table.head = 5
        before = snapshot(cache)

        with pytest.raises(error):
            call(cache)

        assert snapshot(cache) == before
        assert cache.place(Batch.of(range(4)), 2).cells.tolist() == [5, 7, 1, 3]


def test_scattered_tokens_attend_to_the_right_cells() -> None:
    cache, _ = make(6)
    arrange(cache, "0.1.0.")

    with cache.place(Batch.of([1, 2], 1), 2) as placement:
        (plan,) = placement.plans()

    assert plan.cells.tolist() == [1, 3]
    assert not plan.is_contiguous
    assert np.isfinite(plan.mask).tolist() == [
        [False, True, True, False, False],
        [False, True, True, True, False],
    ]
