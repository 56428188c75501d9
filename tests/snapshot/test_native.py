"""Snapshots as arrays and a description, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cache.content import RowBytes, SequenceData
from kvcellar.cache.content_checks import check_content
from kvcellar.errors import SnapshotFileError
from kvcellar.snapshot.native import (
    Declared,
    SnapshotArrays,
    from_arrays,
    outline,
    to_arrays,
)
from kvcellar.snapshot.snapshot import Snapshot
from kvcellar.types import AnyArray, KVType
from tests.profiles import examples
from tests.snapshot.samples import assert_same, memory_spec, sample

KINDS = st.sampled_from([KVType.F32, KVType.F16, KVType.Q8_0, KVType.Q4_0])


def written(snapshot: Snapshot) -> SnapshotArrays:
    """A description that went through JSON, as in a file."""
    arrays, about = to_arrays(snapshot)
    return SnapshotArrays(arrays, json.loads(json.dumps(about)))


def test_the_samples_are_what_a_cache_can_take() -> None:
    spec = memory_spec()
    assert spec.states is not None
    check_content(sample().content, [*spec.groups, spec.states])


@examples(30)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    kind_k=KINDS,
    kind_v=KINDS,
)
def test_a_snapshot_is_what_it_was(
    seed: int, lengths: list[int], kind_k: KVType, kind_v: KVType
) -> None:
    snapshot = sample(seed, lengths, kind_k, kind_v)
    again = from_arrays(written(snapshot))
    assert_same(snapshot, again)
    spec = memory_spec(kind_k, kind_v)
    assert spec.states is not None
    check_content(again.content, [*spec.groups, spec.states])


def test_what_each_field_becomes() -> None:
    snapshot = sample()
    again = from_arrays(written(snapshot))
    first, second, empty = again.texts
    assert (first.logits, first.self_extended, first.self_extended_end, first.inexact_from) == (
        None,
        (4, 2),
        1,
        1,
    )
    assert second.logits is not None
    assert snapshot.texts[1].logits is not None
    assert np.array_equal(second.logits, snapshot.texts[1].logits)
    assert (second.self_extended, second.inexact_from, empty.logits) == ((), None, None)
    assert again.note == {"for": "tests"}
    assert again.content.states is not None
    held = again.content.states.held
    assert held[0] is not None
    assert held[0].checkpoints == ((3, 1),)
    assert held[2] is None
    assert again.content.groups[1].checkpoints[0].owners == (0,)


def test_no_sequences_at_all() -> None:
    assert_same(sample(lengths=()), from_arrays(written(sample(lengths=()))))


def test_a_piece_says_where_it_begins() -> None:
    snapshot = sample()
    piece = replace(snapshot, content=replace(snapshot.content, start=5))
    assert from_arrays(written(piece)).content.start == 5


def test_only_attention_only_states() -> None:
    snapshot = sample()
    cells = SequenceData(3, snapshot.content.groups)
    assert_same(
        replace(snapshot, content=cells), from_arrays(written(replace(snapshot, content=cells)))
    )
    states = SequenceData(3, (), snapshot.content.states)
    print_ = {**snapshot.fingerprint, "groups": []}
    bare = replace(snapshot, content=states, fingerprint=print_)
    assert_same(bare, from_arrays(written(bare)))


def test_arrays_have_the_documented_names_types_and_shapes() -> None:
    arrays = to_arrays(sample()).arrays
    found = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    assert found == {
        "group.0.positions": ("<i4", (8,)),
        "group.0.tokens": ("<i4", (8,)),
        "group.0.owners": ("<i8", (2, 10)),
        "group.0.layer.0.k": ("<f2", (8, 64)),
        "group.0.layer.1.k": ("<f2", (8, 128)),
        "group.0.layer.0.v": ("<f2", (8, 64)),
        "group.1.positions": ("<i4", (6,)),
        "group.1.tokens": ("<i4", (6,)),
        "group.1.owners": ("<i8", (2, 6)),
        "group.1.layer.0.k": ("<f2", (6, 32)),
        "group.1.layer.0.v": ("<f2", (6, 32)),
        "group.1.slid.0": ("<i4", (2, 3)),
        "group.1.slid.1": ("<i4", (2, 1)),
        "group.1.checkpoint.0.positions": ("<i4", (3,)),
        "group.1.checkpoint.0.tokens": ("<i4", (3,)),
        "group.1.checkpoint.0.slid": ("<i4", (2, 0)),
        "group.1.checkpoint.0.layer.0.k": ("<f2", (3, 32)),
        "group.1.checkpoint.0.layer.0.v": ("<f2", (3, 32)),
        "states": ("<f4", (4, 9)),
        "state.0.positions": ("<i4", (6,)),
        "state.0.tokens": ("<i4", (6,)),
        "state.1.positions": ("<i4", (4,)),
        "state.1.tokens": ("<i4", (4,)),
        "sequence.1.logits": ("<f4", (11,)),
    }


@pytest.mark.parametrize(
    ("kind", "dtype", "width"),
    [(KVType.F32, "<f4", 64), (KVType.BF16, "|u1", 128), (KVType.Q8_0, "|u1", 68)],
)
def test_rows_are_numbers_where_there_is_a_plain_type(kind: KVType, dtype: str, width: int) -> None:
    array = to_arrays(sample(kind_k=kind)).arrays["group.0.layer.0.k"]
    assert (array.dtype.str, array.shape) == (dtype, (8, width))


def test_big_arrays_are_not_copied() -> None:
    snapshot = sample()
    arrays = to_arrays(snapshot).arrays
    assert np.shares_memory(arrays["group.0.layer.0.k"], snapshot.content.groups[0].rows.k[0])
    again = from_arrays(to_arrays(snapshot)).content.groups[0].rows.k[0]
    assert np.shares_memory(again, snapshot.content.groups[0].rows.k[0])


@pytest.mark.parametrize("field", list(to_arrays(sample()).description))
def test_a_missing_field_is_refused(field: str) -> None:
    arrays, about = written(sample())
    with pytest.raises(SnapshotFileError, match="damaged"):
        from_arrays(SnapshotArrays(arrays, {k: v for k, v in about.items() if k != field}))


@pytest.mark.parametrize("field", list(to_arrays(sample()).description))
@pytest.mark.parametrize("value", [None, "x", [1, 2], {"a": []}, -1, 1.5, 10**30, True])
def test_a_field_of_another_kind_is_refused_or_means_nothing_else(field: str, value: Any) -> None:
    arrays, about = written(sample())
    try:
        found = from_arrays(SnapshotArrays(arrays, {**about, field: value}))
    except SnapshotFileError:
        return
    # What is left are a start, or a note, or no states, which the check of contents looks at.
    assert field in ("start", "note", "states", "n_seqs")
    assert found.content.n_seqs == 3


NEEDED = [
    name for name in to_arrays(sample()).arrays if "slid.0" not in name and "slid.1" not in name
]


@pytest.mark.parametrize(
    "name", [name for name in NEEDED if ".layer." not in name and "logits" not in name]
)
def test_a_missing_array_is_refused(name: str) -> None:
    arrays, about = written(sample())
    with pytest.raises(SnapshotFileError, match="damaged"):
        from_arrays(SnapshotArrays({k: v for k, v in arrays.items() if k != name}, about))


@pytest.mark.parametrize("n", [0, 2, 4, 10**12, -1])
def test_another_number_of_sequences_is_refused(n: int) -> None:
    arrays, about = written(sample())
    with pytest.raises(SnapshotFileError, match="damaged"):
        from_arrays(SnapshotArrays(arrays, {**about, "n_seqs": n}))


def test_rows_that_are_no_table_are_refused() -> None:
    arrays, about = written(sample())
    flat = {**arrays, "group.0.layer.0.k": arrays["group.0.layer.0.k"].reshape(-1)}
    with pytest.raises(SnapshotFileError, match="rows of shape"):
        from_arrays(SnapshotArrays(flat, about))


def test_fields_that_a_later_program_added_are_ignored() -> None:
    arrays, about = written(sample())
    assert_same(from_arrays(SnapshotArrays(arrays, {**about, "more": 1})), sample())


def test_a_missing_layer_is_found_by_the_check_of_contents() -> None:
    arrays, about = written(sample())
    del arrays["group.0.layer.0.k"]
    found = from_arrays(SnapshotArrays(arrays, about))
    assert found.content.groups[0].rows.k[0].shape == (8, 0)
    assert isinstance(found.content.groups[0].rows, RowBytes)


# -- what is known before arrays are read


def declared(arrays: Mapping[str, AnyArray]) -> dict[str, Declared]:
    return {name: Declared(array.dtype.str, array.shape) for name, array in arrays.items()}


@examples(30)
@given(st.integers(0, 99), st.lists(st.integers(0, 7), min_size=1, max_size=4), KINDS, KINDS)
def test_the_outline_of_a_snapshot(
    seed: int, lengths: list[int], kind_k: KVType, kind_v: KVType
) -> None:
    snapshot = sample(seed, lengths, kind_k, kind_v)
    arrays, about = written(snapshot)
    found, content = outline(about, declared(arrays)), snapshot.content
    assert found.fingerprint == about["fingerprint"]
    assert found.n_seqs == content.n_seqs
    assert found.n_cells == tuple(len(group.positions) for group in content.groups)
    kept = [[len(one.positions) for one in group.checkpoints] for group in content.groups]
    assert found.n_kept == tuple(map(sum, kept))
    assert content.states is not None
    assert found.n_states == len(content.states.states)
    assert found.n_logits == tuple(len(t.logits) for t in snapshot.texts if t.logits is not None)


@pytest.mark.parametrize("name", list(to_arrays(sample()).arrays))
def test_an_array_of_another_type_or_size_is_refused(name: str) -> None:
    arrays, about = written(sample())
    sound = declared(arrays)
    dtype, shape = sound[name]
    wrong = [Declared("<f8", shape), Declared(dtype, (*shape, 1)), Declared(dtype, shape[:-1])]
    # The number of cells, tokens and states is what arrays say; so each alone must not say more.
    counted = ("owners", "slid.0", "slid.1", ".slid", "logits")
    if name != "states" and not name.endswith(counted):
        wrong.append(Declared(dtype, (shape[0] + 1, *shape[1:])))
    if not name.endswith(("positions", "tokens", "owners", "slid.0", "slid.1", ".slid", "logits")):
        wrong.append(Declared(dtype, (*shape[:-1], shape[-1] + 1)))
    for one in wrong:
        with pytest.raises(SnapshotFileError, match=r"is needed$|is damaged"):
            outline(about, {**sound, name: one})


@pytest.mark.parametrize(
    ("name", "shape"),
    [("states", (9, 9)), ("group.0.owners", (2, 25)), ("group.1.owners", (2, 19))],
)
def test_more_than_the_rest_can_need_is_refused(name: str, shape: tuple[int, ...]) -> None:
    arrays, about = written(sample())
    sound = declared(arrays)
    with pytest.raises(SnapshotFileError, match="damaged"):
        outline(about, {**sound, name: Declared(sound[name].dtype, shape)})


@pytest.mark.parametrize(
    "name",
    [
        "more",
        "group.0.layer.1.v",  # V of that layer is in its K
        "group.0.layer.2.k",
        "group.2.positions",
        "group.1.checkpoint.1.slid",
        "group.0.slid.3",
        "state.2.tokens",
        "sequence.3.logits",
    ],
)
def test_an_array_that_nothing_needs_is_refused(name: str) -> None:
    arrays, about = written(sample())
    more = {**declared(arrays), name: Declared("<f4", (10**9,))}
    with pytest.raises(SnapshotFileError, match=f"no snapshot has: {name}"):
        outline(about, more)


@pytest.mark.parametrize("name", [name for name in NEEDED if "logits" not in name])
def test_an_array_that_is_needed_is_missed(name: str) -> None:
    arrays, about = written(sample())
    sound = declared(arrays)
    del sound[name]
    with pytest.raises(SnapshotFileError, match=f"the array {name} is missing"):
        outline(about, sound)
