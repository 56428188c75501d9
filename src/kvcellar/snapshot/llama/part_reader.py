"""The parts of a state file of llama.cpp: cells with K and V, and cells with states."""

from __future__ import annotations

import numpy as np

from kvcellar.errors import SnapshotMismatch
from kvcellar.snapshot.llama.cursor import Cursor
from kvcellar.snapshot.llama.layout import F32_ID, FileShape, PartShape
from kvcellar.snapshot.llama.value import Block, FileCells, FileStates, Stream
from kvcellar.types import ByteArray, KVType

_CELL_BYTES = 8
"""A cell says at least its position and how many sequences it belongs to."""


def read_stream(cursor: Cursor, shape: PartShape, is_old: bool) -> Stream:
    """Cells and their K and V; of an empty stream of today nothing follows its count."""
    n = _read_count(cursor)
    cells = read_cells(cursor, n)
    if n == 0 and not is_old:
        return Stream(cells)
    v_trans = cursor.u32("a flag")
    cursor.expect("whether V lies across", v_trans, 0, 1)
    _expect_layers(cursor, len(shape.layers))
    k = tuple(_read_rows(cursor, n, "K") for _ in shape.layers)
    read_v = _read_channels if v_trans else _read_rows
    v = tuple(read_v(cursor, n, "V") for _ in shape.layers) if shape.has_v else ()
    return Stream(cells, bool(v_trans), k, v)


def read_states(cursor: Cursor, shape: FileShape) -> FileStates:
    """Cells and their states."""
    n = _read_count(cursor)
    cells = read_cells(cursor, n)
    across = cursor.u32("a flag")
    cursor.expect("whether states lie across", across, 0)
    _expect_layers(cursor, shape.n_layer)
    layers = shape.states or ()
    conv = tuple(_read_state(cursor, n, layer.n_conv) for layer in layers)
    return FileStates(cells, conv, tuple(_read_state(cursor, n, layer.n_ssm) for layer in layers))


def read_cells(cursor: Cursor, n: int) -> FileCells:
    """Positions and owners of so many cells."""
    positions, counts = np.empty(n, np.int32), np.empty(n, np.int64)
    ids = []
    for i in range(n):
        positions[i] = position = cursor.i32("a position")
        cursor.require(position >= 0, f"position {position}")
        counts[i] = count = cursor.u32("a number of owners")
        ids.append(cursor.array("<i4", count, "owners"))
    every = np.concatenate([np.empty(0, np.int32), *ids])
    return FileCells(positions, counts, every)


def _read_count(cursor: Cursor) -> int:
    n = cursor.u32("a number of cells")
    cursor.require(n <= cursor.n_left // _CELL_BYTES, f"{n} cells in {cursor.n_left} bytes")
    return n


def _expect_layers(cursor: Cursor, wanted: int) -> None:
    n = cursor.u32("a number of layers")
    if n != wanted:
        raise SnapshotMismatch("layers in a part of llama.cpp's file", n, wanted)


def _read_type(cursor: Cursor, what: str) -> KVType:
    number = cursor.i32(f"a type of {what}")
    kinds = [kind for kind in KVType if kind.ggml_id == number]
    cursor.require(bool(kinds), f"{what} of type {number}, which no cache has")
    return kinds[0]


def _read_rows(cursor: Cursor, n: int, what: str) -> Block:
    """Rows as they are."""
    kind = _read_type(cursor, what)
    row_bytes = cursor.u64(f"bytes a row of {what}")
    cursor.require(row_bytes % kind.block_bytes == 0, f"rows of {row_bytes} bytes as {kind.label}")
    return Block(kind, _take(cursor, n, row_bytes, what))


def _read_channels(cursor: Cursor, n: int, what: str) -> Block:
    """Rows of which a file holds first the first value of each, then the second."""
    kind = _read_type(cursor, what)
    size, width = cursor.u32("bytes a value"), cursor.u32("values a row")
    cursor.require(not kind.is_quantized, f"{what} lies across and is {kind.label}")
    cursor.expect(f"bytes a value of {kind.label}", size, kind.block_bytes)
    across = _take(cursor, width, n * size, what).reshape(width, n, size)
    return Block(kind, across.transpose(1, 0, 2).reshape(n, width * size))


def _read_state(cursor: Cursor, n: int, width: int) -> Block:
    kind = cursor.i32("a type of states")
    cursor.expect("the type of states", kind, F32_ID)
    row_bytes = cursor.u64("bytes a state")
    if row_bytes != 4 * width:
        raise SnapshotMismatch("bytes a state in a layer", row_bytes, 4 * width)
    return Block(KVType.F32, _take(cursor, n, row_bytes, "states"))


def _take(cursor: Cursor, n: int, row_bytes: int, what: str) -> ByteArray:
    # Rows of no cell may claim any size.
    cursor.require(row_bytes <= 2**40, f"rows of {row_bytes} bytes")
    return cursor.take(n * row_bytes, what).reshape(n, row_bytes)
