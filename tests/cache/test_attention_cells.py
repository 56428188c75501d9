"""Cells of an attention cache in use: no slot, compaction, shifts, counts.

Users of llama.cpp and its descendants reported these faults; none may occur here. What concerns K
and V bytes is in ``test_attention_rows.py``.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.cache.rows import fragmentation, plan_moves
from kvcellar.errors import (
    BatchError,
    CacheFull,
    PositionError,
    SequenceIdError,
    ShiftUnsupported,
)
from tests.cache.helpers import arrange, layout, make, put, snapshot

# -- no slot, context full


@pytest.mark.report("llama.cpp#4185")
def test_a_token_can_be_placed_while_a_cell_is_free_after_much_churn() -> None:
    """llama.cpp#4185: after hundreds of requests not even one token could be placed."""
    cache, _ = make(13)
    rng = np.random.default_rng(0)
    for _ in range(400):
        seq, n = int(rng.integers(4)), int(rng.integers(1, 6))
        if rng.random() < 0.4:
            cache.seq_rm(seq, int(rng.integers(-1, 4)), -1)
        free = 13 - cache.used
        if n <= free:
            put(cache, seq, n)
        else:
            before = snapshot(cache)
            with pytest.raises(CacheFull) as full:
                put(cache, seq, n)
            assert (full.value.needed, full.value.free) == (n, free)
            assert snapshot(cache) == before
    cache.check()


@pytest.mark.report("node-llama-cpp#190", "nobodywho#74")
def test_a_full_cache_is_a_documented_error_and_old_tokens_can_go() -> None:
    """node-llama-cpp#190, nobodywho#74: an error at the limit, cured by a new context only."""
    cache, _ = make(6)
    put(cache, 0, 6)

    with pytest.raises(CacheFull, match="remove sequences or use a larger n_ctx"):
        put(cache, 0, 1)
    cache.seq_rm(0, 1, 3)
    cache.seq_add(0, 3, -1, -2)
    put(cache, 0, 2)

    assert cache.used == 6
    assert cache.seq_pos_max(0) == 5


@pytest.mark.report("gpustack#1442")
def test_the_error_tells_how_much_room_there_is() -> None:
    """gpustack#1442: batches were halved 32, 16, …, 1, all in vain."""
    cache, _ = make(4)
    put(cache, 0, 4)
    with pytest.raises(CacheFull) as full:
        put(cache, 1, 32)
    assert (full.value.needed, full.value.free) == (32, 0)


@pytest.mark.report("ollama#7949", "ollama#8092", "llama.cpp#10873")
def test_fragmentation_never_keeps_a_batch_out() -> None:
    """ollama#7949, #8092, llama.cpp#10873: a fragmented cache refused batches that fit."""
    cache, _ = make(20)
    arrange(cache, "0." * 10)

    cells = put(cache, 1, 10)

    assert cells == list(range(1, 20, 2))
    assert layout(cache) == "01" * 10


@pytest.mark.report("ollama#7949")
def test_repeated_compaction_leaves_no_holes() -> None:
    """ollama#7949: a limit on moves left holes for good."""
    cache, _ = make(20)
    arrange(cache, "0." * 10)
    passes = 0
    while plan_moves(cache.table.positions >= 0).n_runs:
        cache.defrag(max_moves=2)
        cache.update()
        passes += 1
    assert passes == 3
    assert layout(cache).startswith("0" * 10 + ".")


@pytest.mark.report("llama.cpp#15445", "llama.cpp#18730")
def test_a_shared_token_that_cannot_be_is_refused_when_it_is_placed() -> None:
    """llama.cpp#15445, #18730: ids above the limit and coupled tokens failed deep inside."""
    cache, _ = make(8, n_seq_max=4)
    with pytest.raises(SequenceIdError, match=r"seq_id 4 is outside \[0, 4\)"):
        cache.place(Batch.of([1], seq_id=range(31)), 1)
    put(cache, 0, 1)
    with pytest.raises(BatchError, match=r"sequences \[0, 1, 2\], which do not hold the same"):
        put(cache, [0, 1, 2], 1, start=1)


@pytest.mark.report("llama.cpp#25566")
def test_cells_of_finished_requests_come_back() -> None:
    """llama.cpp#25566: used grew with every request."""
    cache, _ = make(8)
    for _ in range(20):
        put(cache, 0, 5)
        cache.seq_rm(0, 0, -1)
        assert cache.used == cache.token_count == 0


@pytest.mark.report("llama.cpp#25452", "llama.cpp#17118")
def test_a_failed_placement_leaves_tokens_and_cells_in_step() -> None:
    """llama.cpp#25452, #17118: the token list said one thing, the cells another."""
    cache, _ = make(6)
    put(cache, 0, 4)
    with pytest.raises(CacheFull):
        put(cache, 0, 3)
    assert cache.table.tokens_of(0).tolist() == [100, 101, 102, 103]
    assert cache.seq_pos_max(0) == 3


