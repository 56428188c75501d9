"""Sliding windows in use: placing, what positions say, going back.

Users of llama.cpp and its descendants reported these faults; none may occur here.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.cache import AttentionCache, CheckpointBudget, SlidingCache, sliding_size
from kvcellar.errors import CacheError, CacheFull
from kvcellar.testing.duel import snapshot
from kvcellar.testing.sliding_duel import SlidingDuel, sliding_spec
from kvcellar.testing.stores import SignatureStore
from tests.cache.helpers import put


def make(
    window: int, n_ubatch: int, n_seq_max: int = 1, n_checkpoints: int = 0, n_extra: int = 0
) -> SlidingCache:
    """A cache of just the cells that are always enough, and some more."""
    spec = sliding_spec(sliding_size(window, n_seq_max, n_ubatch) + n_extra, window, n_seq_max)
    return SlidingCache(spec, SignatureStore(spec), checkpoints=CheckpointBudget(n_checkpoints))


def generate(cache: SlidingCache, n: int, seq: int = 0) -> None:
    """Decode token by token."""
    for _ in range(n):
        put(cache, seq, 1)


def contents(cache: SlidingCache, seq: int = 0) -> list[int]:
    """What the rows of a sequence hold; ``put`` writes 1000 times the sequence plus position."""
    store = cache.store
    assert isinstance(store, SignatureStore)
    held: list[int] = store.content[cache.table.cells_of(seq)].tolist()
    return held


# -- no slot


@pytest.mark.report("ollama#10127")
def test_expired_cells_are_used_again() -> None:
    """ollama#10127: two sequences, a window of 1024 and batches of 512 panicked."""
    cache = make(16, 8, n_seq_max=2)
    for _ in range(12):
        for seq in (0, 1):
            put(cache, seq, 8, n_ubatch=8)
    assert cache.seq_pos_max(0) == cache.seq_pos_max(1) == 95
    cache.check()


@pytest.mark.report("llama.cpp#14097")
def test_parallel_slots_with_long_prompts_are_placed() -> None:
    """llama.cpp#14097: Gemma 3 with parallel slots could not place batches."""
    cache = make(8, 4, n_seq_max=3)
    for seq in (0, 1, 2):
        put(cache, seq, 50, n_ubatch=4)
    batch = Batch()
    for seq in (0, 1, 2):
        for token in range(30):
            batch.add(token, 50 + token, seq)
    with cache.place(batch, 4) as placement:
        list(placement.plans())
    assert [cache.seq_pos_max(seq) for seq in (0, 1, 2)] == [79] * 3


@pytest.mark.report("llama.cpp#25452")
def test_churn_does_not_exhaust_the_cache_nor_part_text_and_cells() -> None:
    """llama.cpp#25452: after churn no slot was found, then it aborted with pos_min == -1."""
    duel = SlidingDuel(4, 3, budget=CheckpointBudget(2))
    rng = np.random.default_rng(0)
    for _ in range(120):
        seq, n = int(rng.integers(3)), int(rng.integers(1, 12))
        duel.decode([[seq]] * n, fail_at=1 if rng.random() < 0.3 else None)
        duel.rewind(seq, int(rng.integers(0, 20)))
        if rng.random() < 0.2:
            duel.seq_cp(seq, (seq + 1) % 3, -1, -1)
        duel.check()


@pytest.mark.report("llama.cpp#25452")
def test_a_placement_that_fails_changes_neither_text_nor_cells() -> None:
    """llama.cpp#25452: a failed placement left the token list and the cells disagreeing."""
    cache = make(4, 2, n_seq_max=2)
    put(cache, 0, 9, n_ubatch=2)
    before = snapshot(cache), cache.seq_evicted(0).tolist(), cache.seq_tokens(0).tolist()
    with pytest.raises(CacheFull):
        put(cache, 1, 11, n_ubatch=11)
    assert (snapshot(cache), cache.seq_evicted(0).tolist(), cache.seq_tokens(0).tolist()) == before


# -- what positions say


