"""A state file of llama.cpp, value to bytes: what was read is written back to the byte."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import numpy as np

from kvcellar.snapshot.llama.layout import (
    F32_ID,
    MAGIC,
    FileCells,
    FileStates,
    LayerRows,
    LlamaFile,
    Stream,
)


def file_pieces(file: LlamaFile, n_layer: int) -> Iterator[bytes]:
    """Yield the bytes of a file; ``n_layer`` is how many layers the model has."""
    is_old = file.generation == "2025-01"
    if file.kind == "buffer":
        yield struct.pack("<Ii", MAGIC["buffer"], file.seq_id)
    else:
        yield struct.pack("<3I", MAGIC[file.kind], file.version, len(file.tokens))
        yield file.tokens.astype("<i4").tobytes()
    if file.arch is not None:
        name = file.arch.encode()
        yield struct.pack("<I", len(name)) + name
    if file.outputs is not None:
        yield struct.pack("<I", len(file.outputs.rows)) + file.outputs.rows.tobytes()
        for values in (file.outputs.logits, file.outputs.embeddings):
            yield struct.pack("<Q", len(values)) + values.tobytes()
    for part in file.parts:
        if not is_old:
            yield struct.pack("<I", len(part))
        for stream in part:
            yield from _stream(stream, is_old)
    if file.states is not None:
        yield from _states(file.states, n_layer)


def _stream(stream: Stream, is_old: bool) -> Iterator[bytes]:
    yield _cells(stream.cells)
    if len(stream.cells) == 0 and not is_old:
        return
    yield struct.pack("<2I", stream.v_trans, len(stream.k))
    yield from _blocks(stream.k)
    if not stream.v_trans:
        yield from _blocks(stream.v)
        return
    for block in stream.v:
        n, size = len(block.rows), block.kind.block_bytes
        width = block.rows.shape[1] // size
        yield struct.pack("<i2I", block.kind.ggml_id, size, width)
        yield block.rows.reshape(n, width, size).transpose(1, 0, 2).tobytes()


def _blocks(blocks: Iterable[LayerRows]) -> Iterator[bytes]:
    for block in blocks:
        yield struct.pack("<iQ", block.kind.ggml_id, block.rows.shape[1])
        yield block.rows.tobytes()


def _states(states: FileStates, n_layer: int) -> Iterator[bytes]:
    yield _cells(states.cells)
    yield struct.pack("<2I", 0, n_layer)
    for block in (*states.conv, *states.ssm):
        yield struct.pack("<iQ", F32_ID, block.rows.shape[1])
        yield block.rows.tobytes()


def _cells(cells: FileCells) -> bytes:
    """Write the position, the number of owners and the owners, cell by cell."""
    starts = np.cumsum(cells.counts + 2) - cells.counts - 2
    words = np.empty(int(cells.counts.sum()) + 2 * len(cells), "<i4")
    is_id = np.ones(len(words), np.bool_)
    is_id[starts] = is_id[starts + 1] = False
    words[starts], words[starts + 1], words[is_id] = cells.positions, cells.counts, cells.ids
    return struct.pack("<I", len(cells)) + words.tobytes()
