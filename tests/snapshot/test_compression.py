"""Compressed arrays."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from kvcellar.errors import LibraryError, SnapshotFileError
from kvcellar.snapshot.container import (
    MAX_RATIO,
    from_bytes,
    pack,
    read_file,
    to_bytes,
    unpack,
    write_file,
)
from kvcellar.snapshot.native import to_arrays
from kvcellar.types import AnyArray
from tests.snapshot.samples import sample

DTYPES = st.sampled_from([np.uint8, np.int32, np.int64, np.float16, np.float32])


def packed(array: AnyArray) -> tuple[AnyArray, dict[str, Any]]:
    data, how = pack(array)
    assert how is not None
    return data, how


ALIKE = np.arange(1000, dtype=np.int32).reshape(10, 100)


@given(npst.arrays(DTYPES, npst.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=40)))
def test_what_is_packed_is_unpacked(array: AnyArray) -> None:
    data, how = pack(array)
    if how is None:
        assert data is array
        return
    again = unpack(data, how)
    assert (again.dtype, again.shape, again.tobytes()) == (
        array.dtype,
        array.shape,
        array.tobytes(),
    )
    assert data.nbytes < array.nbytes <= MAX_RATIO * data.nbytes


def test_what_is_alike_becomes_small() -> None:
    data, how = packed(ALIKE)
    assert data.nbytes < ALIKE.nbytes / 4
    assert how == {"codec": "zstd", "dtype": "<i4", "shape": [10, 100]}


@pytest.mark.parametrize(
    "array",
    [
        np.random.default_rng(0).integers(0, 256, 500, np.uint8),  # nothing is gained
        np.zeros(10_000_000, np.uint8),  # too much is
        np.empty((0, 5), np.float32),
    ],
)
def test_what_would_gain_nothing_or_too_much_stays(array: AnyArray) -> None:
    data, how = pack(array)
    assert data is array
    assert how is None


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "lz4"},
        {"dtype": "O"},
        {"dtype": "V4"},
        {"dtype": "nonsense"},
        {"dtype": None},
        {"dtype": "<M8[s]"},
        {"shape": [10, 99]},
        {"shape": [-10, -100]},
        {"shape": [10, 100, 2**70]},
        {"shape": [2**70, 0]},
        {"shape": "x"},
        {"shape": [None]},
        {"shape": 5},
        {"shape": [float("inf")]},
        {"shape": [1.5e308] * 9},
    ],
)
def test_another_way_to_unpack_is_refused(change: dict[str, Any]) -> None:
    data, how = packed(ALIKE)
    with pytest.raises(SnapshotFileError, match="compressed array is damaged"):
        unpack(data, {**how, **change})


@pytest.mark.parametrize("field", ["codec", "dtype", "shape"])
def test_a_missing_field_is_refused(field: str) -> None:
    data, how = packed(ALIKE)
    del how[field]
    with pytest.raises(SnapshotFileError, match=field):
        unpack(data, how)


def test_damaged_frames_are_refused_or_give_as_many_bytes() -> None:
    data, how = packed(ALIKE)
    rng = np.random.default_rng(1)
    for _ in range(300):
        damaged = data.copy()
        damaged[rng.integers(len(data))] ^= 1 << rng.integers(8)
        try:
            assert unpack(damaged, how).nbytes == ALIKE.nbytes
        except SnapshotFileError:
            continue
    with pytest.raises(SnapshotFileError):
        unpack(data[:-1], how)
    with pytest.raises(SnapshotFileError):
        unpack(data[:0], how)


def bomb(n_bytes: int) -> AnyArray:
    """A small frame of many zeros."""
    frame = zstandard.ZstdCompressor(level=3).compress(bytes(n_bytes))
    return np.frombuffer(frame, np.uint8)


def test_a_bomb_is_refused_before_it_unfolds(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = bomb(50_000_000)
    assert len(frame) * MAX_RATIO < 50_000_000
    monkeypatch.delattr(zstandard, "ZstdDecompressor")
    how = {"codec": "zstd", "dtype": "|u1", "shape": [50_000_000]}
    with pytest.raises(SnapshotFileError, match="would become 50000000"):
        unpack(frame, how)


def test_a_frame_that_is_larger_than_it_may_be_is_refused() -> None:
    how = {"codec": "zstd", "dtype": "|u1", "shape": [1000]}
    with pytest.raises(SnapshotFileError, match="50000000 bytes for 1000"):
        unpack(bomb(50_000_000), how)


def test_a_frame_that_says_it_is_smaller_than_it_is_is_refused() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(range(256)) * 300))
    at = frame.index((76_800).to_bytes(4, "little"))
    frame[at : at + 4] = (76_000).to_bytes(4, "little")
    how = {"codec": "zstd", "dtype": "|u1", "shape": [76_000]}
    with pytest.raises(SnapshotFileError, match="damaged"):
        unpack(np.frombuffer(bytes(frame), np.uint8), how)


def test_no_memory_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def decompress(self, _: bytes) -> bytes:
            raise MemoryError

    data, how = packed(ALIKE)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", Full)
    with pytest.raises(SnapshotFileError, match="no memory"):
        unpack(data, how)


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    write_file(path, to_arrays(sample(lengths=(40, 0, 0))), compress=True)
    plain = to_bytes(to_arrays(sample()), compress=False)
    before = path.read_bytes()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for call in (
        lambda: write_file(path, to_arrays(sample()), compress=True),
        lambda: to_bytes(to_arrays(sample()), compress=True),
        lambda: read_file(path),
        lambda: from_bytes(before),
    ):
        with pytest.raises(LibraryError, match=r"kvcellar\[zstd\]"):
            call()
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
    assert from_bytes(plain).arrays