@pytest.mark.report("llama.cpp#29045")
def test_the_largest_position_is_right_after_a_cut_behind_the_window() -> None:
    """llama.cpp#29045: seq_pos_max was -1, and a batch without positions restarted at 0."""
    cache = make(16, 8, n_checkpoints=4)
    put(cache, 0, 20, n_ubatch=8)
    generate(cache, 40)
    assert cache.seq_rm(0, 10, -1) is False
    assert cache.seq_pos_max(0) == 59
    assert cache.seq_rm(0, 20, -1) is True
    assert (cache.seq_pos_min(0), cache.seq_pos_max(0)) == (4, 19)
    with cache.place(Batch.of([1]), 1) as placement:
        assert [plan.micro.positions.tolist() for plan in placement.plans()] == [[20]]


@pytest.mark.report("llama.cpp#19225")
def test_the_whole_text_and_what_is_held_are_told_apart() -> None:
    """llama.cpp#19225: the smallest position of the window misled callers."""
    cache = make(4, 2)
    put(cache, 0, 30, n_ubatch=2)
    whole = [*cache.seq_evicted_positions(0), *cache.seq_positions(0)]
    assert whole == [*range(30)]
    assert [*cache.seq_evicted(0), *cache.seq_tokens(0)] == [*range(100, 130)]
    assert cache.seq_pos_min(0) == 24


# -- going back


@pytest.mark.report("llama.cpp#14157", "llama.cpp#14071")
def test_the_last_token_can_always_be_decoded_again() -> None:
    """llama.cpp#14157, #14071: an identical prompt was computed again from 0."""
    for window in (1, 2, 3, 16):
        for others in (0, 5, 50):
            cache = make(window, 4, n_seq_max=2)
            put(cache, 0, 100, n_ubatch=4)
            if others:
                put(cache, 1, others, n_ubatch=4)
            assert cache.seq_rm(0, 99, -1) is True
            with cache.place(Batch.of([1]), 1) as placement:
                (plan,) = placement.plans()
            seen = cache.table.positions[np.flatnonzero(plan.mask[0] == 0)]
            assert sorted(seen.tolist()) == [*range(100 - window, 100)]


@pytest.mark.report("llama.cpp#14113", "llama.cpp#15082")
def test_a_deeper_edit_goes_back_to_a_checkpoint() -> None:
    """llama.cpp#14113, #15082: reusing a prefix no longer worked."""
    cache = make(8, 4, n_checkpoints=8)
    put(cache, 0, 40, n_ubatch=4)
    generate(cache, 30)
    assert cache.rewind(0, 43) == 40
    assert contents(cache) == [*range(32, 40)]


@pytest.mark.report(
    "llama.cpp#14625", "llama.cpp#21831", "llama.cpp#22746", "llama.cpp#24055", "llama.cpp#23589"
)
def test_an_edit_of_history_costs_what_follows_the_last_checkpoint() -> None:
    """llama.cpp#14625, #21831, #22746, #24055, #23589: any edit cost the whole prompt."""
    cache = make(8, 4, n_checkpoints=8)
    for _ in range(5):
        put(cache, 0, 20, n_ubatch=4)
        generate(cache, 10)
    assert cache.checkpoints(0) == (20, 50, 80, 110, 140)
    assert cache.rewind(0, 100) == 80
    assert cache.rewind(0, 79) == 79
    put(cache, 0, 20, n_ubatch=4)
    assert cache.checkpoints(0) == (20, 50, 99)


