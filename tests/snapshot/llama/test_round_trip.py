"""What is written is read again, whatever a memory consists of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.cache.content import CellData, SequenceData
from kvcellar.cache.content_checks import check_content
from kvcellar.snapshot.llama.layout import FileGeneration, Kind
from kvcellar.snapshot.llama.reader import read_llama_file
from kvcellar.snapshot.llama.to_content import to_content
from kvcellar.types import Int32Array, MemorySpec
from tests.snapshot.llama.shapes import (
    ARCH,
    N_VOCAB,
    OLD,
    SPECS,
    bytes_of,
    content_of,
    file_of,
    first_tokens,
    parts_of,
    plain,
)

CASES = [(name, "2026-10") for name in SPECS] + [(name, "2025-01") for name in OLD]


def again(
    content: SequenceData, spec: MemorySpec, kind: Kind, generation: FileGeneration, v_trans: bool
) -> SequenceData:
    """A content after it was written and read; every byte of the file is accounted for."""
    data = bytes_of(file_of(content, spec, kind, generation, v_trans), spec)
    file = read_llama_file(data, spec)
    assert (file.kind, file.generation) == (kind, generation)
    assert bytes_of(file, spec) == data
    restored = to_content(file, spec, ARCH, N_VOCAB)
    check_content(restored.content, parts_of(spec))
    if kind == "session":
        assert restored.seq_ids == tuple(2 * seq for seq in range(content.n_seqs))
    return restored.content


def assert_same(got: SequenceData, wanted: SequenceData) -> None:
    """All is equal, but that tokens which are not the first sequence's are unknown."""
    assert got.n_seqs == wanted.n_seqs
    for mine, theirs in zip(got.groups, wanted.groups, strict=True):
        assert_same_cells(mine, theirs)
    assert (got.states is None) == (wanted.states is None)
    if got.states is None or wanted.states is None:
        return
    np.testing.assert_array_equal(got.states.states, wanted.states.states)
    for seq, (one, other) in enumerate(zip(got.states.held, wanted.states.held, strict=True)):
        assert one is not None
        assert other is not None
        assert one.state == other.state
        n = len(one.positions) if got.groups or seq == 0 else 1  # of a state alone only its end
        np.testing.assert_array_equal(one.positions, other.positions[-n:])
        if seq == 0:
            np.testing.assert_array_equal(one.tokens, other.tokens)


def assert_same_cells(got: CellData, wanted: CellData) -> None:
    np.testing.assert_array_equal(got.positions, wanted.positions)
    for mine, theirs in ((got.rows.k, wanted.rows.k), (got.rows.v, wanted.rows.v)):
        for rows, wanted_rows in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(rows, wanted_rows)
    pairs = {tuple(pair) for pair in wanted.owners.T.tolist()}
    assert {tuple(pair) for pair in got.owners.T.tolist()} == pairs
    known = np.isin(np.arange(len(got.positions)), got.owners[0][got.owners[1] == 0])
    np.testing.assert_array_equal(got.tokens, np.where(known, wanted.tokens, -1))
    for seq, (evicted, other) in enumerate(zip(got.evicted, wanted.evicted, strict=True)):
        np.testing.assert_array_equal(evicted[0], other[0])
        unknown = np.full(other.shape[1], -1, np.int32)
        np.testing.assert_array_equal(evicted[1], other[1] if seq == 0 else unknown)


@pytest.mark.parametrize(("name", "generation"), CASES)
@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 9), v_trans=st.booleans(), seed=st.integers(0, 99))
def test_a_sequence(
    name: str, generation: FileGeneration, n: int, v_trans: bool, seed: int
) -> None:
    spec = SPECS[name]
    content = content_of(spec, 0, [n], seed)
    across = v_trans and name != "quantised"
    assert_same(again(content, spec, "sequence", generation, across), content)


