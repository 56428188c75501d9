"""From a state file of llama.cpp to content that a cache can import.

A file has no checksum, and says little of the model it is of. What it says is compared with the
model. Whether K, V and states are finite is left to the check of contents.

Here sequences are numbered 0, 1, …, the streams of a part are merged in the order of positions, and
layers with a window are cut to what the window needs: llama.cpp writes what its cache happens to
have, of a sequence the last window, of a context older cells too that were not reused yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from kvcellar.cache.content import (
    NO_TOKENS,
    CellData,
    RowBytes,
    SequenceData,
    SequenceStateData,
    StateData,
    trimmed,
)
from kvcellar.errors import NotSupported, SnapshotFileError, SnapshotMismatch
from kvcellar.snapshot.llama.layout import (
    VERSION,
    FileCells,
    FileStates,
    LayerRows,
    LlamaFile,
    PartShape,
    Stream,
    file_shape,
    latent_last,
)
from kvcellar.types import (
    ByteArray,
    CacheSpec,
    Float32Array,
    Int32Array,
    Int64Array,
    MemorySpec,
    StateSpec,
)

Texts: TypeAlias = "tuple[Int32Array, ...]"
"""Where the tokens of each sequence stand, ascending."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The content of a file for a cache; ``seq_ids`` are the ids that its sequences had."""

    content: SequenceData
    seq_ids: tuple[int, ...]


def to_content(file: LlamaFile, spec: MemorySpec, arch: str, n_vocab: int) -> Restored:
    """Turn a file into content for a cache of that memory; see :class:`Tokens` for the ids.

    Raises:
        SnapshotMismatch: it is of another model, of other types, or holds too little.
        SnapshotFileError: it contradicts itself.
        NotSupported: the file does not say enough about its rows.
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
    groups: dict[int, CellData] = {}
    for part, cells in zip(shape.parts, merged, strict=True):
        groups.update(_groups(part, cells, spec, texts, tokens))
    in_order = tuple(groups[number] for number in range(len(spec.groups)))
    states = None if file.states is None else _states(file.states, naming, texts, tokens)
    return Restored(SequenceData(len(texts), in_order, states), naming.ids)


def _groups(
    part: PartShape, cells: Merged, spec: MemorySpec, texts: Texts, tokens: Tokens
) -> Iterator[tuple[int, CellData]]:
    """Yield the groups whose layers are in a part of a file."""
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
            "its context, and its files do not say which: compute the text again"
        )


def _n_seq_max(spec: MemorySpec) -> int:
    parts: list[CacheSpec | StateSpec] = [*spec.groups, *filter(None, [spec.states])]
    return min(part.n_seq_max for part in parts)


def _text(merged: list[Merged], file: LlamaFile, naming: Naming, seq: int) -> Int32Array:
    """Return where the tokens of a sequence stand; a state alone tells only the last position."""
    if merged:
        return merged[0].of(seq)
    assert file.states is not None
    cell = _cell_of(file.states, naming, seq)
    at = file.states.cells.positions[cell : cell + 1] if cell >= 0 else np.empty(0, np.int32)
    listed = np.arange(len(file.tokens), dtype=np.int32)
    return listed if seq == 0 and np.array_equal(at, listed[-1:]) else at


def _states(states: FileStates, naming: Naming, texts: Texts, tokens: Tokens) -> StateData:
    held: list[SequenceStateData | None] = []
    for seq, text in enumerate(texts):
        cell = _cell_of(states, naming, seq)
        if cell < 0:
            held.append(None)
            continue
        last = int(states.cells.positions[cell])
        if not len(text) or int(text[-1]) != last:
            raise SnapshotFileError(f"llama.cpp's file: the state of sequence {seq} is at {last}")
        held.append(SequenceStateData(text, tokens.at(seq, text), cell))
    return StateData(_values(states), tuple(held))


def _cell_of(states: FileStates, naming: Naming, seq: int) -> int:
    """Return which state is a sequence's, -1 if none is."""
    cells, seqs = naming.owners(states.cells)
    mine = cells[seqs == seq]
    if len(mine) > 1:
        raise SnapshotFileError(f"llama.cpp's file: sequence {seq} has {len(mine)} states")
    return int(mine[0]) if len(mine) else -1


def _values(states: FileStates) -> Float32Array:
    """Return the states as rows: layer by layer the last inputs, then the state proper."""
    blocks = [b.rows for pair in zip(states.conv, states.ssm, strict=True) for b in pair]
    rows = np.ascontiguousarray(np.concatenate(blocks, axis=1))
    values: Float32Array = rows.view(np.float32)
    return values