@pytest.mark.report("llama.cpp#21468")
def test_a_cache_of_full_size_is_not_judged_by_the_window() -> None:
    """llama.cpp#21468: with swa_full, a divergence far back still cost the whole prompt."""
    full = sliding_spec(64, 8, 1)
    for cache in (
        AttentionCache(full, SignatureStore(full)),
        SlidingCache(full, SignatureStore(full)),
    ):
        put(cache, 0, 60)
        assert cache.seq_rm(0, 20, 30) is True
        cache.seq_add(0, 30, -1, -10)
        assert cache.seq_rm(0, 5, -1) is True
        assert cache.seq_positions(0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.report("llama.cpp#21510")
def test_a_checkpoint_that_starts_at_0_is_accepted() -> None:
    """llama.cpp#21510: a checkpoint [0, 961] was refused."""
    cache = make(16, 4, n_checkpoints=1)
    put(cache, 0, 10, n_ubatch=4)
    generate(cache, 60)
    assert cache.seq_rm(0, 7, -1) is True
    assert contents(cache) == [*range(7)]


@pytest.mark.report("llama.cpp#18497", "koboldcpp#2469")
def test_an_insertion_in_the_middle_is_refused_aloud() -> None:
    """llama.cpp#18497, koboldcpp#2469: reuse by shifting was silently useless."""
    cache = make(8, 4)
    put(cache, 0, 60, n_ubatch=4)
    before = snapshot(cache)
    assert cache.seq_rm(0, 50, 58) is False
    with pytest.raises(CacheError, match="without the 8 positions before it"):
        cache.seq_add(0, 55, -1, -20)
    assert snapshot(cache) == before


@pytest.mark.report("llama.cpp#18497")
def test_a_context_shift_works_whatever_has_slid() -> None:
    """llama.cpp#18497: positions can move, if the window moves with them."""
    cache = make(8, 4)
    put(cache, 0, 60, n_ubatch=4)
    assert cache.seq_rm(0, 4, 32) is True
    cache.seq_add(0, 32, -1, -28)
    assert cache.seq_pos_max(0) == 31
    assert [*cache.seq_evicted(0), *cache.seq_tokens(0)] == [*range(100, 104), *range(132, 160)]
    put(cache, 0, 20, n_ubatch=4)
    cache.check()


@pytest.mark.report("llama.cpp#23720")
def test_checkpoints_hold_the_last_window_only() -> None:
    """llama.cpp#23720: they held masked cells too, and going back failed in a shared cache."""
    cache = make(4, 4, n_seq_max=2, n_checkpoints=8, n_extra=40)
    put(cache, 0, 30)
    put(cache, 1, 10)
    generate(cache, 60)
    assert cache.seq_count(0) > 20
    assert cache.seq_rm(0, 30, -1) is True
    assert contents(cache) == [26, 27, 28, 29]
    assert contents(cache, 1)[-4:] == [1006, 1007, 1008, 1009]


@pytest.mark.report("llama.cpp#18552")
def test_going_back_twice_gives_the_same() -> None:
    """llama.cpp#18552: after a partial restore the same tokens gave other results."""
    cache = make(8, 4, n_checkpoints=4)
    put(cache, 0, 30, n_ubatch=4)
    found = []
    for _ in range(3):
        generate(cache, 25)
        assert cache.seq_rm(0, 30, -1) is True
        with cache.place(Batch.of([1]), 1) as placement:
            (plan,) = placement.plans()
            cells = np.flatnonzero(plan.mask[0] == 0)
            found.append(sorted(cache.table.positions[cells].tolist()))
        assert cache.seq_rm(0, 30, -1) is True
        found.append(contents(cache))
    assert found == [[*range(23, 31)], [*range(22, 30)]] * 3


@pytest.mark.report("llama.cpp#28873")
def test_a_cache_with_nothing_partial_keeps_no_checkpoint() -> None:
    """llama.cpp#28873: 400 to 900 MB a checkpoint where there was nothing to go back for."""
    spec = sliding_spec(16, 4, 1)
    cache = AttentionCache(spec, SignatureStore(spec))
    put(cache, 0, 8)
    assert not cache.checkpoint(0)
    assert cache.rewind(0, 3) == 3


@pytest.mark.report("koboldcpp#2151", "koboldcpp#2158")
def test_a_prefix_whose_window_slid_out_is_not_usable() -> None:
    """koboldcpp#2151, #2158: a new session reused a corrupt prefix of 16 tokens."""
    cache = make(8, 4, n_checkpoints=4)
    put(cache, 0, 40, n_ubatch=4)
    generate(cache, 100)
    before = snapshot(cache)
    assert cache.seq_rm(0, 16, -1) is False
    with pytest.raises(CacheError, match="seq_cp would leave sequence"):
        _copy_prefix(16)
    assert snapshot(cache) == before
    assert cache.rewind(0, 16) == 0
    assert cache.used == 0


def _copy_prefix(n: int) -> None:
    cache = make(8, 4, n_seq_max=2)
    put(cache, 0, 100, n_ubatch=4)
    cache.seq_cp(0, 1, 0, n)
