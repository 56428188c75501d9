"""Contents that contradict themselves or belong elsewhere are refused, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cache.content import (
    CellData,
    SequenceData,
    SequenceStateData,
    StateData,
    WindowData,
)
from kvcellar.cache.content_checks import check_content
from kvcellar.cache.transfer import state_get, state_set
from kvcellar.errors import SnapshotError, SnapshotFileError, SnapshotMismatch
from kvcellar.types import MAX_POSITION, AnyArray, CacheSpec, StateLayer, StateSpec
from tests.cache.kinds import (
    N_SEQ,
    WINDOW,
    check_texts,
    everything,
    hybrid,
    port_spec,
    put,
    states_of,
    text_of,
)
from tests.profiles import examples

Change: TypeAlias = Callable[[Any], Any]
SPECS: list[CacheSpec | StateSpec] = [
    port_spec(40),
    port_spec(16, WINDOW),
    StateSpec(14, N_SEQ, (StateLayer(1),)),
]


def sound() -> SequenceData:
    """Two sequences with all there can be: shared cells, what slid out, checkpoints, states."""
    source = hybrid("fws", size=40)
    put(source, 0, 4)
    source.seq_cp(0, 1)
    put(source, 0, 12)
    put(source, 1, 1)
    return state_get(source, [0, 1])


# -- where in a content something is changed

CONTENT = sound()
FULL, SLIDING = CONTENT.groups


def in_group(**changes: Change) -> SequenceData:
    """With fields of the window's group changed."""
    return replace(CONTENT, groups=(FULL, _changed(SLIDING, changes)))


def in_checkpoint(**changes: Change) -> SequenceData:
    """With fields of its last checkpoint changed."""
    return in_group(checkpoints=lambda all_: (*all_[:-1], _changed(all_[-1], changes)))


def in_states(**changes: Change) -> SequenceData:
    """With fields of the states changed."""
    return replace(CONTENT, states=_changed(CONTENT.states, changes))


def in_held(**changes: Change) -> SequenceData:
    """With fields of the first sequence's state changed."""
    return in_states(held=lambda held: (_changed(held[0], changes), *held[1:]))


def _changed(value: Any, changes: dict[str, Change]) -> Any:
    return replace(value, **{name: f(getattr(value, name)) for name, f in changes.items()})


def put_at(index: Any, number: float) -> Change:
    """An array with one number changed."""

    def change(values: AnyArray) -> AnyArray:
        values = values.copy()
        values[index] = number
        return values

    return change


def layer_rows(part: str, change: Change) -> Change:
    """Rows of K or V changed in every layer."""
    return lambda rows: replace(rows, **{part: tuple(map(change, getattr(rows, part)))})


def first(change: Change) -> Change:
    """The first of a tuple changed."""
    return lambda values: (change(values[0]), *values[1:])


def cut(values: Any) -> Any:
    """Without the last one."""
    return values[:-1]


def as_floats(values: AnyArray) -> AnyArray:
    return values.astype(np.float64)


def upright(values: AnyArray) -> Any:
    return values.reshape(-1, 1) if values.ndim == 1 else values[:, None].copy()


def nothing(values: AnyArray) -> AnyArray:
    return np.array(0, values.dtype)


def backwards(values: AnyArray) -> Any:
    return values[..., ::-1].copy()


def twice(owners: AnyArray) -> AnyArray:
    return np.concatenate((owners, owners[:, :1]), axis=1)


def orphaned(owners: AnyArray) -> AnyArray:
    return owners[:, owners[0] != 0]


