"""K and V rows of an attention cache in use: compaction, shifts, rollback, over every backend.

Users of llama.cpp and its descendants reported these faults; none may occur here. Those about cells
alone are in ``test_attention_cells.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.ggml import rotation
from kvcellar.cache import AttentionCache
from kvcellar.cache.rows import plan_moves
from kvcellar.errors import AllocationError
from kvcellar.testing.duel import snapshot as all_bytes
from kvcellar.testing.signs import WIDE, Setup, check_rows, fill, keys
from kvcellar.types import KVType, LayerSpec, RopeSpec
from tests.cache.helpers import put
from tests.cache.stores import MAKERS, SETUPS, MakeStore, Signed, ggml_store, signed

YARN = RopeSpec("neox", 64, freq_scale=0.25, ext_factor=1.0, n_ctx_orig=512)
FOUR_BITS = Setup(ggml_store, WIDE, KVType.Q4_0, KVType.Q4_0)
EVERYWHERE = pytest.mark.parametrize("setup", SETUPS)
BACKENDS = pytest.mark.parametrize("make", [pytest.param(m, id=n) for n, m in MAKERS.items()])


def lengths(it: Signed, seq_id: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """How long each K row of a sequence is, layer after layer."""
    cells = it.cache.table.cells_of(seq_id)
    layers = range(len(it.store.spec.layers))
    found = [np.linalg.norm(it.store.read(i, "k", cells), axis=1) for i in layers]
    return np.concatenate(found)


def error_of_keys(it: Signed) -> float:
    """How far the keys of sequence 0 are off, root mean square."""
    at = it.cache.table.positions[it.cache.table.cells_of(0)].astype(np.int64)
    wanted = keys(it.store.spec.layers[0], 0, np.arange(len(at)), at)
    return float(
        np.sqrt(np.mean((it.store.read(0, "k", it.cache.table.cells_of(0)) - wanted) ** 2))
    )


# -- compaction


@pytest.mark.report("llama.cpp#12253")
@EVERYWHERE
def test_compaction_between_two_growing_sequences_changes_no_row(setup: Setup) -> None:
    """llama.cpp#12253: with q8_0 K and V all output was garbage after the first defrag."""
    with signed(setup, 32) as it:
        for _ in range(4):
            it.put(0, 2)
            it.put(1, 3)
        it.cache.seq_rm(0, 1, 7)
        rows = it.rows(0), it.rows(1)

        it.cache.defrag()
        it.cache.update()
        it.put(0, 2)

        assert it.rows(1) == rows[1]
        it.check(0, [0, 7, 8, 9])
        it.check(1, [1000 + i for i in range(12)])
        assert it.cache.cell_max() == it.cache.used == 16


@pytest.mark.report("llama.cpp#12259")
@pytest.mark.parametrize("setup", [*SETUPS, pytest.param(FOUR_BITS, id="ggml-q4_0")])
def test_a_context_shift_followed_by_compaction_keeps_every_row(setup: Setup) -> None:
    """llama.cpp#12259: a crash with q4_0 K and V, n_ctx 2048; with 1024 or 2056 there was none."""
    for size in (24, 32, 33):
        with signed(setup, size) as it:
            for _ in range(5):
                it.put(0, 3)
                it.put(1, 1)
            it.cache.seq_rm(0, 2, 9)
            it.cache.seq_add(0, 9, -1, -7)
            it.cache.defrag()
            it.update()
            it.put(0, 4)
            it.check(0, [0, 1, *range(9, 15), *range(8, 12)])
            it.check(1, [1000 + i for i in range(5)], turns=0)


@pytest.mark.report("llama.cpp#14189")
@EVERYWHERE
def test_compaction_moves_bytes_although_no_shift_is_pending(setup: Setup) -> None:
    """llama.cpp#14189: defrag ran only if a shift was pending."""
    with signed(setup) as it:
        it.put(0, 6)
        it.cache.seq_rm(0, 1, 4)
        assert not len(it.cache.table.pending_cells())
        it.cache.defrag()
        it.cache.update()
        assert it.cache.table.cells_of(0).tolist() == [0, 1, 2]
        it.check(0, [0, 4, 5])


@pytest.mark.report("llama.cpp#11707")
@BACKENDS
def test_padding_never_makes_the_cache_move_rows(make: MakeStore) -> None:
    """llama.cpp#11707: ten tokens padded to 256 cells were moved about for nothing."""
    setup = Setup(make)
    spec = setup.spec(512, padding=256)
    store = setup.store(spec)
    copied: list[int] = []
    store.copy = lambda src, dst: copied.append(len(src))  # type: ignore[method-assign]  # noqa: ARG005
    cache = AttentionCache(spec, store, defrag_threshold=0.01)
    for seq in range(4):
        put(cache, seq, 50)
        cache.update()
    assert cache.table.n_kv(256) == 256
    assert copied == []
    cache.seq_rm(1)
    cache.update()
    assert sum(copied) == 50
    store.close()


