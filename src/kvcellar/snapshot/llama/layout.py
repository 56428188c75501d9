"""A state file of llama.cpp as a value, and which parts the file of a model has.

A file does not say what it consists of: whether a second part follows, or whether there is V,
depends on the model. So a file is read with the memory of the model at hand; the value says what
the file says, whether or not that fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from kvcellar.errors import NotSupported
from kvcellar.types import (
    ByteArray,
    Float32Array,
    Int32Array,
    Int64Array,
    KVType,
    LayerSpec,
    MemorySpec,
    StateLayer,
)

Kind: TypeAlias = Literal["sequence", "session", "buffer"]
"""A file of one sequence, a file of a whole context, or a buffer in memory of one sequence."""

FileGeneration: TypeAlias = Literal["2025-01", "2026-10"]
"""The layout behind the tokens, named by a month in which llama.cpp wrote it."""

MAGIC: dict[Kind, int] = {"sequence": 0x67677371, "session": 0x6767736E, "buffer": 0xAF143CD8}
VERSION: dict[FileGeneration, dict[Kind, int]] = {
    "2025-01": {"sequence": 2, "session": 9},
    "2026-10": {"sequence": 3, "session": 10},
}
F32_ID = 0
"""ggml's number of the type of states: f32."""


@dataclass(frozen=True, slots=True)
class PartShape:
    """One cache of K and V in a file: where its layers are kept, as pairs of group and layer."""

    layers: tuple[tuple[int, int], ...]
    has_v: bool = True


@dataclass(frozen=True, slots=True)
class FileShape:
    """The parts of a file, in their order; states come last.

    ``n_layer`` is the number of layers of the model, which the part of the states repeats.
    """

    parts: tuple[PartShape, ...]
    states: tuple[StateLayer, ...] | None
    n_layer: int


def file_shape(spec: MemorySpec, generation: FileGeneration) -> FileShape:
    """Return the parts that a file has for a model of that memory.

    Raises:
        NotSupported: llama.cpp had no such files, or their layout is not known.
    """
    if generation == "2025-01":
        _require_plain(spec)
        layers = tuple((at.group, at.index) for at in spec.places)
        return FileShape((PartShape(layers),), None, len(layers))
    states = None if spec.states is None else spec.states.layers
    return FileShape(_by_window(spec), states, len(spec.places))


def _require_plain(spec: MemorySpec) -> None:
    """Raise unless a model attends in every layer and keeps V."""
    if spec.states is not None:
        raise NotSupported("states in llama.cpp's files of 2025-01: take a file of 2026-10")
    if any(layer.v_offset is not None for group in spec.groups for layer in group.layers):
        raise NotSupported(
            "llama.cpp of 2025-01 did not keep latent K and V: take a file of 2026-10"
        )


def _by_window(spec: MemorySpec) -> tuple[PartShape, ...]:
    """Return layers that see everything, then those with a window; the first may be empty."""
    windows = [group.window for group in spec.groups]
    if len([window for window in windows if window]) > 1:
        raise NotSupported(f"windows of several sizes ({windows}): llama.cpp has only one")
    shapes = [
        PartShape(
            tuple((number, i) for i in range(len(group.layers))),
            all(layer.v_offset is None for layer in group.layers),
        )
        for number, group in enumerate(spec.groups)
    ]
    return (PartShape(()), *shapes) if windows and windows[0] else tuple(shapes)


def latent_last(rows: ByteArray, kind: KVType, layer: LayerSpec) -> ByteArray:
    """Turn K rows of llama.cpp into ours: in latent attention it has the rotated part last."""
    n_bytes = kind.row_bytes(layer.v_offset or 0)
    return np.roll(rows, n_bytes, axis=1) if n_bytes else rows


def latent_first(rows: ByteArray, kind: KVType, layer: LayerSpec) -> ByteArray:
    """Invert :func:`latent_last`."""
    n_bytes = kind.row_bytes(layer.v_offset or 0)
    return np.roll(rows, -n_bytes, axis=1) if n_bytes else rows


@dataclass(frozen=True, slots=True, eq=False)
class FileCells:
    """Cells in the order of the file.

    ``counts`` has the number of owners of each, ``ids`` the owners, cell after cell. In a file of
    one sequence they may be missing, and are ignored.
    """

    positions: Int32Array
    counts: Int64Array
    ids: Int32Array

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def owners(self) -> Int64Array:
        """Pairs of a cell and a sequence id, ``[2, n_pairs]``."""
        cells = np.repeat(np.arange(len(self), dtype=np.int64), self.counts)
        return np.stack((cells, self.ids.astype(np.int64)))


@dataclass(frozen=True, slots=True, eq=False)
class LayerRows:
    """K or V rows, or states, of one layer, one a cell, transposed in the file or not."""

    kind: KVType
    rows: ByteArray


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Cells with their K and V, layer by layer; ``v_trans``: V is transposed in the file."""

    cells: FileCells
    v_trans: bool = False
    k: tuple[LayerRows, ...] = ()
    v: tuple[LayerRows, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class FileStates:
    """Recurrent states, one a cell: the last inputs and the state proper, layer by layer."""

    cells: FileCells
    conv: tuple[LayerRows, ...]
    ssm: tuple[LayerRows, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """The outputs of the last batch in a session of 2025-01: rows of logits and embeddings."""

    rows: Int32Array
    logits: Float32Array
    embeddings: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class LlamaFile:
    """A whole file.

    Attributes:
        kind: what it was written as.
        generation: how it is laid out.
        version: the number in its head; that of 2025-01 outlived its layout.
        tokens: the text that the writer named; it does not say of which sequence.
        parts: the caches of K and V, each as one or several streams.
        states: recurrent states, if the model has any.
        arch: the architecture; None where the file does not say.
        outputs: what only sessions of 2025-01 have.
        seq_id: the sequence that a buffer names.
    """

    kind: Kind
    generation: FileGeneration
    version: int
    tokens: Int32Array
    parts: tuple[tuple[Stream, ...], ...]
    states: FileStates | None = None
    arch: str | None = None
    outputs: Outputs | None = None
    seq_id: int = 0