BROKEN = {
    "begins below 0": replace(CONTENT, start=-1),
    "begins beyond all": replace(CONTENT, start=MAX_POSITION),
    "begins behind its text": replace(CONTENT, start=3),
    "more sequences": replace(CONTENT, n_seqs=3),
    "fewer sequences": replace(CONTENT, n_seqs=1),
    "no sequence": replace(CONTENT, n_seqs=-1),
    "positions are floats": in_group(positions=as_floats),
    "positions are long": in_group(positions=lambda at: at.astype(np.int64)),
    "positions are upright": in_group(positions=upright),
    "positions are no array": in_group(positions=nothing),
    "a position below 0": in_group(positions=put_at(0, -1)),
    "a position too large": in_group(positions=put_at(-1, MAX_POSITION)),
    "positions run out": in_group(positions=cut),
    "another end": in_group(positions=put_at(-1, 90)),
    "tokens run out": in_group(tokens=cut),
    "a token below -1": in_group(tokens=put_at(0, -2)),
    "tokens are floats": in_group(tokens=as_floats),
    "owners are floats": in_group(owners=as_floats),
    "owners are short": in_group(owners=lambda pairs: pairs.astype(np.int32)),
    "owners are in one row": in_group(owners=lambda pairs: pairs.reshape(-1)),
    "owners are triples": in_group(owners=lambda pairs: pairs[[0, 1, 1]]),
    "a cell below 0": in_group(owners=put_at((0, 0), -1)),
    "a cell too many": in_group(owners=put_at((0, 0), 99)),
    "a sequence below 0": in_group(owners=put_at((1, 0), -1)),
    "a sequence too many": in_group(owners=put_at((1, 0), 2)),
    "an owner twice": in_group(owners=twice),
    "a cell without owner": in_group(owners=orphaned),
    "K runs out": in_group(rows=layer_rows("k", cut)),
    "V runs out": in_group(rows=layer_rows("v", cut)),
    "K of floats": in_group(rows=layer_rows("k", as_floats)),
    "V upright": in_group(rows=layer_rows("v", upright)),
    "slid of one sequence": in_group(evicted=cut),
    "slid in one row": in_group(evicted=first(lambda evicted: evicted[0])),
    "slid of floats": in_group(evicted=first(as_floats)),
    "slid descends": in_group(evicted=first(backwards)),
    "slid reaches into the window": in_group(evicted=first(put_at((0, -1), 14))),
    "slid below 0": in_group(evicted=first(put_at((0, 0), -1))),
    "slid of nobody": in_group(
        owners=lambda pairs: pairs[:, pairs[1] != 0], checkpoints=lambda _: ()
    ),
    "checkpoint is empty": in_checkpoint(positions=lambda at: at[:0], tokens=lambda ids: ids[:0]),
    "checkpoint is no array": in_checkpoint(positions=nothing),
    "checkpoint descends": in_checkpoint(positions=backwards),
    "checkpoint of another text": in_checkpoint(tokens=put_at(0, 7)),
    "checkpoint behind the end": in_checkpoint(positions=lambda at: at + 1),
    "checkpoint slid in one row": in_checkpoint(evicted=lambda evicted: evicted[0]),
    "checkpoint forgot what slid": in_checkpoint(evicted=lambda evicted: evicted[:, :-1]),
    "checkpoint without rows": in_checkpoint(rows=layer_rows("k", cut)),
    "checkpoint of nobody": in_checkpoint(owners=lambda _: ()),
    "checkpoint of strangers": in_checkpoint(owners=lambda _: (0, 2)),
    "checkpoint of one twice": in_checkpoint(owners=lambda _: (0, 0)),
    "checkpoint twice": in_group(checkpoints=lambda all_: (*all_, all_[-1])),
    "states of doubles": in_states(states=as_floats),
    "states in one row": in_states(states=lambda rows: rows.reshape(-1)),
    "states run out": in_states(states=lambda rows: rows[:1]),
    "states of one sequence": in_states(held=cut),
    "a state of nobody's cells": in_states(held=lambda held: (None, *held[1:])),
    "no such state": in_held(state=lambda _: 99),
    "a state below 0": in_held(state=lambda _: -1),
    "no such checkpoint": in_held(checkpoints=lambda pairs: ((pairs[0][0], 99),)),
    "a checkpoint beyond": in_held(checkpoints=lambda pairs: ((17, pairs[0][1]),)),
    "a checkpoint of nothing": in_held(checkpoints=lambda pairs: ((0, pairs[0][1]),)),
    "checkpoints in disorder": in_held(checkpoints=lambda pairs: pairs[::-1]),
    "a state of two texts": in_held(checkpoints=lambda pairs: ((2, pairs[0][1]),)),
    "a state of nothing": in_held(positions=lambda at: at[:0], tokens=lambda ids: ids[:0]),
    "a text that descends": in_held(positions=backwards),
    "a text without tokens": in_held(tokens=cut),
    "a text that ends elsewhere": in_held(positions=lambda at: at + 1),
    "a text of floats": in_held(positions=as_floats),
}

ELSEWHERE = {
    "groups of K and V": replace(CONTENT, groups=(FULL,)),
    "recurrent states": replace(CONTENT, states=None),
    "layers of K": in_group(rows=lambda rows: replace(rows, k=rows.k * 2)),
    "layers of V": in_group(rows=lambda rows: replace(rows, v=())),
    "bytes a row of K in layer 0": in_group(rows=layer_rows("k", lambda k: k[:, 1:])),
    "bytes a row of V in layer 0": in_group(rows=layer_rows("v", lambda v: np.tile(v, (1, 2)))),
    "values a state": in_states(states=lambda rows: np.tile(rows, (1, 2))),
}


def refused(content: SequenceData, error: type[SnapshotError]) -> SnapshotError:
    """The error by which a content is refused, nothing having changed."""
    target = hybrid("fws", size=40)
    put(target, 3, 5)
    before = everything(target)
    with pytest.raises(error) as caught:
        state_set(target, content, [0, 1])
    assert everything(target) == before
    assert type(caught.value) is error
    return caught.value