@pytest.mark.report("llama.cpp#12695", "llama.cpp#10873")
def test_a_batch_is_placed_whole_or_not_at_all() -> None:
    """llama.cpp#12695, #10873: a failure in a later microbatch left the earlier ones behind."""
    cache, _ = make(6)
    put(cache, 0, 2)
    before = snapshot(cache)
    with pytest.raises(CacheFull):
        put(cache, 0, 5, n_ubatch=2)
    assert snapshot(cache) == before


# -- defragmentation


@pytest.mark.report("llama.cpp#12253", "llama.cpp#12259")
def test_every_position_keeps_its_bytes_when_cells_move() -> None:
    """llama.cpp#12253, #12259: garbage, or a crash, after shift and defrag."""
    cache, store = make(16)
    for _ in range(3):
        put(cache, 0, 2)
        put(cache, 1, 2)
    cache.seq_rm(0, 0, 4)
    cache.seq_add(0, 4, -1, -4)
    cache.defrag()

    put(cache, 0, 1)

    cache.check()
    assert cache.cell_max() == cache.used == 9
    cells = cache.table.cells_of(0)
    assert store.content[cells].tolist() == [4, 5, 2]
    assert store.rotation[cells].tolist() == [0, 1, 2]


@pytest.mark.report("llama.cpp#14059")
def test_used_is_derived_from_the_cells() -> None:
    """llama.cpp#14059: a count kept apart was too large and the planner asserted."""
    cache, _ = make(8)
    arrange(cache, "0.0.0.0.")
    cache.seq_cp(0, 1)
    cache.seq_rm(0, 2, -1)
    cache.seq_add(1, -1, -1, -2)
    cache.check()
    moves = plan_moves(cache.table.positions >= 0)
    assert len(moves.src) == sum(moves.dst < cache.used)


@pytest.mark.report("llama.cpp#14189")
def test_compaction_does_not_wait_for_a_shift() -> None:
    """llama.cpp#14189: defrag ran only if a shift was pending."""
    cache, store = make(8)
    arrange(cache, "0...0...")
    cache.defrag()
    cache.update()
    assert layout(cache) == "00......"
    assert store.rotations == 0


@pytest.mark.report("llama.cpp#11707")
def test_padding_does_not_count_as_holes() -> None:
    """llama.cpp#11707: ten tokens padded to 256 cells looked fragmented."""
    assert fragmentation(10, 10) == 0.0
    assert fragmentation(256, 256) == 0.0


@pytest.mark.report("llama.cpp#3380", "llama.cpp#5735", "llama.cpp#6037")
def test_holes_are_filled_from_the_tail_only() -> None:
    """llama.cpp#3380, #5735, #6037: early planners moved what lay well already."""
    moves = plan_moves(np.array([c == "#" for c in "#" * 5 + "." * 50 + "##"]))
    assert (moves.src.tolist(), moves.dst.tolist(), moves.n_runs) == ([55, 56], [5, 6], 1)


# -- shifts


@pytest.mark.report("llama.cpp#3825")
def test_a_second_shift_adds_to_the_first() -> None:
    """llama.cpp#3825: the second shift overwrote the pending one."""
    cache, store = make(8)
    put(cache, 0, 4)
    cache.seq_add(0, 0, -1, 2)
    cache.seq_add(0, 0, -1, 3)
    assert cache.table.positions[:4].tolist() == [5, 6, 7, 8]
    assert cache.table.pending[:4].tolist() == [5, 5, 5, 5]
    cache.update()
    assert store.rotation[:4].tolist() == [5, 6, 7, 8]


@pytest.mark.report("llama.cpp#8862", "llama.cpp#8498", "koboldcpp#2037", "ollama#9433")
def test_a_cache_that_cannot_shift_says_so_at_once_and_once() -> None:
    """llama.cpp#8862, #8498, koboldcpp#2037, ollama#9433: aborts, or a warning a token, later."""
    cache, _ = make(8, can_shift=False)
    put(cache, 0, 3)
    before = snapshot(cache)
    with pytest.raises(ShiftUnsupported):
        cache.seq_add(0, 1, -1, -1)
    assert snapshot(cache) == before
    put(cache, 0, 1)


@pytest.mark.report("llama.cpp#4097", "llama.cpp#6002")
def test_many_small_shifts_equal_a_large_one() -> None:
    """llama.cpp#4097, #6002: coherence was lost after repeated shifts."""
    (one, one_store), (many, many_store) = make(8), make(8)
    for cache in (one, many):
        put(cache, 0, 3, start=10)
    one.seq_add(0, -1, -1, -6)
    for _ in range(6):
        many.seq_add(0, -1, -1, -1)
        many.update()
    one.update()
    assert snapshot(one) == snapshot(many)
    assert one_store.rotation.tolist() == many_store.rotation.tolist()


def test_div_records_new_minus_old() -> None:
    """A public note: a newer version records the pending shift of div with the wrong sign."""
    cache, _ = make(8)
    put(cache, 0, 3, start=5)
    cache.seq_div(0, 0, -1, 2)
    assert cache.table.positions[:3].tolist() == [2, 3, 3]
    assert cache.table.pending[:3].tolist() == [-3, -3, -4]


# -- corner cases of the verbs, counts, view