class Naming:
    """The sequences of a file, numbered 0, 1, … in the order of their ids.

    Raises:
        SnapshotMismatch: there are more than a cache may have.
        SnapshotFileError: a cell of a session has no owner, or a negative one.
    """

    def __init__(self, file: LlamaFile, n_seq_max: int) -> None:
        self._is_session = file.kind == "session"
        self.ids: tuple[int, ...] = (0,)
        if not self._is_session:
            return
        every = [stream.cells for part in file.parts for stream in part]
        if file.states is not None:
            every.append(file.states.cells)
        known = np.unique(np.concatenate([cells.ids for cells in every]))
        if any(bool((cells.counts == 0).any()) for cells in every):
            raise SnapshotFileError("llama.cpp's file: a cell belongs to no sequence")
        if len(known) and known[0] < 0:
            raise SnapshotFileError(f"llama.cpp's file: a cell of sequence {known[0]}")
        if len(known) > n_seq_max:
            hint = "use a larger n_seq_max"
            raise SnapshotMismatch("sequences", len(known), f"at most {n_seq_max}", hint)
        self.ids = tuple(known.tolist())

    def owners(self, cells: FileCells) -> Int64Array:
        """Return pairs of a cell and the number of a sequence; in a sequence file that is 0."""
        if not self._is_session:
            every = np.arange(len(cells), dtype=np.int64)
            return np.stack((every, np.zeros_like(every)))
        which, ids = cells.owners
        return np.stack((which, np.searchsorted(self.ids, ids)))


class Tokens:
    """The token ids of cells.

    Cells of a file have none. The ids in the head are those of sequence 0 if there are as many as
    it has tokens, and these stand at 0, 1, …. All others are -1.

    Args:
        listed: the ids in the head.
        positions: where the tokens of sequence 0 stand.
        n_vocab: ids must be below it.

    Raises:
        SnapshotMismatch: one is not in the vocabulary.
    """

    def __init__(self, listed: Int32Array, positions: Int32Array, n_vocab: int) -> None:
        fits = np.array_equal(positions, np.arange(len(listed)))
        self._known = listed if fits else listed[:0]
        bad = self._known[(self._known < -1) | (self._known >= n_vocab)]
        if len(bad):
            raise SnapshotMismatch("token", int(bad[0]), f"one of {n_vocab}")

    def at(self, seq: int, positions: Int32Array) -> Int32Array:
        """Return the ids of a sequence's tokens at positions."""
        found = np.full(len(positions), -1, np.int32)
        known = positions < (len(self._known) if seq == 0 else 0)
        found[known] = self._known[positions[known]]
        return found

    def of_cells(self, positions: Int32Array, owners: Int64Array) -> Int32Array:
        """Return the ids of cells."""
        found = np.full(len(positions), -1, np.int32)
        mine = owners[0][owners[1] == 0]
        found[mine] = self.at(0, positions[mine])
        return found


class Merged:
    """The cells of all streams of a part, with numbered owners.

    Attributes:
        positions: where they stand, ascending.
        owners: pairs of a cell and the number of a sequence.
    """

    def __init__(self, streams: Sequence[Stream], naming: Naming) -> None:
        self._streams = streams
        owners = [naming.owners(stream.cells) for stream in streams]
        n_before = np.cumsum([0, *(len(stream.cells) for stream in streams)])
        cells = np.concatenate([own[0] + n for own, n in zip(owners, n_before, strict=False)])
        at = np.concatenate([stream.cells.positions for stream in streams])
        self._order = np.argsort(at, kind="stable")
        rank = np.empty_like(self._order)
        rank[self._order] = np.arange(len(rank))
        self.positions: Int32Array = at[self._order]
        self.owners = np.stack((rank[cells], np.concatenate([own[1] for own in owners])))

    def of(self, seq: int) -> Int32Array:
        """Return the positions of a sequence's cells, ascending."""
        at: Int32Array = np.sort(self.positions[self.owners[0][self.owners[1] == seq]])
        return at

    def content(
        self, layers: Sequence[int], spec: CacheSpec, tokens: Int32Array, n_seqs: int
    ) -> CellData:
        """Return these with K and V of a group; ``layers`` says which of the part's are its."""
        rows: tuple[list[ByteArray], list[ByteArray]] = ([], [])
        for i, layer in zip(layers, spec.layers, strict=True):
            k = [stream.k[i] for stream in self._streams if stream.k]
            v = [stream.v[i] for stream in self._streams if stream.v]
            all_k = self._rows(k, spec.type_k.row_bytes(layer.n_embd_k))
            rows[0].append(latent_last(all_k, spec.type_k, layer))
            rows[1].append(self._rows(v, spec.type_v.row_bytes(layer.n_embd_v)))
        evicted = (NO_TOKENS,) * n_seqs
        return CellData(
            self.positions, tokens, self.owners, RowBytes(tuple(rows[0]), tuple(rows[1])), evicted
        )

    def _rows(self, blocks: Sequence[LayerRows], row_bytes: int) -> ByteArray:
        if not blocks:  # there are no cells, or no bytes in rows
            return np.empty((len(self.positions), row_bytes), np.uint8)
        rows: ByteArray = np.concatenate([block.rows for block in blocks])[self._order]
        return rows


