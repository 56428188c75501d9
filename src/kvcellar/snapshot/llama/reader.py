"""A state file of llama.cpp, bytes to value.

Bytes are not trusted: nothing is allocated or sliced before it is known to be there, and the whole
file must be accounted for.

The version tells which generation wrote a file; but that of 2025-01 stayed while the layout
changed. So a file with it is read as one of 2025-01, and, if that fails anywhere, as one of
2026-10. No file is known that is both: where one layout has the number of streams, the other has
that of the cells, and everything behind it shifts. If there is one, it is of 2025-01.
"""

from __future__ import annotations

import struct
from typing import Final, get_args

import numpy as np

from kvcellar.errors import NotSupported, SnapshotError, SnapshotFileError, SnapshotMismatch
from kvcellar.snapshot.llama.layout import (
    F32_ID,
    MAGIC,
    VERSION,
    FileCells,
    FileGeneration,
    FileShape,
    FileStates,
    Kind,
    LayerRows,
    LlamaFile,
    Outputs,
    PartShape,
    Stream,
    file_shape,
)
from kvcellar.types import AnyArray, ByteArray, Int32Array, KVType, MemorySpec

_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")
_U64: Final = struct.Struct("<Q")


class Cursor:
    """A place in a file; each read names what it expects there.

    Raises:
        SnapshotFileError: from any read that would pass the end.
    """

    def __init__(self, data: bytes) -> None:
        self.offset = 0
        self._bytes = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)

    @property
    def n_left(self) -> int:
        """How many bytes follow."""
        return len(self._bytes) - self.offset

    def u32(self, what: str) -> int:
        """An unsigned number of 4 bytes."""
        return self._number(_U32, what)

    def i32(self, what: str) -> int:
        """A number of 4 bytes."""
        return self._number(_I32, what)

    def u64(self, what: str) -> int:
        """An unsigned number of 8 bytes."""
        return self._number(_U64, what)

    def array(self, dtype: str, n: int, what: str) -> AnyArray:
        """Take ``n`` numbers of a NumPy type."""
        taken: AnyArray = self.take(n * np.dtype(dtype).itemsize, what).copy().view(dtype)
        return taken

    def take(self, n: int, what: str) -> ByteArray:
        """Take ``n`` bytes, as they are in the file."""
        self.require(n <= self.n_left, f"{what} of {n} bytes, of which {self.n_left} are there")
        taken = self._bytes[self.offset : self.offset + n]
        self.offset += n
        return taken

    def expect(self, what: str, found: int, *allowed: int) -> None:
        """Refuse the file unless the number read last is allowed."""
        wanted = " or ".join(map(str, allowed))
        self.require(found in allowed, f"{what} is {found}, not {wanted}")

    def require(self, holds: bool, what: str) -> None:
        """Refuse the file unless something holds."""
        if not holds:
            raise SnapshotFileError(f"llama.cpp's file at offset {self.offset}: {what}")

    def _number(self, layout: struct.Struct, what: str) -> int:
        number: int = layout.unpack(self.take(layout.size, what).tobytes())[0]
        return number


_CELL_BYTES = 8
"""A cell says at least its position and how many sequences it belongs to."""


def read_stream(cursor: Cursor, shape: PartShape, is_old: bool) -> Stream:
    """Read cells and their K and V; since 2026-10 nothing follows the count of an empty stream."""
    n = _read_count(cursor)
    cells = read_cells(cursor, n)
    if n == 0 and not is_old:
        return Stream(cells)
    v_trans = cursor.u32("a flag")
    cursor.expect("whether V is transposed", v_trans, 0, 1)
    _expect_layers(cursor, len(shape.layers))
    k = tuple(_read_rows(cursor, n, "K") for _ in shape.layers)
    read_v = _read_channels if v_trans else _read_rows
    v = tuple(read_v(cursor, n, "V") for _ in shape.layers) if shape.has_v else ()
    return Stream(cells, bool(v_trans), k, v)


def read_states(cursor: Cursor, shape: FileShape) -> FileStates:
    """Read cells and their states."""
    n = _read_count(cursor)
    cells = read_cells(cursor, n)
    transposed = cursor.u32("a flag")
    cursor.expect("whether states are transposed", transposed, 0)
    _expect_layers(cursor, shape.n_layer)
    layers = shape.states or ()
    conv = tuple(_read_state(cursor, n, layer.n_conv) for layer in layers)
    return FileStates(cells, conv, tuple(_read_state(cursor, n, layer.n_ssm) for layer in layers))


def read_cells(cursor: Cursor, n: int) -> FileCells:
    """Read positions and owners of ``n`` cells."""
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


def _read_rows(cursor: Cursor, n: int, what: str) -> LayerRows:
    """Read rows a cell."""
    kind = _read_type(cursor, what)
    row_bytes = cursor.u64(f"bytes a row of {what}")
    cursor.require(row_bytes % kind.block_bytes == 0, f"rows of {row_bytes} bytes as {kind.label}")
    return LayerRows(kind, _take(cursor, n, row_bytes, what))


