"""From the content of sequences to a state file of llama.cpp.

A file of one sequence loads into a context of llama.cpp that keeps all sequences in one stream
(``kv_unified``, or a context of one sequence), and so does a session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcellar.cache.content import CellData, SequenceData, StateData, trimmed
from kvcellar.errors import NotSupported, OptionError
from kvcellar.snapshot.llama.layout import (
    VERSION,
    FileCells,
    FileGeneration,
    FileStates,
    Kind,
    LayerRows,
    LlamaFile,
    Outputs,
    PartShape,
    Stream,
    file_shape,
    latent_first,
)
from kvcellar.snapshot.llama.to_content import differs_untransformed, transforms_alike
from kvcellar.types import Int32Array, Int64Array, KVType, MemorySpec


@dataclass(frozen=True, slots=True)
class Target:
    """What to write.

    Attributes:
        kind: a sequence or a session.
        generation: how it is laid out.
        seq_ids: the id of each sequence of the content; a sequence file has just one.
        v_trans: whether V is transposed, a row a channel, as a context of llama.cpp without flash
            attention has it and expects it.
    """

    kind: Kind
    generation: FileGeneration
    seq_ids: tuple[int, ...]
    v_trans: bool = False


def from_content(
    content: SequenceData, spec: MemorySpec, arch: str, tokens: Sequence[int], target: Target
) -> LlamaFile:
    """Make a file of the content of sequences.

    Args:
        content: all that they hold, from position 0 on.
        spec: the memory of the model.
        arch: its architecture, which sessions name.
        tokens: the text that the head lists.
        target: what to write.

    Raises:
        NotSupported: llama.cpp had no such files.
        OptionError: a sequence file of several sequences, a piece, quantised V transposed.
    """
    _check(content, spec, target)
    shape = file_shape(spec, target.generation)
    parts = [(_part(content, spec, part, target),) for part in shape.parts]
    is_session = target.kind == "session"
    none = np.empty(0, np.float32)
    no_outputs = Outputs(np.empty(0, np.int32), none, none)
    return LlamaFile(
        kind=target.kind,
        generation=target.generation,
        version=VERSION[target.generation][target.kind],
        tokens=np.array(tokens, np.int32),
        parts=tuple(parts),
        states=None if content.states is None else _states(content.states, spec, target),
        arch=arch if is_session else None,
        outputs=no_outputs if is_session and target.generation == "2025-01" else None,
    )


def _check(content: SequenceData, spec: MemorySpec, target: Target) -> None:
    if len(target.seq_ids) != content.n_seqs:
        raise OptionError(f"{len(target.seq_ids)} sequence ids for {content.n_seqs} sequences")
    if target.kind == "sequence" and content.n_seqs != 1:
        raise OptionError(f"{content.n_seqs} sequences: a sequence file holds one")
    if content.start > 0:
        raise OptionError(f"this begins at position {content.start}: llama.cpp has no such files")
    alike = transforms_alike(spec, VERSION[target.generation][target.kind])
    for group in spec.groups:
        layers = range(len(group.layers))
        if target.v_trans and group.type_v.is_quantized:
            raise OptionError(f"v_trans: V of type {group.type_v.label} cannot be transposed")
        if not alike and any(any(differs_untransformed(group, i)) for i in layers):
            raise NotSupported(
                f"{group.type_k.label} K and {group.type_v.label} V are stored under a transform "
                f"that llama.cpp of {target.generation} did not have for this model: use f16"
            )


def _part(content: SequenceData, spec: MemorySpec, shape: PartShape, target: Target) -> Stream:
    """Return the cells of a part with K and V of its layers; without layers, cells alone."""
    numbers = tuple(dict(shape.layers)) or (0,)
    groups = {number: content.groups[number] for number in numbers}
    if target.generation == "2026-10" and shape.layers:
        window = spec.groups[numbers[0]].window
        groups = {n: trimmed(group, window) if window else group for n, group in groups.items()}
    first = groups[numbers[0]]
    if any(not _same_cells(first, group) for group in groups.values()):
        raise NotSupported(
            "llama.cpp of 2025-01 kept all tokens in layers with a window: "
            "save from a context with swa_full=True, or write a file of 2026-10"
        )
    cells = _cells(first.positions, first.owners, target)
    if len(cells) == 0 and target.generation == "2026-10":
        return Stream(cells)
    k, v = [], []
    for number, i in shape.layers:
        group, rows = spec.groups[number], groups[number].rows
        k.append(LayerRows(group.type_k, latent_first(rows.k[i], group.type_k, group.layers[i])))
        v.append(LayerRows(group.type_v, rows.v[i]))
    return Stream(cells, target.v_trans, tuple(k), tuple(v) if shape.has_v else ())


def _same_cells(first: CellData, other: CellData) -> bool:
    return np.array_equal(first.positions, other.positions) and np.array_equal(
        first.owners[:, np.lexsort(first.owners)], other.owners[:, np.lexsort(other.owners)]
    )


def _cells(positions: Int32Array, owners: Int64Array, target: Target) -> FileCells:
    """List cells as a file does; sequence files of 2025-01 do not name owners."""
    if target.kind == "sequence" and target.generation == "2025-01":
        return _unowned(positions)
    cells, seqs = owners[:, np.lexsort(owners[::-1])]
    counts = np.bincount(cells, minlength=len(positions)).astype(np.int64)
    return FileCells(positions, counts, np.array(target.seq_ids, np.int32)[seqs])


def _unowned(positions: Int32Array) -> FileCells:
    return FileCells(positions, np.zeros(len(positions), np.int64), np.empty(0, np.int32))


def _states(content: StateData, spec: MemorySpec, target: Target) -> FileStates:
    """Return the last state of each sequence; files have no older ones."""
    numbered = [(seq, held) for seq, held in enumerate(content.held) if held is not None]
    used = list(dict.fromkeys(held.state for _, held in numbered))
    ends = {held.state: int(held.positions[-1]) for _, held in numbered}
    positions = np.array([ends[state] for state in used], np.int32)
    owners = np.array([(used.index(held.state), seq) for seq, held in numbered], np.int64)
    cells = _cells(positions, owners.reshape(-1, 2).T, target)
    if target.kind == "sequence":
        cells = _unowned(positions)
    assert spec.states is not None
    widths = [n for layer in spec.states.layers for n in (layer.n_conv, layer.n_ssm)]
    ends_at = np.cumsum(widths)[:-1]
    pieces = np.split(content.states[used], ends_at, axis=1)
    blocks = [LayerRows(KVType.F32, np.ascontiguousarray(piece).view(np.uint8)) for piece in pieces]
    return FileStates(cells, tuple(blocks[::2]), tuple(blocks[1::2]))
