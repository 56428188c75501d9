"""Files put together by hand, number by number, as the tables of the documentation have them."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from kvcellar.errors import SnapshotError
from kvcellar.snapshot.llama.reader import read_llama_file
from kvcellar.snapshot.llama.to_content import to_content
from kvcellar.types import CacheSpec, LayerSpec, MemorySpec
from tests.snapshot.llama.shapes import ARCH, LATENT, N_VOCAB, bytes_of, file_of, hybrid, windowed

SPEC = MemorySpec.single(CacheSpec(8, 2, (LayerSpec(1, 2, 2),), padding=1))
"""One layer; K and V of a cell are two halves each."""

K = [np.array(row, np.float16).tobytes() for row in ([1, 2], [3, 4])]
V = [np.array(row, np.float16).tobytes() for row in ([5, 6], [7, 8])]
ROWS = struct.pack("<2IiQ", 0, 1, 1, 4) + K[0] + K[1] + struct.pack("<iQ", 1, 4) + V[0] + V[1]
ACROSS = (
    struct.pack("<2IiQ", 1, 1, 1, 4)
    + (K[0] + K[1] + struct.pack("<i2I", 1, 2, 2))
    + np.array([5, 7, 6, 8], np.float16).tobytes()
)


def head(magic: bytes, version: int) -> bytes:
    """Two tokens: 42 at position 0, 43 at position 1; the file has the cell of position 1 first."""
    return magic[::-1] + struct.pack("<2I2i", version, 2, 42, 43)


NAME = struct.pack("<I", 4) + b"tiny"
OUTPUTS = struct.pack("<IiQ2fQ", 1, 1, 2, 0.5, 1.5, 0)
UNOWNED = struct.pack("<I4I", 2, 1, 0, 0, 0)
OWNED = struct.pack("<2I6I", 1, 2, 1, 1, 4, 0, 1, 4)
FILES = {
    "old sequence": head(b"ggsq", 2) + UNOWNED + ROWS,
    "old sequence, across": head(b"ggsq", 2) + UNOWNED + ACROSS,
    "old session": head(b"ggsn", 9) + NAME + OUTPUTS + OWNED[4:] + ROWS,
    "sequence": head(b"ggsq", 3) + OWNED + ROWS,
    "sequence, across": head(b"ggsq", 3) + OWNED + ACROSS,
    "session": head(b"ggsn", 10) + NAME + OWNED + ROWS,
    "sequence between": head(b"ggsq", 2) + OWNED + ROWS,
    "buffer": struct.pack("<Ii", 0xAF143CD8, 4) + OWNED + ROWS,
}


@pytest.mark.parametrize("name", FILES)
def test_what_the_bytes_say(name: str) -> None:
    file = read_llama_file(FILES[name], SPEC)
    assert file.kind == name.removeprefix("old ").split(",")[0].split()[0]
    assert file.generation == ("2025-01" if name.startswith("old") else "2026-10")
    assert file.arch == ("tiny" if "session" in name else None)
    assert file.tokens.tolist() == ([] if name == "buffer" else [42, 43])
    ((stream,),) = file.parts
    assert stream.v_trans == ("across" in name)
    assert stream.cells.positions.tolist() == [1, 0]
    assert stream.cells.ids.tolist() == ([] if name.startswith("old seq") else [4, 4])
    assert [row.tobytes() for row in stream.k[0].rows] == K
    assert [row.tobytes() for row in stream.v[0].rows] == V


@pytest.mark.parametrize("name", FILES)
def test_the_same_bytes_are_written(name: str) -> None:
    assert bytes_of(read_llama_file(FILES[name], SPEC), SPEC) == FILES[name]


@pytest.mark.parametrize("name", FILES)
def test_cells_come_in_the_order_of_positions(name: str) -> None:
    file = read_llama_file(FILES[name], SPEC)
    restored = to_content(file, SPEC, ARCH, N_VOCAB)
    (group,) = restored.content.groups
    assert restored.seq_ids == ((4,) if "session" in name else (0,))
    assert group.positions.tolist() == [0, 1]
    assert group.tokens.tolist() == ([-1, -1] if name == "buffer" else [42, 43])
    assert [row.tobytes() for row in group.rows.k[0]] == [K[1], K[0]]
    assert [row.tobytes() for row in group.rows.v[0]] == [V[1], V[0]]


def test_an_old_session_keeps_its_logits() -> None:
    outputs = read_llama_file(FILES["old session"], SPEC).outputs
    assert outputs is not None
    assert outputs.rows.tolist() == [1]
    assert outputs.logits.tolist() == [0.5, 1.5]
    assert len(outputs.embeddings) == 0


def test_the_order_of_parts() -> None:
    """Layers without a window, those with one, then states: inputs of all, states of all."""
    spec = hybrid()
    row = struct.pack("<4I", 0x67677371, 3, 1, 9) + struct.pack("<5I", 1, 1, 0, 1, 0)
    kv = struct.pack("<2IiQ", 0, 1, 1, 8) + bytes(8) + struct.pack("<iQ", 1, 4) + bytes(4)
    conv = struct.pack("<iQ3f", 0, 12, 1, 2, 3) + struct.pack("<iQf", 0, 4, 6)
    ssm = struct.pack("<iQ2f", 0, 8, 4, 5) + struct.pack("<iQ", 0, 0)
    states = struct.pack("<3I", 1, 0, 0) + struct.pack("<2I", 0, 3) + conv + ssm
    data = row + kv + states
    content = to_content(read_llama_file(data, spec), spec, ARCH, N_VOCAB).content
    assert content.states is not None
    assert content.states.states.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert content.groups[0].tokens.tolist() == [9]


def test_layers_without_a_window_come_first() -> None:
    spec = windowed()
    cells = struct.pack("<5I", 1, 1, 0, 1, 0)
    one = struct.pack("<2I", 0, 1) + _layer(1) + struct.pack("<iQ", 1, 4) + bytes(4)
    two = struct.pack("<2I", 0, 2) + _layer(2) + _layer(3)
    two += 2 * (struct.pack("<iQ", 1, 4) + bytes(4))
    data = struct.pack("<4I", 0x67677371, 3, 1, 9) + cells + one + cells + two
    groups = to_content(read_llama_file(data, spec), spec, ARCH, N_VOCAB).content.groups
    assert [[int(k[0, 0]) for k in group.rows.k] for group in groups] == [[1], [2, 3]]


def test_where_every_layer_has_a_window_an_empty_part_comes_first() -> None:
    group = windowed().groups[1]
    spec = MemorySpec.single(group)
    cells = struct.pack("<5I", 1, 1, 0, 1, 0)
    none = struct.pack("<2I", 0, 0)
    two = struct.pack("<2I", 0, 2) + _layer(2) + _layer(3)
    two += 2 * (struct.pack("<iQ", 1, 4) + bytes(4))
    data = struct.pack("<4I", 0x67677371, 3, 1, 9) + cells + none + cells + two
    file = read_llama_file(data, spec)
    assert bytes_of(file, spec) == data
    content = to_content(file, spec, ARCH, N_VOCAB).content
    assert [int(k[0, 0]) for k in content.groups[0].rows.k] == [2, 3]


def test_an_old_file_has_all_layers_in_one_part() -> None:
    """Windows were masks then: what they hide was kept."""
    spec = windowed()
    layers = b"".join(map(_layer, (1, 2, 3)))
    layers += 3 * (struct.pack("<iQ", 1, 4) + bytes(4))
    data = struct.pack("<4I", 0x67677371, 2, 1, 9) + struct.pack("<5I", 1, 0, 0, 0, 3) + layers
    file = read_llama_file(data, spec)
    assert bytes_of(file, spec) == data
    groups = to_content(file, spec, ARCH, N_VOCAB).content.groups
    assert [[int(k[0, 0]) for k in group.rows.k] for group in groups] == [[2], [1, 3]]


def test_of_latent_attention_what_is_rotated_stands_last() -> None:
    """There is no V; ours begins with what is rotated."""
    spec = MemorySpec.single(CacheSpec(8, 2, (LATENT,), padding=1))
    row = np.array([3, 4, 5, 6, 1, 2], np.float16).tobytes()
    data = struct.pack("<4I", 0x67677371, 3, 1, 9) + struct.pack("<5I", 1, 1, 0, 1, 0)
    data += struct.pack("<2IiQ", 0, 1, 1, 12) + row
    file = read_llama_file(data, spec)
    assert bytes_of(file, spec) == data
    content = to_content(file, spec, ARCH, N_VOCAB).content
    rows = content.groups[0].rows
    assert rows.k[0].view(np.float16).tolist() == [[1, 2, 3, 4, 5, 6]]
    assert rows.v[0].shape == (1, 0)
    assert bytes_of(file_of(content, spec), spec) == data


@pytest.mark.parametrize("name", FILES)
def test_every_prefix_is_refused(name: str) -> None:
    for n in range(len(FILES[name])):
        with pytest.raises(SnapshotError, match=r"offset \d+|no state file|has layers"):
            read_llama_file(FILES[name][:n], SPEC)


@pytest.mark.parametrize("name", FILES)
def test_a_byte_too_many_is_refused(name: str) -> None:
    with pytest.raises(SnapshotError, match="offset"):
        read_llama_file(FILES[name] + b"\0", SPEC)


def test_more_streams_than_there_can_be_are_refused() -> None:
    """Empty ones are 4 bytes in a file and many more in memory."""
    head = struct.pack("<4I", 0x67677371, 3, 1, 9)
    data = head + struct.pack("<5001I", 5000, *[0] * 5000)
    with pytest.raises(SnapshotError, match="5000 streams"):
        read_llama_file(data, SPEC)


def test_what_is_not_kept_is_not_read() -> None:
    """A file that lists other numbers of tokens than it has cells: no token is known."""
    file = read_llama_file(FILES["sequence"], SPEC)
    for listed in ([42], [42, 43, 44], [42, 42, 42, 42]):
        other = replace(file, tokens=np.array(listed, np.int32))
        content = to_content(other, SPEC, ARCH, N_VOCAB).content
        assert content.groups[0].tokens.tolist() == [-1, -1]


def _layer(first: int) -> bytes:
    """K of one cell in one layer, told by its first byte."""
    return struct.pack("<iQ", 1, 8) + bytes([first]) + bytes(7)