def _read_channels(cursor: Cursor, n: int, what: str) -> LayerRows:
    """Read transposed rows: first the first value of all rows, then the second."""
    kind = _read_type(cursor, what)
    size, width = cursor.u32("bytes a value"), cursor.u32("values a row")
    cursor.require(not kind.is_quantized, f"{what} is transposed and {kind.label}")
    cursor.expect(f"bytes a value of {kind.label}", size, kind.block_bytes)
    channels = _take(cursor, width, n * size, what).reshape(width, n, size)
    return LayerRows(kind, channels.transpose(1, 0, 2).reshape(n, width * size))


def _read_state(cursor: Cursor, n: int, width: int) -> LayerRows:
    kind = cursor.i32("a type of states")
    cursor.expect("the type of states", kind, F32_ID)
    row_bytes = cursor.u64("bytes a state")
    if row_bytes != 4 * width:
        raise SnapshotMismatch("bytes a state in a layer", row_bytes, 4 * width)
    return LayerRows(KVType.F32, _take(cursor, n, row_bytes, "states"))


def _take(cursor: Cursor, n: int, row_bytes: int, what: str) -> ByteArray:
    # Without cells, rows may claim any size.
    cursor.require(row_bytes <= 2**40, f"rows of {row_bytes} bytes")
    return cursor.take(n * row_bytes, what).reshape(n, row_bytes)


_MAX_NAME = 256
_MAX_STREAMS = 4096
"""More than llama.cpp's sequences; empty ones take less room in a file than in memory."""


def read_llama_file(data: bytes, spec: MemorySpec) -> LlamaFile:
    """Read a file of a model of that memory.

    Raises:
        SnapshotFileError: it is truncated, damaged, or no state file of llama.cpp.
        SnapshotMismatch: it has another number of layers.
        NotSupported: its model is one whose files cannot be read.
    """
    cursor = Cursor(data)
    kind, version = _read_head(cursor)
    generations = _candidates(kind, version)
    start, failure = cursor.offset, None
    for generation in generations:
        cursor.offset = start
        try:
            return _read_body(cursor, kind, generation, version, file_shape(spec, generation))
        except (SnapshotError, NotSupported) as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _read_head(cursor: Cursor) -> tuple[Kind, int]:
    magic = cursor.u32("a magic number")
    kinds = [kind for kind in get_args(Kind) if MAGIC[kind] == magic]
    if not kinds:
        raise SnapshotFileError(f"no state file of llama.cpp: it begins with {magic:#010x}")
    kind: Kind = kinds[0]
    return kind, 0 if kind == "buffer" else cursor.u32("a version")


def _candidates(kind: Kind, version: int) -> tuple[FileGeneration, ...]:
    """Return the layouts that a file may have, the likelier one first."""
    if kind == "buffer" or version == VERSION["2026-10"][kind]:
        return ("2026-10",)
    if version == VERSION["2025-01"][kind]:
        return ("2025-01", "2026-10")
    known = " and ".join(str(VERSION[generation][kind]) for generation in get_args(FileGeneration))
    raise SnapshotFileError(f"a {kind} file of llama.cpp of version {version}; known are {known}")


def _read_body(
    cursor: Cursor, kind: Kind, generation: FileGeneration, version: int, shape: FileShape
) -> LlamaFile:
    seq_id = cursor.i32("a sequence id") if kind == "buffer" else 0
    tokens = np.empty(0, np.int32) if kind == "buffer" else _read_tokens(cursor)
    arch = _read_name(cursor) if kind == "session" else None
    is_old = generation == "2025-01"
    outputs = _read_outputs(cursor) if is_old and kind == "session" else None
    parts = []
    for part in shape.parts:
        n_streams = 1 if is_old else cursor.u32("a number of streams")
        cursor.require(0 < n_streams <= _MAX_STREAMS, f"{n_streams} streams")
        streams: list[Stream] = [read_stream(cursor, part, is_old) for _ in range(n_streams)]
        parts.append(tuple(streams))
    states = None if shape.states is None else read_states(cursor, shape)
    cursor.require(cursor.n_left == 0, f"{cursor.n_left} bytes more than there should be")
    return LlamaFile(kind, generation, version, tokens, tuple(parts), states, arch, outputs, seq_id)


def _read_tokens(cursor: Cursor) -> Int32Array:
    n = cursor.u32("a number of tokens")
    return cursor.array("<i4", n, "tokens")


def _read_name(cursor: Cursor) -> str:
    n = cursor.u32("the length of a name")
    cursor.require(n <= _MAX_NAME, f"a name of {n} bytes")
    name = cursor.take(n, "the name of an architecture").tobytes()
    cursor.require(name.isascii(), f"the name of an architecture is {name!r}")
    return name.decode()


def _read_outputs(cursor: Cursor) -> Outputs:
    rows = cursor.array("<i4", cursor.u32("a number of outputs"), "outputs")
    logits = cursor.array("<f4", cursor.u64("a number of logits"), "logits")
    return Outputs(rows, logits, cursor.array("<f4", cursor.u64("a size"), "embeddings"))