@pytest.mark.report("llama.cpp#13660")
def test_positions_are_filled_in_per_sequence() -> None:
    """llama.cpp#13660: automatic positions used the maximum over all sequences."""
    cache, _ = make(16)
    put(cache, 1, 10)
    put(cache, 0, 1)
    assert cache.seq_pos_max(0) == 0


@pytest.mark.report("llama.cpp#25449")
def test_positions_that_go_back_within_a_batch_are_refused() -> None:
    """llama.cpp#25449: a batch at positions 5, 4 was accepted."""
    cache, _ = make(8)
    with pytest.raises(PositionError, match=r"position 4, .* already reaches 5"):
        cache.place(Batch.of([1, 2], positions=[5, 4]), 8)


def test_positions_that_are_held_already_are_refused() -> None:
    """Batches that repeated a position passed, and corrupted the sequence in silence."""
    cache, _ = make(8)
    put(cache, 0, 3)
    with pytest.raises(PositionError, match=r"position 2, .* already reaches 2"):
        put(cache, 0, 1, start=2)


@pytest.mark.report("llama.cpp#4113")
def test_what_a_token_may_read_does_not_depend_on_its_cell() -> None:
    """llama.cpp#4113: the completion depended on the cell index."""
    cache, _ = make(8)
    arrange(cache, "...1....")
    cache.table.head = 2
    with cache.place(Batch.of(range(5)), 8) as placement:
        (plan,) = placement.plans()
    seen = [sorted(np.flatnonzero(np.isfinite(row))) for row in plan.mask]
    assert seen == [sorted(plan.cells[: i + 1]) for i in range(5)]


@pytest.mark.report("llama.cpp#4170")
def test_clear_resets_everything() -> None:
    """llama.cpp#4170 and later: clear forgot the used counter, or the pending shifts."""
    cache, store = make(8)
    put(cache, 0, 4)
    cache.seq_add(0, -1, -1, 2)
    cache.clear()
    assert snapshot(cache) == snapshot(make(8)[0])
    put(cache, 0, 4)
    cache.update()
    assert store.rotations == 0


@pytest.mark.report("llama.cpp#4035", "qvac-fabric-llm.cpp#167")
def test_shared_cells_are_counted_once_and_for_each_owner() -> None:
    """llama.cpp#4035, qvac-fabric-llm.cpp#167: no honest count, none for a sequence."""
    cache, _ = make(8)
    put(cache, 0, 4)
    cache.seq_cp(0, 1, -1, -1)
    assert (cache.token_count, cache.used) == (8, 4)
    assert cache.table.seq_count(1) == 4


def test_the_view_shows_positions_as_they_are() -> None:
    """The reference adds the pending shift to a position that has it already."""
    cache, _ = make(8)
    put(cache, 0, 4)
    cache.seq_rm(0, 0, 2)
    cache.seq_add(0, 2, -1, -2)
    assert cache.view().positions[:4].tolist() == [-1, -1, 0, 1]


def test_a_negative_id_never_becomes_an_owner() -> None:
    """cp(0, -1) stored the id -1, and the cells could not be freed any more."""
    cache, _ = make(8)
    put(cache, 0, 4)
    with pytest.raises(SequenceIdError, match="-1"):
        cache.seq_cp(0, -1)
    cache.seq_rm(0)
    assert cache.used == 0


def test_an_empty_sequence_has_no_largest_position() -> None:
    """seq_pos_max was 0 for an empty sequence and for one token at 0 alike."""
    cache, _ = make(8)
    assert cache.seq_pos_max(0) == cache.seq_pos_min(0) == -1
    put(cache, 0, 1)
    assert cache.seq_pos_max(0) == cache.seq_pos_min(0) == 0


def test_a_failed_decode_releases_its_own_cells_and_no_position_of_others() -> None:
    """The reference's rollback passed cell numbers where positions were meant."""
    cache, _ = make(16)
    put(cache, 1, 10)
    cache.seq_rm(1, 0, 3)
    cache.seq_add(1, 3, -1, -3)
    before = snapshot(cache)

    placement = cache.place(Batch.of([1, 2, 3], 2, [50, 51, 52]), 8)
    assert placement.cells.tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError), placement:
        raise RuntimeError

    cache.check()
    assert cache.table.positions[cache.table.cells_of(1)].tolist() == list(range(7))
    assert cache.seq_pos_max(2) == -1
    assert before[-3:] == snapshot(cache)[-3:]


def test_a_freed_cell_forgets_its_pending_shift() -> None:
    """A freed cell kept its delta, and what was put there next was rotated by it."""
    cache, store = make(4)
    put(cache, 0, 4)
    cache.seq_add(0, -1, -1, 5)
    cache.seq_rm(0)
    put(cache, 1, 2)
    cache.update()
    assert store.rotations == 0
    assert store.rotation[cache.table.cells_of(1)].tolist() == [0, 1]


def test_a_failed_search_leaves_head_where_it_was() -> None:
    """The reference moves head even if it finds nothing."""
    cache, _ = make(4)
    put(cache, 0, 3)
    assert cache.head == 3
    with pytest.raises(CacheFull):
        put(cache, 1, 2)
    assert cache.head == 3
