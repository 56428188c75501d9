"""Snapshots stored as other types: which rows are converted, how, and what is refused."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.ggml.store import from_rows, to_rows
from kvcellar.backends.hadamard import transform
from kvcellar.errors import SnapshotFileError
from kvcellar.snapshot.snapshot import Snapshot, check_same, converted, fingerprint
from kvcellar.testing.golden import nmse
from kvcellar.types import ByteArray, CacheSpec, KVType, RowFormat
from tests.snapshot.samples import assert_same, memory_spec, sample


def specs(kind_k: KVType = KVType.F16, kind_v: KVType = KVType.F16) -> tuple[CacheSpec, ...]:
    return memory_spec(kind_k, kind_v).groups


def by_ggml(rows: ByteArray, src: RowFormat, dst: RowFormat) -> ByteArray:
    plain = transform(from_rows(rows, src.kind), src.hadamard)
    return to_rows(transform(plain, dst.hadamard), dst.kind)


def never(*_: object) -> ByteArray:
    raise AssertionError("nothing is to be converted")


def numbers(kind_k: KVType = KVType.F16, kind_v: KVType = KVType.F16) -> Snapshot:
    """A sample whose rows are numbers between -1 and 1."""
    snapshot = sample(kind_k=kind_k, kind_v=kind_v)
    rng = np.random.default_rng(5)

    def fill(rows: ByteArray, kind: KVType) -> ByteArray:
        width = rows.shape[1] // kind.block_bytes * kind.block_size
        return to_rows(rng.uniform(-1, 1, (len(rows), width)).astype(np.float32), kind)

    def refill(one: Any) -> Any:
        k = tuple(fill(rows, kind_k) for rows in one.rows.k)
        v = tuple(fill(rows, kind_v) for rows in one.rows.v)
        return replace(one, rows=replace(one.rows, k=k, v=v))

    groups = tuple(
        replace(refill(group), checkpoints=tuple(map(refill, group.checkpoints)))
        for group in snapshot.content.groups
    )
    return replace(snapshot, content=replace(snapshot.content, groups=groups))


def test_the_same_types_convert_nothing() -> None:
    snapshot = sample()
    assert converted(snapshot, specs(), never) is snapshot


@pytest.mark.parametrize("kind_k", [KVType.F32, KVType.Q8_0])
@pytest.mark.parametrize("kind_v", [KVType.F16, KVType.Q4_0])
def test_all_rows_are_converted_and_said_to_be(kind_k: KVType, kind_v: KVType) -> None:
    old, wanted = numbers(), specs(kind_k, kind_v)
    new = converted(old, wanted, by_ggml)
    check_same(new.fingerprint, fingerprint("sample", "ab" * 32, memory_spec(kind_k, kind_v)))
    for g, spec in enumerate(wanted):
        group, before = new.content.groups[g], old.content.groups[g]
        pairs = [(group.rows, before.rows)]
        pairs += [
            (a.rows, b.rows) for a, b in zip(group.checkpoints, before.checkpoints, strict=True)
        ]
        for rows, was in pairs:
            for i in range(len(spec.layers)):
                f16 = RowFormat(KVType.F16)
                assert np.array_equal(rows.k[i], by_ggml(was.k[i], f16, spec.k_format(i)))
                if spec.layers[i].n_embd_v:
                    assert np.array_equal(rows.v[i], by_ggml(was.v[i], f16, spec.v_format(i)))
    assert new.content.states is old.content.states
    assert new.texts == old.texts


def test_there_and_back_is_exact_where_the_wider_type_holds_all() -> None:
    old = numbers()
    wide = converted(old, specs(KVType.F32, KVType.F32), by_ggml)
    assert_same(converted(wide, specs(), by_ggml), old)


def test_there_and_back_is_close_under_a_transform() -> None:
    old = numbers()
    spec = specs(KVType.Q8_0, KVType.Q8_0)
    assert [spec[0].hadamard_k(i) for i in range(2)] == [0, 128]
    back = converted(converted(old, spec, by_ggml), specs(), by_ggml)
    for was, now in zip(old.content.groups[0].rows.k, back.content.groups[0].rows.k, strict=True):
        error = nmse(from_rows(now, KVType.F16), from_rows(was, KVType.F16))
        assert 0 < error < 1e-4


def test_one_part_alone() -> None:
    old = numbers()
    new = converted(old, specs(KVType.F16, KVType.Q8_0), by_ggml)
    assert new.content.groups[0].rows.k[0] is old.content.groups[0].rows.k[0]
    assert new.content.groups[0].rows.v[0].shape != old.content.groups[0].rows.v[0].shape


def bent(change: dict[str, Any]) -> Snapshot:
    """A sample whose fingerprint says something else of its first group."""
    snapshot = sample()
    print_: Any = deepcopy(dict(snapshot.fingerprint))
    print_["groups"][0].update(change)
    return replace(snapshot, fingerprint=print_)


@pytest.mark.parametrize(
    "change",
    [
        {"type_k": "q5_0"},  # of whose blocks the rows are no multiple
        {"type_v": "f17"},
        {"type_k": None},
        {"hadamard_k": [3, 0]},
        {"hadamard_k": [-64, 0]},
        {"hadamard_k": [128, 0]},
        {"hadamard_k": [2**40, 0]},
        {"hadamard_k": [64.0, 0]},
        {"hadamard_k": [64]},
        {"hadamard_v": 64},
        {"hadamard_v": None},
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SnapshotFileError, match=r"contradicts|damaged"):
        converted(bent(change), specs(KVType.F32, KVType.F32), by_ggml)


def test_rows_of_no_bytes_pass() -> None:
    new = converted(numbers(), specs(KVType.Q8_0, KVType.F32), by_ggml)
    assert new.content.groups[0].rows.v[1].shape == (8, 0)