@pytest.mark.slow
@pytest.mark.report("ollama#9904", "llama.cpp#9314")
@BACKENDS
def test_thousands_of_small_moves_are_one_pass_or_several(make: MakeStore) -> None:
    """ollama#9904, llama.cpp#9314: many small moves overflowed a graph, or stalled everybody."""
    setup = Setup(make, type_k=KVType.F32, type_v=KVType.F32)
    for max_moves, n_passes in ((None, 1), (300, 3)):
        with signed(setup, 3000) as it:
            it.put(0, 3000)
            table = it.cache.table
            for position in range(1, 3000, 2):
                table.seq_rm(0, position, position + 1)
            passes = 0
            while plan_moves(table.positions >= 0).n_runs:
                it.cache.defrag(max_moves)
                it.cache.update()
                passes += 1
            assert passes == n_passes
            it.check(0, [*range(0, 3000, 2)])


# -- shifts


@pytest.mark.report("llama.cpp#3825")
@EVERYWHERE
def test_a_second_shift_turns_rows_on_from_the_first(setup: Setup) -> None:
    """llama.cpp#3825: the second shift overwrote the pending one, and K lagged behind."""
    with signed(setup) as it:
        it.put(0, 4)
        it.cache.seq_add(0, 0, -1, 2)
        it.cache.seq_add(0, 0, -1, 3)
        it.check(0, [0, 1, 2, 3], turns=0)
        it.update()
        assert it.cache.seq_pos_min(0) == 5
        it.check(0, [0, 1, 2, 3])


@pytest.mark.report("llama.cpp#5652", "llama.cpp#7230", "llama.cpp#9743", "ik_llama.cpp#760")
@pytest.mark.parametrize("kind", [kind for kind in KVType if kind.is_quantized])
def test_quantised_keys_can_be_shifted(kind: KVType) -> None:
    """llama.cpp#5652, #7230, #9743, ik_llama.cpp#760: an abort, or a copy that did not exist."""
    layers = (
        LayerSpec(1, 64, 64, RopeSpec("neox", 64)),
        LayerSpec(2, 32, 32, RopeSpec("normal", 32)),
    )
    with signed(Setup(ggml_store, layers, kind, kind)) as it:
        it.put(0, 6)
        stays = it.store.read_raw(0, "k", np.array([0, 1]))
        it.cache.seq_rm(0, 2, 4)
        it.cache.seq_add(0, 4, -1, -2)
        it.update()
        it.check(0, [0, 1, 4, 5])
        np.testing.assert_array_equal(it.store.read_raw(0, "k", np.array([0, 1])), stays)


@pytest.mark.report("llama.cpp#4097", "llama.cpp#6002")
@EVERYWHERE
def test_many_small_shifts_turn_rows_as_far_as_a_large_one(setup: Setup) -> None:
    """llama.cpp#4097, #6002: coherence was lost after repeated shifts."""
    with signed(setup) as many, signed(setup) as one:
        for it in (many, one):
            it.put(0, 14)
            it.cache.seq_rm(0, 0, 10)
        for _ in range(10):
            many.cache.seq_add(0, 0, -1, -1)
            many.update()
        one.cache.seq_add(0, 0, -1, -10)
        one.update()
        for it in (many, one):
            it.check(0, [10, 11, 12, 13])
            assert it.cache.seq_pos_min(0) == 0


@EVERYWHERE
def test_a_division_turns_rows_by_new_minus_old(setup: Setup) -> None:
    """C-2, a public note: a newer version turns them by old minus new."""
    with signed(setup, 24) as it:
        it.put(0, 17)
        it.cache.seq_rm(0, 0, 10)
        it.cache.seq_div(0, 0, -1, 2)
        assert it.cache.table.pending[10:17].tolist() == [-5, -6, -6, -7, -7, -8, -8]
        it.update()
        it.check(0, [*range(10, 17)])


@BACKENDS
@pytest.mark.parametrize("freq_scale", [0.5, 1 / 32])
def test_a_shift_is_a_pure_rotation_under_yarn(make: MakeStore, freq_scale: float) -> None:
    """C-3: each shift multiplied K by YaRN's magnitude again, 1.347^n at a scale of 1/32."""
    layers = (LayerSpec(1, 64, 64, replace(YARN, freq_scale=freq_scale)),)
    setup = Setup(make, layers, KVType.F32, KVType.F32)
    with signed(setup) as it:
        it.put(0, 6)
        before = lengths(it, 0)
        for _ in range(10):
            it.cache.seq_add(0, 0, -1, 3)
            it.update()
        np.testing.assert_allclose(lengths(it, 0), before, rtol=1e-4)
        it.check(0, [*range(6)])


