"""A state file of llama.cpp as a value: what it says, before anybody asks whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcellar.snapshot.llama.layout import Generation, Kind
from kvcellar.types import ByteArray, Float32Array, Int32Array, Int64Array, KVType


@dataclass(frozen=True, slots=True, eq=False)
class FileCells:
    """Cells in the order of the file.

    ``counts`` says how many sequences each belongs to, ``ids`` lists these, cell after cell. A file
    of one sequence may say nothing of owners, or something that nobody minds.
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
class Block:
    """The rows of one layer, one a cell, whatever way they lie in the file."""

    kind: KVType
    rows: ByteArray


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Cells with their K and V, layer by layer; ``v_trans``: V lies a row a channel in the file."""

    cells: FileCells
    v_trans: bool = False
    k: tuple[Block, ...] = ()
    v: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class FileStates:
    """Recurrent states, one a cell: of each layer the end of its inputs, and its state proper."""

    cells: FileCells
    conv: tuple[Block, ...]
    ssm: tuple[Block, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What a session of 2025-01 keeps of the last batch: its rows of logits and embeddings."""

    rows: Int32Array
    logits: Float32Array
    embeddings: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class LlamaFile:
    """A whole file.

    Attributes:
        kind: what it was written as.
        generation: how it is laid out.
        version: the number in its head; that of 2025-01 stood there longer than its layout.
        tokens: the text that the writer named, of whichever sequence it meant.
        parts: the caches of K and V, each as one or several streams.
        states: recurrent states, if the model has any.
        arch: the architecture; None where the file does not say.
        outputs: what only sessions of 2025-01 have.
        seq_id: the sequence that a buffer names.
    """

    kind: Kind
    generation: Generation
    version: int
    tokens: Int32Array
    parts: tuple[tuple[Stream, ...], ...]
    states: FileStates | None = None
    arch: str | None = None
    outputs: Outputs | None = None
    seq_id: int = 0