def in_window(
    group: CellData,
    texts: tuple[Int32Array, ...],
    tokens: Tokens,
    spec: CacheSpec,
    n_ctx: int,
    *,
    can_slide: bool,
) -> CellData:
    """Cut a group to its window; the tokens before it count as evicted.

    Args:
        group: the cells of the layers.
        texts: where the tokens of each sequence stand.
        tokens: their ids.
        spec: the shape of the layers' cache.
        n_ctx: how many cells a cache has that keeps every token.
        can_slide: whether there are options with which the cache would not keep them.

    Raises:
        SnapshotMismatch: the cache keeps more than the file has.
        SnapshotFileError: a part of the window is missing.
    """
    held = [group.positions[group.cells_of(seq)] for seq in range(len(texts))]
    if all(np.array_equal(mine, text) for mine, text in zip(held, texts, strict=True)):
        return group
    if spec.size == n_ctx:
        remedy = (
            "let them slide: swa_full=False, a larger n_ctx or a smaller n_seq_max"
            if can_slide
            else "of this model we keep all: compute the text again, and save it with Sequence.save"
        )
        hint = f"of layers with a window the file has the last tokens only; {remedy}"
        raise SnapshotMismatch("window", "slid", "kept in full", hint)
    group = trimmed(group, spec.window)
    evicted = []
    for seq, text in enumerate(texts):
        mine = group.positions[group.cells_of(seq)]
        gone = text[: len(text) - len(mine)]
        if not np.array_equal(text[len(gone) :], mine):
            raise SnapshotFileError(f"llama.cpp's file: sequence {seq} lacks a part of its window")
        evicted.append(np.stack((gone, tokens.at(seq, gone))))
    return replace(group, evicted=tuple(evicted))


def check_part(
    streams: Iterable[Stream], shape: PartShape, spec: MemorySpec, file: LlamaFile
) -> None:
    """Check that the rows of a part are what the cache has in that place.

    Raises:
        SnapshotMismatch: of another type or size, or quantised in another way.
    """
    alike = transforms_alike(spec, file.version)
    for stream in streams:
        for name, blocks in (("K", stream.k), ("V", stream.v)):
            for block, (group, layer) in zip(blocks, shape.layers, strict=False):
                _check_block(name, block, spec.groups[group], layer, alike)


def transforms_alike(spec: MemorySpec, version: int) -> bool:
    """Return whether llama.cpp stores quantised rows under the same transform as we do.

    It does since 2026, but neither in latent attention nor where there are both windows and states.
    A file of an earlier version does not say.
    """
    layers = [layer for group in spec.groups for layer in group.layers]
    has_windows = any(layer.window for layer in layers)
    is_latent = any(layer.v_offset is not None for layer in layers)
    is_new = version in (*VERSION["2026-10"].values(), 0)
    return is_new and not is_latent and not (has_windows and spec.states is not None)


def differs_untransformed(spec: CacheSpec, layer: int) -> tuple[bool, bool]:
    """Return whether K, and V, of a layer would differ where not all is transformed alike."""
    is_latent = spec.layers[layer].v_offset is not None and spec.type_k.is_quantized
    return spec.hadamard_k(layer) > 0 or is_latent, spec.hadamard_v(layer) > 0


def _check_block(name: str, block: LayerRows, spec: CacheSpec, layer: int, alike: bool) -> None:
    is_k, shape = name == "K", spec.layers[layer]
    kind = spec.type_k if is_k else spec.type_v
    width = shape.n_embd_k if is_k else shape.n_embd_v
    if block.kind is not kind:
        hint = f"open the context with type_{name.lower()}={block.kind.label!r}"
        raise SnapshotMismatch(f"{name} of type", block.kind.label, kind.label, hint)
    if block.rows.shape[1] != (row_bytes := kind.row_bytes(width)):
        raise SnapshotMismatch(f"bytes a row of {name}", block.rows.shape[1], row_bytes)
    if not alike and differs_untransformed(spec, layer)[0 if is_k else 1]:
        hint = "compute the text again, or save f16 in llama.cpp"
        raise SnapshotMismatch(f"{kind.label} {name}", "as it is", "under a transform", hint)
