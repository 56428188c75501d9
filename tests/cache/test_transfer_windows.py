"""Windows exported and imported: evicted tokens come along, and checkpoints do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cache import CheckpointBudget
from kvcellar.cache.content import SequenceData, WindowData, n_kept, pick
from kvcellar.cache.sliding import SlidingCache
from kvcellar.cache.transfer import state_get, state_set
from kvcellar.errors import (
    CacheFull,
    NotSupported,
    PositionError,
    SnapshotFileError,
    SnapshotMismatch,
)
from kvcellar.testing.sliding_duel import N_SEQ, SlidingDuel
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import CacheSpec, KVType
from tests.cache.kinds import (
    WINDOW,
    check_texts,
    everything,
    full,
    put,
    signed_layer,
    sliding,
    text_of,
)
from tests.profiles import examples

SEQS = st.integers(0, N_SEQ - 1)


def _wide_rows(spec: CacheSpec) -> SignatureStore:
    """A store whose rows have as many bytes as its shape says."""
    layers = (signed_layer(spec.window),)
    return SignatureStore(replace(spec, layers=layers, type_k=KVType.F32, type_v=KVType.F32))


OPS = st.one_of(
    st.tuples(st.just("decode"), SEQS, st.integers(1, 7)),
    st.tuples(st.just("decode"), SEQS, st.integers(1, 7)),
    st.tuples(st.just("fork"), SEQS, SEQS),
    st.tuples(st.just("cut_out"), SEQS, st.integers(0, 5), st.integers(6, 8)),
    st.tuples(st.just("rewind"), SEQS, st.integers(0, 9)),
    st.tuples(st.just("seq_rm"), SEQS, st.integers(0, 9), st.just(-1)),
    st.tuples(st.just("seq_add"), SEQS, st.integers(0, 6), st.just(-1), st.integers(-2, 3)),
    st.tuples(st.just("begin")),
)
HISTORY = st.lists(OPS, min_size=1, max_size=7)


def duel_of(
    window: int, n_checkpoints: int, ops: Sequence[tuple[object, ...]], first: int
) -> SlidingDuel:
    """A cache with a history; contents count from ``first`` on."""
    duel = SlidingDuel(window, 3, budget=CheckpointBudget(n_checkpoints), wrap=_wide_rows)
    duel._contents = itertools.count(first)
    for seq in range(N_SEQ):
        duel.decode([[seq]] * 4)
    for name, *args in ops:
        _do(duel, str(name), *(int(str(arg)) for arg in args))
    duel.check()
    return duel


def _do(duel: SlidingDuel, name: str, *args: int) -> None:
    if name == "decode":
        duel.decode([[args[0]]] * args[1])
    elif name == "fork":
        duel.seq_cp(args[0], args[1], -1, -1)
        duel.decode([[args[0]], [args[1]]] if args[0] != args[1] else [[args[0]]])
    elif name != "begin" or duel.depth < 2:
        getattr(duel, name)(*args)


def state(duel: SlidingDuel) -> tuple[object, ...]:
    """All that must stay, checkpoints included."""
    kept = duel.cache._checkpoints
    return (*duel.state(), *(kept.of(seq) for seq in range(N_SEQ)))


@examples(40)
@given(
    st.integers(1, 4),
    st.sampled_from([0, 1, 20]),
    HISTORY,
    HISTORY,
    st.permutations(range(N_SEQ)).map(lambda all_: all_[:2]),
    st.permutations(range(N_SEQ)),
    st.sampled_from([-1, -1, 3, 5]),
    st.sampled_from([0, 0, 2, -1]),
)
def test_whole_texts_come_along_whatever_slid_out(
    window: int,
    n_checkpoints: int,
    history: list[tuple[object, ...]],
    other_history: list[tuple[object, ...]],
    seq_ids: list[int],
    goals: list[int],
    p1: int,
    shift: int,
) -> None:
    source = duel_of(window, n_checkpoints, history, 0)
    target = duel_of(window, 20, other_history, 1000)
    source.cache.update()
    before = state(source)
    try:
        content = state_get(source.cache, seq_ids, -1, p1)
    except NotSupported:
        held = source.held()
        assert not all(source.naive.can_lose(seq, held[seq], p1, 2**31) for seq in seq_ids)
        return
    finally:
        assert state(source) == before
    for seq in goals[:2]:
        target.seq_rm(seq, -1, -1)
    _put_in(source, target, content, seq_ids, goals[:2], p1, shift)
    target.check()
    target.cache.update()
    for seq in range(N_SEQ):
        target.decode([[seq]] * 2)
        target.check()


def _put_in(
    source: SlidingDuel,
    target: SlidingDuel,
    content: SequenceData,
    seq_ids: Sequence[int],
    goals: Sequence[int],
    p1: int,
    shift: int,
) -> None:
    """Put in, and let the oracle have the texts; or be refused for the right reason."""
    texts = [
        [replace(e, pos=e.pos + shift) for e in source.naive.texts[seq] if p1 < 0 or e.pos < p1]
        for seq in seq_ids
    ]
    before = state(target)
    try:
        state_set(target.cache, content, goals, shift=shift)
    except PositionError:
        assert min(text[0].pos for text in texts if text) < 0
        assert state(target) == before
        return
    except CacheFull:
        assert target.depth, "there is room for all windows"
        assert state(target) == before
        return
    for seq, text in zip(goals, texts, strict=True):
        assert len(target.cache.seq_positions(seq)) <= n_kept(target.cache._window) or not text
        target.naive.texts[seq] = text
    for seq, text in zip(goals, texts, strict=True):
        if text and shift == 0:
            _go_back(source, target, seq_ids[list(goals).index(seq)], seq, p1)


def _go_back(source: SlidingDuel, target: SlidingDuel, src: int, dst: int, p1: int) -> None:
    """Wherever the source has a checkpoint, the target can go back to, and decode on from."""
    ends = [end for end in source.cache.checkpoints(src) if p1 < 0 or end <= p1]
    assert list(target.cache.checkpoints(dst)) == ends
    for end in ends:
        target.begin()
        assert target.cache.rewind(dst, end) == end
        target.naive.remove(dst, end, 2**31)
        target.check()
        target.decode([[dst]] * 2)
        target.check()
        target.rollback(target.depth - 1)


# -- one by one


def grown() -> SlidingCache:
    """A sequence of 16 whose window slid, a copy that went its own way; checkpoints at 4 and 16."""
    cache = sliding()
    put(cache, 0, 4)
    cache.seq_cp(0, 1)
    put(cache, 0, 12)
    put(cache, 1, 1)
    assert len(cache.seq_evicted(0)) > 0
    return cache


def test_a_checkpoint_that_two_share_is_shared_again() -> None:
    source, target = grown(), sliding()
    put(target, 3, 5)
    content = state_get(source, [1, 0])
    ends = [(int(one.positions[-1]) + 1, one.owners) for one in content.groups[0].checkpoints]
    assert ends == [(4, (0, 1)), (16, (1,))]
    state_set(target, content, [2, 0])
    assert target.checkpoints(2) == (4,)
    assert target.checkpoints(0) == (4, 16)
    assert target._checkpoints.of(2)[0] is target._checkpoints.of(0)[0]
    assert target.rewind(0, 4) == source.rewind(0, 4) == 4
    assert text_of(target, 0) == text_of(source, 0)
    check_texts(target, {0: text_of(source, 0), 2: text_of(source, 1)})
    assert target.seq_rm(2, 4, -1)


def test_checkpoints_are_not_taken_if_not_wanted_or_there_is_no_budget_or_positions_move() -> None:
    source = grown()
    assert state_get(source, [0], checkpoints=False).groups[0].checkpoints == ()
    content = state_get(source, [0])
    for target, shift, ends in (
        (sliding(n_kept=0), 0, ()),
        (sliding(n_kept=1), 0, (16,)),
        (sliding(), 3, ()),
    ):
        state_set(target, content, [1], shift=shift)
        assert target.checkpoints(1) == ends
        assert target.seq_pos_max(1) == 15 + shift
        put(target, 1, 3)


def test_the_content_may_change_afterwards() -> None:
    source, target = grown(), sliding()
    content = state_get(source, [0])
    text = text_of(source, 0)
    state_set(target, content, [0])
    for one in content.groups[0].checkpoints:
        for rows in (*one.rows.k, *one.rows.v):
            rows[:] = 255
        one.positions[:] = one.tokens[:] = 255
    for cache in (source, target):
        assert cache.rewind(0, 4) == 4
        check_texts(cache, {0: text[:4]})


def test_a_cache_of_full_size_gives_a_window_what_it_needs() -> None:
    source, target = full(window=WINDOW), sliding()
    put(source, 0, 3)
    source.seq_cp(0, 1)
    put(source, 0, 7)
    put(source, 1, 2)
    state_set(target, state_get(source, [0, 1]), [3, 2])
    check_texts(target, {3: text_of(source, 0), 2: text_of(source, 1)})
    assert target.seq_positions(3).tolist() == [7, 8, 9]
    assert target.used == 6
    put(target, 3, 5)


def test_a_cache_of_full_size_takes_a_window_only_if_nothing_slid_out() -> None:
    source, target = sliding(extra=8), full(window=WINDOW)
    put(target, 2, 3)
    put(source, 0, 5)
    assert len(source.seq_evicted(0)) == 0
    state_set(target, state_get(source, [0]), [0])
    check_texts(target, {0: text_of(source, 0)})
    before = everything(target)
    with pytest.raises(SnapshotMismatch, match="swa_full False, here it is True"):
        state_set(target, state_get(grown(), [0]), [1])
    assert everything(target) == before


def test_a_gap_in_the_positions_is_no_reason_to_refuse() -> None:
    cache = sliding(window=2, extra=8)
    put(cache, 0, 4)
    cache.seq_add(0, 2, -1, 3)
    for end, positions in ((3, [0, 1]), (4, [0, 1]), (6, [0, 1, 5])):
        content = state_get(cache, [0], -1, end)
        assert content.groups[0].text_of(0)[0].tolist() == positions


def test_a_window_with_a_hole_is_refused() -> None:
    content, target = state_get(grown(), [0], checkpoints=False), sliding(window=15)
    put(target, 1, 4)
    before = everything(target)
    with pytest.raises(SnapshotFileError, match="a part of the window of sequence 0 is missing"):
        state_set(target, content, [0])
    assert everything(target) == before


def test_a_checkpoint_with_a_hole_is_refused() -> None:
    content, target = state_get(grown(), [0]), sliding()
    put(target, 1, 4)
    before = everything(target)
    (group,) = content.groups
    one = group.checkpoints[-1]
    gone = np.stack((one.positions[:2], one.tokens[:2]))
    rows = pick(one.rows, np.arange(2, len(one.positions)))
    evicted = np.concatenate((one.evicted, gone), axis=1)
    holey = WindowData(one.positions[2:], one.tokens[2:], rows, evicted, one.owners)
    with pytest.raises(SnapshotFileError, match="a part of the checkpoint at 15 is missing"):
        state_set(target, replace(content, groups=(replace(group, checkpoints=(holey,)),)), [0])
    assert everything(target) == before
    put(target, 1, 4)  # what had been written is wiped before attention looks at it
