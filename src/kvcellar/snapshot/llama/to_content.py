"""From a state file of llama.cpp to what a cache takes in.

A file has no checksum, and says little of the model it is of. What it says is compared; that K, V
and states are finite is looked at, because one NaN would reach the logits of everybody in a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvcellar.cache.content import CacheContent, CellContent, HeldContent, StateContent
from kvcellar.errors import NotSupported, SnapshotFileError, SnapshotMismatch
from kvcellar.snapshot.llama.checks import check_finite, check_part
from kvcellar.snapshot.llama.layout import PartShape, file_shape
from kvcellar.snapshot.llama.merging import Merged
from kvcellar.snapshot.llama.naming import Naming, Tokens
from kvcellar.snapshot.llama.value import FileStates, LlamaFile
from kvcellar.snapshot.llama.windows import in_window
from kvcellar.types import CacheSpec, Float32Array, Int32Array, KVType, MemorySpec, StateSpec

Texts: TypeAlias = "tuple[Int32Array, ...]"
"""Of each sequence where its tokens stand, ascending."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a file holds for a cache; ``seq_ids`` are what its sequences were called."""

    content: CacheContent
    seq_ids: tuple[int, ...]


def to_content(file: LlamaFile, spec: MemorySpec, arch: str, n_vocab: int) -> Restored:
    """What a cache of that memory can hold of a file; see :class:`Tokens` for the ids.

    Raises:
        SnapshotMismatch: it is of another model, of other types, or holds too little.
        SnapshotFileError: it contradicts itself, or K, V or states are not finite.
        NotSupported: it cannot be known whether its rows are as ours.
    """
    if file.arch is not None and file.arch != arch:
        raise SnapshotMismatch("architecture", file.arch, arch)
    _refuse_unsaid(arch, spec)
    shape = file_shape(spec, file.generation)
    for part, streams in zip(shape.parts, file.parts, strict=True):
        check_part(streams, part, spec, file)
    naming = Naming(file, _n_seq_max(spec))
    merged = [Merged(streams, naming) for streams in file.parts]
    texts = tuple(_text(merged, file, naming, seq) for seq in range(len(naming.ids)))
    tokens = Tokens(file.tokens, texts[0] if texts else np.empty(0, np.int32), n_vocab)
    groups: dict[int, CellContent] = {}
    for part, cells in zip(shape.parts, merged, strict=True):
        groups.update(_groups(part, cells, spec, texts, tokens))
    in_order = tuple(groups[number] for number in range(len(spec.groups)))
    states = None if file.states is None else _states(file.states, naming, texts, tokens)
    return Restored(CacheContent(len(texts), in_order, states), naming.ids)


def _groups(
    part: PartShape, cells: Merged, spec: MemorySpec, texts: Texts, tokens: Tokens
) -> Iterator[tuple[int, CellContent]]:
    """The groups whose layers are in a part of a file."""
    ids = tokens.of_cells(cells.positions, cells.owners)
    n_ctx = spec.groups[0].size
    for number in dict(part.layers):
        layers = [i for i, (group, _) in enumerate(part.layers) if group == number]
        content = cells.content(layers, spec.groups[number], ids, len(texts))
        can_slide = number > 0  # the first group keeps all tokens, whatever its window
        own = spec.groups[number]
        yield number, in_window(content, texts, tokens, own, n_ctx, can_slide=can_slide)


def _refuse_unsaid(arch: str, spec: MemorySpec) -> None:
    """Refuse a model whose rows depend on what no file says."""
    ropes = [layer.rope for group in spec.groups for layer in group.layers]
    if arch == "phi3" and any(rope is not None and rope.factors for rope in ropes):
        raise NotSupported(
            "this Phi-3 has two sets of RoPE factors; llama.cpp takes one of them by the size of "
            "its context, and its files do not say which: compute the text anew"
        )


def _n_seq_max(spec: MemorySpec) -> int:
    parts: list[CacheSpec | StateSpec] = [*spec.groups, *filter(None, [spec.states])]
    return min(part.n_seq_max for part in parts)


def _text(merged: list[Merged], file: LlamaFile, naming: Naming, seq: int) -> Int32Array:
    """Where the tokens of a sequence stand; of a state alone only where the last one does."""
    if merged:
        return merged[0].of(seq)
    assert file.states is not None
    cell = _cell_of(file.states, naming, seq)
    at = file.states.cells.positions[cell : cell + 1] if cell >= 0 else np.empty(0, np.int32)
    listed = np.arange(len(file.tokens), dtype=np.int32)
    return listed if seq == 0 and np.array_equal(at, listed[-1:]) else at


def _states(states: FileStates, naming: Naming, texts: Texts, tokens: Tokens) -> StateContent:
    held: list[HeldContent | None] = []
    for seq, text in enumerate(texts):
        cell = _cell_of(states, naming, seq)
        if cell < 0:
            held.append(None)
            continue
        last = int(states.cells.positions[cell])
        if not len(text) or int(text[-1]) != last:
            raise SnapshotFileError(f"llama.cpp's file: the state of sequence {seq} is at {last}")
        held.append(HeldContent(text, tokens.at(seq, text), cell))
    return StateContent(_values(states), tuple(held))


def _cell_of(states: FileStates, naming: Naming, seq: int) -> int:
    """Which state is a sequence's, -1 if none is."""
    cells, seqs = naming.owners(states.cells)
    mine = cells[seqs == seq]
    if len(mine) > 1:
        raise SnapshotFileError(f"llama.cpp's file: sequence {seq} has {len(mine)} states")
    return int(mine[0]) if len(mine) else -1


def _values(states: FileStates) -> Float32Array:
    """The states as rows: of each layer the end of its inputs, then its state proper."""
    blocks = [b.rows for pair in zip(states.conv, states.ssm, strict=True) for b in pair]
    rows = np.ascontiguousarray(np.concatenate(blocks, axis=1))
    check_finite("states", KVType.F32, rows)
    values: Float32Array = rows.view(np.float32)
    return values