def test_the_content_that_all_others_are_made_from_is_sound() -> None:
    check_content(CONTENT, SPECS)
    assert SLIDING.evicted[0].shape[1] > 0
    assert len(SLIDING.checkpoints) > 1
    assert CONTENT.n_bytes > 0
    target = hybrid("fws", size=40)
    states_of(target)._texts = [()] * 99  # whatever numbers the states have
    state_set(target, CONTENT, [0, 1])
    target.check()


@pytest.mark.parametrize("what", BROKEN)
def test_a_content_that_contradicts_itself_is_refused(what: str) -> None:
    error = refused(BROKEN[what], SnapshotFileError)
    assert "contradicts itself" in str(error)


@pytest.mark.parametrize("what", ELSEWHERE)
def test_a_content_of_another_shape_is_refused_by_name(what: str) -> None:
    error = refused(ELSEWHERE[what], SnapshotMismatch)
    assert isinstance(error, SnapshotMismatch)
    assert error.field == what
    assert error.stored != error.wanted


# -- any change at all


def paths(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The ways to everything in a content."""
    if isinstance(value, tuple) and path:
        found = [way for i, one in enumerate(value) for way in paths(one, (*path, i))]
        return found if path[-2:-1] == ("checkpoints",) else [path, *found]  # a pair stays one
    if is_dataclass(value):
        names = [f.name for f in fields(value)]
        return [way for name in names for way in paths(getattr(value, name), (*path, name))]
    return [path]


def changed_at(value: Any, path: tuple[Any, ...], change: Change) -> Any:
    """The same with what a path leads to changed."""
    if not path:
        return change(value)
    if isinstance(value, tuple):
        i = path[0]
        return (*value[:i], changed_at(value[i], path[1:], change), *value[i + 1 :])
    return replace(value, **{path[0]: changed_at(getattr(value, path[0]), path[1:], change)})


PATHS = paths(CONTENT)
DTYPES = [np.int32, np.int64, np.uint8, np.float32, np.uint64, np.float64, np.bool_]


@st.composite
def damage(draw: st.DrawFn) -> Change:
    """A change of a number, a tuple or an array."""
    number = draw(st.integers(-3, 20) | st.sampled_from([2**31 - 1, -(2**31), 2**40]))
    at, how = draw(st.integers(0, 50)), draw(st.integers(0, 8))
    dtype = draw(st.sampled_from(DTYPES))

    def change(value: Any) -> Any:
        if isinstance(value, int) or value is None:
            return number
        if isinstance(value, tuple):
            return [value[:-1], value[::-1], (*value, *value[:1]), ()][how % 4]
        return _damaged(value, number, at, how, dtype)

    return change


def _damaged(values: AnyArray, number: int, at: int, how: int, dtype: type) -> Any:
    """An array with one value, its type, its shape or its order changed."""
    new = values.copy()
    if how < 3 and new.size:
        limits = np.iinfo(new.dtype) if new.dtype.kind in "iu" else np.finfo(np.float32)
        new.reshape(-1)[at % new.size] = min(max(number, int(limits.min)), int(limits.max))
    elif how == 3:
        new = new.astype(dtype)
    elif how == 4:
        new = new[: at % (len(new) + 1)]
    elif how == 5:
        new = new.reshape(-1)
    elif how == 6:
        new = new[..., ::-1]
    elif how == 7:
        new = np.concatenate((new, new), axis=at % new.ndim)
    else:
        new = new.reshape(new.shape[::-1])
    return new


@examples(120)
@given(st.lists(st.tuples(st.sampled_from(PATHS), damage()), min_size=1, max_size=2))
def test_whatever_is_changed_is_refused_or_harmless(
    changes: list[tuple[tuple[object, ...], Change]],
) -> None:
    content = CONTENT
    for path, change in changes:
        # The first change may have removed what the second is about.
        with suppress(IndexError, AttributeError, TypeError):
            content = changed_at(content, path, change)
    target = hybrid("fws", size=40)
    put(target, 3, 5)
    texts, before = {3: text_of(target, 3)}, everything(target)
    try:
        state_set(target, content, [0, 1])
    except SnapshotError:
        assert everything(target) == before
    else:
        check_texts(target, texts)
        target.rewind(0, 4)
        target.check()
        put(target, 3, 2)


def test_the_content_has_every_kind_of_part() -> None:
    kinds = (CellData, WindowData, StateData, SequenceStateData)
    names = {f.name for kind in kinds for f in fields(kind)}
    assert names <= {name for path in PATHS for name in path if isinstance(name, str)}