@pytest.mark.parametrize(("name", "generation"), CASES)
@settings(max_examples=15, deadline=None)
@given(
    n_shared=st.integers(0, 6),
    n_own=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_a_session(
    name: str, generation: FileGeneration, n_shared: int, n_own: list[int], seed: int
) -> None:
    spec = SPECS[name]
    content = content_of(spec, n_shared, n_own, seed)
    assert_same(again(content, spec, "session", generation, False), content)


@pytest.mark.parametrize(("name", "generation"), CASES)
def test_an_empty_sequence(name: str, generation: FileGeneration) -> None:
    spec = SPECS[name]
    content = content_of(spec, 0, [0])
    restored = again(content, spec, "sequence", generation, False)
    assert restored.n_seqs == 1
    assert restored.span(0) == (-1, -1)


@pytest.mark.parametrize("kind", ["sequence", "session"])
def test_an_old_file_of_windows_that_have_not_slid(kind: Kind) -> None:
    spec = SPECS["windows"]
    content = content_of(spec, 0, [3])
    assert_same(again(content, spec, kind, "2025-01", False), content)


@pytest.mark.parametrize("kind", ["sequence", "session"])
def test_old_numbers_over_the_layout_of_today(kind: Kind) -> None:
    """llama.cpp changed what it wrote long before it changed the number."""
    spec = plain()
    content = content_of(spec, 0, [5])
    old = replace(file_of(content, spec, kind), version={"sequence": 2, "session": 9}[kind])
    file = read_llama_file(bytes_of(old, spec), spec)
    assert (file.generation, file.version) == ("2026-10", old.version)
    assert_same(to_content(file, spec, ARCH, N_VOCAB).content, content)


def test_a_buffer_in_memory() -> None:
    """What ``llama_state_seq_get_data`` gives: no tokens, so none are known."""
    spec = plain()
    content = content_of(spec, 0, [5])
    buffer = replace(
        file_of(content, spec), kind="buffer", version=0, tokens=np.empty(0, np.int32), seq_id=7
    )
    data = bytes_of(buffer, spec)
    assert data[:8] == bytes([0xD8, 0x3C, 0x14, 0xAF, 7, 0, 0, 0])
    file = read_llama_file(data, spec)
    assert (file.kind, file.seq_id) == ("buffer", 7)
    group = to_content(file, spec, ARCH, N_VOCAB).content.groups[0]
    np.testing.assert_array_equal(group.rows.k[1], content.groups[0].rows.k[1])
    assert group.tokens.tolist() == [-1] * 5


def test_several_streams_become_one() -> None:
    """Contexts whose sequences do not share cells write a stream a sequence, some empty."""
    spec = plain()
    one, other = content_of(spec, 0, [3], 1), content_of(spec, 0, [4], 2)
    streams = [file_of(content, spec, "session").parts[0][0] for content in (one, other)]
    ids: list[Int32Array] = [np.full(n, seq, np.int32) for n, seq in ((3, 5), (4, 1))]
    streams = [
        replace(stream, cells=replace(stream.cells, ids=mine))
        for stream, mine in zip(streams, ids, strict=True)
    ]
    empty = file_of(content_of(spec, 0, [0]), spec, "session").parts[0][0]
    file = replace(file_of(one, spec, "session"), parts=((empty, *streams, empty),))
    data = bytes_of(replace(file, tokens=np.array(first_tokens(other), np.int32)), spec)
    got = to_content(read_llama_file(data, spec), spec, ARCH, N_VOCAB)
    assert got.seq_ids == (1, 5)
    group = got.content.groups[0]
    for number, content in enumerate((other, one)):
        cells = group.cells_of(number)
        wanted = content.groups[0]
        np.testing.assert_array_equal(group.rows.k[0][cells], wanted.rows.k[0])
        np.testing.assert_array_equal(group.rows.v[1][cells], wanted.rows.v[1])
    assert group.tokens[group.cells_of(0)].tolist() == first_tokens(other)
    assert group.tokens[group.cells_of(1)].tolist() == [-1] * 3