@pytest.mark.parametrize("kind", [KVType.Q8_0, KVType.Q4_0])
@pytest.mark.parametrize("n_rot", [16, 24, 64])
def test_partial_rotary_of_quantised_keys_costs_no_more_than_quantising(
    kind: KVType, n_rot: int
) -> None:
    """C-4: only the rotated part was taken out of the transform; errors were 85 times larger."""
    layers = (LayerSpec(2, 128, 64, RopeSpec("neox", n_rot)),)
    with signed(Setup(ggml_store, layers, kind, kind)) as it:
        assert it.store.spec.hadamard_k(0) == 128
        it.put(0, 8)
        noise = error_of_keys(it)
        it.cache.seq_add(0, 0, -1, 5)
        it.update()
        assert 0 < noise < error_of_keys(it) < 2 * noise


@pytest.mark.report("ik_llama.cpp#2336", "llama.cpp#2459", "koboldcpp#2088")
@BACKENDS
def test_each_layer_turns_by_its_own_rope(make: MakeStore) -> None:
    """ik_llama.cpp#2336, #2459, koboldcpp#2088: layers differ in n_rot, base and scale."""
    layers = (
        LayerSpec(1, 16, 8, RopeSpec("neox", 16, 1e6)),
        LayerSpec(2, 8, 8, RopeSpec("neox", 4, 1e4, 0.125)),
        LayerSpec(1, 8, 8, RopeSpec("normal", 8, factors=(1.0, 2.0, 3.0, 4.0))),
        LayerSpec(1, 8, 8),
    )
    setup = Setup(make, layers, KVType.F32, KVType.F32)
    with signed(setup) as it:
        it.put(0, 8)
        it.cache.seq_rm(0, 2, 5)
        it.cache.seq_add(0, 5, -1, -3)
        it.update()
        it.check(0, [0, 1, 5, 6, 7])


# -- cells and their bytes


@EVERYWHERE
def test_what_is_put_into_freed_cells_is_never_turned_by_their_old_shift(setup: Setup) -> None:
    """A freed cell kept its delta; a state loaded into it was rotated by the next update."""
    with signed(setup) as it:
        it.put(0, 4)
        it.cache.seq_add(0, 0, -1, 5)
        it.cache.seq_rm(-1)
        cells, positions = np.arange(3), np.arange(3, dtype=np.int32)
        it.cache.table.place(cells, positions, np.ones((1, 3), np.uint64), positions)
        fill(it.store, cells, np.arange(3), positions)
        rows = it.rows(0)
        it.cache.update()
        assert it.rows(0) == rows
        it.check(0, [0, 1, 2], turns=0)


@EVERYWHERE
def test_a_rollback_takes_back_its_own_cells_and_no_bytes_of_others(setup: Setup) -> None:
    """The reference's rollback passed cell numbers where positions were meant."""
    with signed(setup) as it:
        it.put(1, 10)
        it.cache.seq_rm(1, 0, 3)
        it.cache.seq_add(1, 3, -1, -3)
        rows = it.rows(1)
        with it.cache.transaction() as t:
            it.put(2, 3)
            assert it.cache.table.cells_of(2).tolist() == [0, 1, 2]
            t.rollback()
        assert it.rows(1) == rows
        assert it.cache.seq_pos_max(2) == -1
        it.update()
        it.check(1, [*range(1003, 1010)])


@pytest.mark.slow
@pytest.mark.report("llama.cpp#4185", "llama.cpp#25566")
@EVERYWHERE
def test_churn_never_mixes_the_rows_of_sequences(setup: Setup) -> None:
    """llama.cpp#4185, #25566: after hundreds of requests cells were lost, or somebody else's."""
    rng = np.random.default_rng(0)
    with signed(setup, 13) as it:
        for _ in range(150):
            seq, n = int(rng.integers(4)), int(rng.integers(1, 5))
            if rng.random() < 0.5:
                it.cache.seq_rm(seq, int(rng.integers(0, 4)), -1)
            if n > 13 - it.cache.used:
                it.cache.seq_rm(-1, 1, -1)
            it.put(seq, n)
            for s in range(4):
                cells = it.cache.table.cells_of(s)
                at = it.cache.table.positions[cells].astype(np.int64)
                check_rows(it.store, cells, at + 1000 * s, at, 0 * at)


def test_a_rotation_without_memory_for_its_last_piece_turns_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first 512 rows were turned before memory for the rest was asked for: later, twice."""
    build = rotation.RotationGraph.__init__

    def fail(graph: rotation.RotationGraph, *args: Any) -> None:
        if args[-1] != rotation.PIECE:
            raise AllocationError("rotating K rows", 1)
        build(graph, *args)

    with signed(Setup(ggml_store, WIDE, KVType.F16), 600) as it:
        it.put(0, 520)
        it.cache.seq_add(0, 0, -1, 3)
        before = all_bytes(it.cache)
        with monkeypatch.context() as patch:
            patch.setattr(rotation.RotationGraph, "__init__", fail)
            with pytest.raises(AllocationError):
                it.cache.update()
        assert all_bytes(it.cache) == before
        it.update()
        it.check(0, [*range(520)])
