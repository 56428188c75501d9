"""Cells exported from a cache of any history and imported into another: an oracle says which.

Two caches run beside their oracles. What is exported is taken out of the oracle's list of cells
with loops; after an import everything is compared, every byte of every cell included.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cache import AttentionCache
from kvcellar.cache.content import SequenceData
from kvcellar.cache.transfer import state_get, state_set
from kvcellar.errors import (
    CacheError,
    CacheFull,
    OptionError,
    PositionError,
    SequenceIdError,
    ShiftUnsupported,
    SnapshotMismatch,
)
from kvcellar.testing.duel import Duel
from kvcellar.testing.machine import BOUNDS, SEQ_IDS, TOKEN_OWNERS
from kvcellar.testing.naive import NaiveCache, NaiveCell
from kvcellar.testing.signs import Setup
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import MAX_POSITION, KVType
from tests.cache.kinds import (
    check_texts,
    everything,
    full,
    port_spec,
    put,
    signed_layer,
    text_of,
)
from tests.cache.stores import MAKERS, SETUPS, Signed, signed
from tests.profiles import examples

SETUP = Setup(layers=(signed_layer(),) * 2, type_k=KVType.F32, type_v=KVType.F32)
SUBSETS = st.lists(SEQ_IDS, unique=True, min_size=1, max_size=4)

OPS = st.one_of(
    st.tuples(st.just("decode"), st.lists(TOKEN_OWNERS, min_size=1, max_size=4)),
    st.tuples(st.just("decode"), st.lists(TOKEN_OWNERS, min_size=1, max_size=4)),
    st.tuples(st.just("seq_rm"), SEQ_IDS, BOUNDS, BOUNDS),
    st.tuples(st.just("seq_cp"), SEQ_IDS, SEQ_IDS, BOUNDS, BOUNDS),
    st.tuples(st.just("seq_add"), SEQ_IDS, BOUNDS, BOUNDS, st.integers(-3, 3)),
    st.tuples(st.just("seq_div"), SEQ_IDS, BOUNDS, BOUNDS, st.integers(1, 3)),
    st.tuples(st.just("defrag"), st.integers(1, 2)),
    st.tuples(st.just("update")),
    st.tuples(st.just("begin")),
)


@dataclass(frozen=True)
class Taken:
    """What the oracle expects to be given: a cell, and whose it is by number."""

    cell: NaiveCell
    owners: frozenset[int]


def duel_of(size: int, ops: Sequence[tuple[object, ...]], first: int) -> Duel:
    """A cache with a history; contents count from ``first`` on."""
    duel = Duel(SETUP, size)
    duel._contents = itertools.count(first)
    duel.decode([frozenset({0}), frozenset({0, 1}), frozenset({1})], [0, 0, 0], 2)
    for name, *args in ops:
        if name == "decode":
            duel.decode(args[0], [0] * len(args[0]), 3)  # type: ignore[arg-type]
        elif name != "begin" or duel.depth < 2:
            getattr(duel, str(name))(*args)
    duel.check()
    return duel


def take(naive: NaiveCache, seq_ids: Sequence[int], lo: int, hi: int) -> list[Taken]:
    """The cells of sequences in a range, by position."""
    found = []
    for cell in sorted(naive.cells, key=lambda cell: cell.pos):  # a stable sort
        mine = frozenset(i for i, seq in enumerate(seq_ids) if seq in cell.owners)
        if mine and lo <= cell.pos < hi:
            found.append(Taken(cell, mine))
    return found


def why_refused(
    naive: NaiveCache, taken: Sequence[Taken], seq_ids: Sequence[int], shift: int
) -> type[CacheError] | None:
    """The error to expect, if any."""
    for number, seq in enumerate(seq_ids):
        at = [one.cell.pos + shift for one in taken if number in one.owners]
        if at and (min(at) < 0 or min(at) <= naive.pos_max(seq)):
            return PositionError
    return CacheFull if len(taken) > naive.n_free else None


def give(naive: NaiveCache, taken: Sequence[Taken], seq_ids: Sequence[int], shift: int) -> None:
    """Let sequences have cells, wherever the next batch would have gone."""
    for i, one in zip(naive.find(len(taken)) if taken else (), taken, strict=True):
        owners = {seq_ids[number] for number in one.owners}
        rows = one.cell
        naive.cells[i] = NaiveCell(
            rows.pos + shift, shift, rows.token, owners, rows.content, 0, rows.k_rows, rows.v_rows
        )


@examples(75)
@given(
    st.lists(OPS, max_size=8),
    st.lists(OPS, max_size=6),
    st.lists(OPS, max_size=3),
    SUBSETS,
    st.permutations(range(4)),
    st.sampled_from([(-1, -1), (-1, -1), (0, 2), (1, -1), (1, 3)]) | st.tuples(BOUNDS, BOUNDS),
    st.sampled_from([0, 0, 1, 5, -1, -2]),
    st.sampled_from([7, 16, 16]),
    st.sampled_from([True, True, False]),
)
def test_what_is_put_in_is_what_was_taken_out_and_others_stay(
    history: list[tuple[object, ...]],
    other_history: list[tuple[object, ...]],
    later: list[tuple[object, ...]],
    seq_ids: list[int],
    targets: list[int],
    bounds: tuple[int, int],
    shift: int,
    size: int,
    makes_room: bool,
) -> None:
    source, target = duel_of(9, history, 0), duel_of(size, other_history, 1000)
    source.naive.update()
    lo, hi = max(bounds[0], 0), bounds[1] if bounds[1] >= 0 else MAX_POSITION
    content = state_get(source.cache, seq_ids, *bounds)
    source.check()
    taken = take(source.naive, seq_ids, lo, hi)
    _check_content(content, taken, len(seq_ids))
    goals = targets[: len(seq_ids)]
    for seq in goals if makes_room else ():
        target.seq_rm(seq, -1, -1)
    error = why_refused(target.naive, taken, goals, shift)
    if error is not None:
        target.refused(error, lambda: state_set(target.cache, content, goals, shift=shift))
    else:
        state_set(target.cache, content, goals, shift=shift)
        give(target.naive, taken, goals, shift)
    target.check()
    target.update()
    target.check()
    for name, *args in later:
        if name not in ("begin", "decode"):
            getattr(target, str(name))(*args)
            target.check()
    target.decode([frozenset({0}), frozenset({3})], [0, 0], 2)
    target.check()
    if target.depth:
        target.rollback(0)
        target.check()


def _check_content(content: SequenceData, taken: Sequence[Taken], n_seqs: int) -> None:
    """The content lists exactly those cells, each once."""
    (group,) = content.groups
    owners = [set[int]() for _ in taken]
    for cell, number in group.owners.T.tolist():
        owners[cell].add(number)
    assert group.positions.tolist() == [one.cell.pos for one in taken]
    assert group.tokens.tolist() == [one.cell.token for one in taken]
    assert owners == [set(one.owners) for one in taken]
    assert [evicted.shape for evicted in group.evicted] == [(2, 0)] * n_seqs
    for number in range(n_seqs):
        at = [one.cell.pos for one in taken if number in one.owners]
        assert content.span(number) == ((min(at), max(at)) if at else (-1, -1))
    assert content.n_bytes == 2 * 24 * len(taken)  # two layers, 16 bytes of K and 8 of V


def test_the_oracle_notices_a_row_that_went_to_another_cell() -> None:
    source, target = duel_of(9, [], 0), duel_of(16, [], 1000)
    content = state_get(source.cache, [0])
    for rows in (*content.groups[0].rows.k, *content.groups[0].rows.v):
        rows[:] = rows[::-1].copy()
    state_set(target.cache, content, [3])
    give(target.naive, take(source.naive, [0], 0, MAX_POSITION), [3], 0)
    with pytest.raises(AssertionError):
        target.check()


# -- real bytes


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("other", ["ggml", "numpy"])
@pytest.mark.parametrize("flash_attn", [True, False])
def test_rows_are_the_same_bits_in_another_store_and_another_layout(
    setup: Setup, other: str, flash_attn: bool
) -> None:
    widths = {layer.n_embd_v for layer in setup.layers}
    if not flash_attn and (len(widths) > 1 or setup.type_v.is_quantized):
        return  # V cannot lie across
    elsewhere = Setup(MAKERS[other], setup.layers, setup.type_k, setup.type_v, flash_attn)
    with signed(setup) as source, signed(elsewhere, 24) as target:
        source.put(0, 3)
        source.cache.seq_cp(0, 1)
        source.put(0, 2)
        source.put(1, 3)
        target.put(2, 5)
        target.put(3, 5)
        target.cache.seq_rm(2, 1, 3)
        target.cache.seq_rm(3, 0, 2)
        before = [target.rows(seq) for seq in (2, 3)]
        state_set(target.cache, state_get(source.cache, [0, 1]), [1, 0])
        assert (target.rows(1), target.rows(0)) == (source.rows(0), source.rows(1))
        assert [target.rows(seq) for seq in (2, 3)] == before
        assert target.cache.used == 6 + 8
        _shift_twice(source, target)


def _shift_twice(source: Signed, target: Signed) -> None:
    target.cache.seq_keep(1)
    state_set(target.cache, state_get(source.cache, [1]), [3], shift=7)
    assert target.rows(3) == source.rows(1)
    target.update()
    assert target.cache.seq_positions(3).tolist() == list(range(7, 13))
    target.check(3, [0, 1, 2, 1003, 1004, 1005])


# -- refusals


def test_a_shift_needs_a_store_that_can_rotate() -> None:
    source, target = full(), full()
    target.store._can_shift = False  # type: ignore[attr-defined]
    put(source, 0, 3)
    content = state_get(source, [0])
    before = everything(target)
    with pytest.raises(ShiftUnsupported, match="load at the positions"):
        state_set(target, content, [0], shift=1)
    assert everything(target) == before
    state_set(target, content, [0])
    assert target.seq_positions(0).tolist() == [0, 1, 2]


def test_what_is_asked_for_has_to_make_sense() -> None:
    cache = full()
    put(cache, 0, 3)
    cache.seq_add(0, 1, -1, 2)
    before = everything(cache)
    with pytest.raises(SequenceIdError, match="99"):
        state_get(cache, [0, 99])
    with pytest.raises(OptionError, match="only once"):
        state_get(cache, [0, 0])
    assert everything(cache) == before  # not even what is pending was applied
    content = state_get(cache, [0])
    before = everything(cache)
    with pytest.raises(OptionError, match="2 sequence ids for 1"):
        state_set(cache, content, [1, 2])
    with pytest.raises(OptionError, match="only once"):
        state_set(cache, content, [1, 1])
    with pytest.raises(SequenceIdError, match="4"):
        state_set(cache, content, [4])
    with pytest.raises(PositionError, match="would begin at 0: load it behind"):
        state_set(cache, content, [0])
    with pytest.raises(PositionError, match="largest"):
        state_set(cache, content, [1], shift=MAX_POSITION - 4)
    with pytest.raises(SnapshotMismatch, match="groups of K and V"):
        state_set(cache, SequenceData(1, ()), [1])
    assert everything(cache) == before


def test_pieces_of_a_text_follow_each_other_into_a_plain_cache() -> None:
    source, target = full(), full(13)
    put(source, 0, 5)
    for lo, hi in ((0, 2), (2, 3), (3, 3), (3, -1)):
        state_set(target, state_get(source, [0], lo, hi), [2])
    assert target.seq_tokens(2).tolist() == source.seq_tokens(0).tolist()
    assert state_get(source, []).n_seqs == 0
    state_set(target, state_get(source, []), [])


def test_sequences_may_have_any_of_many_ids() -> None:
    spec = port_spec(24, n_seq_max=130)
    source, target = (AttentionCache(spec, SignatureStore(spec)) for _ in range(2))
    put(source, [0, 129], 3)
    put(source, 129, 2)
    state_set(target, state_get(source, [129, 0]), [64, 127])
    assert target.used == 5
    check_texts(target, {64: text_of(source, 129), 127: text_of(source, 0)})
