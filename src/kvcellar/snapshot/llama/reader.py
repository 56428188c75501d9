"""A state file of llama.cpp, bytes to value. The whole file must be accounted for.

Which generation wrote a file shows in its version; but that of 2025-01 stayed while the layout
changed. So a file with it is read as one of 2025-01, and, if that fails anywhere, as one of today.
No file was found that is both: where one layout has the number of streams, the other has that of
the cells, and everything behind it shifts. If there is one, it is of 2025-01.
"""

from __future__ import annotations

from typing import get_args

import numpy as np

from kvcellar.errors import NotSupported, SnapshotError, SnapshotFileError
from kvcellar.snapshot.llama.cursor import Cursor
from kvcellar.snapshot.llama.layout import MAGIC, VERSION, FileShape, Generation, Kind, file_shape
from kvcellar.snapshot.llama.part_reader import read_states, read_stream
from kvcellar.snapshot.llama.value import LlamaFile, Outputs, Stream
from kvcellar.types import Int32Array, MemorySpec

_MAX_NAME = 256


def read_llama_file(data: bytes, spec: MemorySpec) -> LlamaFile:
    """What a file says, for a model of that memory.

    Raises:
        SnapshotFileError: it is truncated, damaged, or no state file of llama.cpp.
        SnapshotMismatch: it has another number of layers.
        NotSupported: its model is one whose files we cannot read.
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


def _candidates(kind: Kind, version: int) -> tuple[Generation, ...]:
    """The layouts that a file may have, the likelier one first."""
    if kind == "buffer" or version == VERSION["2026-10"][kind]:
        return ("2026-10",)
    if version == VERSION["2025-01"][kind]:
        return ("2025-01", "2026-10")
    known = " and ".join(str(VERSION[generation][kind]) for generation in get_args(Generation))
    raise SnapshotFileError(f"a {kind} file of llama.cpp of version {version}; known are {known}")


def _read_body(
    cursor: Cursor, kind: Kind, generation: Generation, version: int, shape: FileShape
) -> LlamaFile:
    seq_id = cursor.i32("a sequence id") if kind == "buffer" else 0
    tokens = np.empty(0, np.int32) if kind == "buffer" else _read_tokens(cursor)
    arch = _read_name(cursor) if kind == "session" else None
    is_old = generation == "2025-01"
    outputs = _read_outputs(cursor) if is_old and kind == "session" else None
    parts = []
    for part in shape.parts:
        n_streams = 1 if is_old else cursor.u32("a number of streams")
        # An empty stream takes 4 bytes.
        cursor.require(0 < n_streams <= cursor.n_left // 4, f"{n_streams} streams")
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
