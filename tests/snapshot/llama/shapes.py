"""Small memories of every kind, and contents for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from kvcellar.snapshot.llama.from_content import Target, from_content
from kvcellar.snapshot.llama.layout import FileGeneration, Kind, LlamaFile
from kvcellar.snapshot.llama.writer import file_pieces
from kvcellar.types import (
    ByteArray,
    CacheSpec,
    Int32Array,
    Int64Array,
    KVType,
    LayerPlace,
    LayerSpec,
    MemorySpec,
    StateLayer,
    StateSpec,
)
from tests.snapshot.samples import finite

N_VOCAB, ARCH = 100, "tiny"
LAYER = LayerSpec(n_head_kv=1, head_dim_k=4, head_dim_v=2)
WIDE = LayerSpec(n_head_kv=1, head_dim_k=32, head_dim_v=64)
LATENT = LayerSpec(n_head_kv=1, head_dim_k=6, head_dim_v=4, v_offset=2)
WINDOW = replace(LAYER, window=3)
STATES = StateSpec(6, 4, (StateLayer(3, 2), StateLayer(1)))


def plain(layer: LayerSpec = LAYER, **options: object) -> MemorySpec:
    """Two layers that attend alike."""
    spec = CacheSpec(32, 4, (layer, layer), padding=1)
    return MemorySpec.single(replace(spec, **options))  # type: ignore[arg-type]


def windowed() -> MemorySpec:
    """A layer with a window, one without, one with."""
    whole = plain().groups[0]
    slides = replace(whole, size=16, layers=(WINDOW, WINDOW))
    places = (LayerPlace(1, 0), LayerPlace(0, 0), LayerPlace(1, 1))
    return MemorySpec((replace(whole, layers=(LAYER,)), slides), None, places)


def hybrid() -> MemorySpec:
    """Two layers with states, one that attends."""
    whole = replace(plain().groups[0], layers=(LAYER,))
    places = (LayerPlace(state=0), LayerPlace(0, 0), LayerPlace(state=1))
    return MemorySpec((whole,), STATES, places)


def recurrent() -> MemorySpec:
    """Nothing but states."""
    return MemorySpec((), STATES, (LayerPlace(state=0), LayerPlace(state=1)))


SPECS: dict[str, MemorySpec] = {
    "plain": plain(),
    "f32 and bf16": plain(type_k=KVType.F32, type_v=KVType.BF16),
    "quantised": plain(WIDE, type_k=KVType.Q8_0, type_v=KVType.Q4_1),
    "latent": plain(LATENT),
    "windows": windowed(),
    "hybrid": hybrid(),
    "recurrent": recurrent(),
}
OLD = ("plain", "f32 and bf16")
"""Those of which llama.cpp of 2025-01 had files that we read whatever they hold."""


def content_of(
    spec: MemorySpec, n_shared: int, n_own: Sequence[int], seed: int = 0
) -> SequenceData:
    """Sequences that share their first tokens, and then have some of their own."""
    rng = np.random.default_rng(seed)
    positions, owners = _cells(n_shared, n_own)
    tokens = rng.integers(0, N_VOCAB, len(positions)).astype(np.int32)
    groups = []
    for group in spec.groups:
        rows = _rows(group, len(positions), rng)
        evicted = (NO_TOKENS,) * len(n_own)
        cells = CellData(positions, tokens, owners, rows, evicted)
        groups.append(trimmed(cells, group.window) if group.window else cells)
    if spec.states is None:
        return SequenceData(len(n_own), tuple(groups))
    held: list[SequenceStateData | None] = []
    for seq in range(len(n_own)):
        mine = owners[0][owners[1] == seq]
        state = len([one for one in held if one])
        held.append(SequenceStateData(positions[mine], tokens[mine], state) if len(mine) else None)
    values = rng.standard_normal((len(n_own), spec.states.row_bytes // 4)).astype(np.float32)
    used = len([one for one in held if one])
    return SequenceData(len(n_own), tuple(groups), StateData(values[:used], tuple(held)))


def parts_of(spec: MemorySpec) -> list[CacheSpec | StateSpec]:
    """The parts of a cache of that memory."""
    return [*spec.groups, *([] if spec.states is None else [spec.states])]


def file_of(
    content: SequenceData,
    spec: MemorySpec,
    kind: Kind = "sequence",
    generation: FileGeneration = "2026-10",
    v_trans: bool = False,
) -> LlamaFile:
    """A file of a content, whose head lists the tokens of the first sequence."""
    seq_ids = tuple(2 * seq for seq in range(content.n_seqs))
    target = Target(kind, generation, seq_ids, v_trans)
    return from_content(content, spec, ARCH, first_tokens(content), target)


def bytes_of(file: LlamaFile, spec: MemorySpec) -> bytes:
    """The bytes of a file."""
    return b"".join(file_pieces(file, len(spec.places)))


def first_tokens(content: SequenceData) -> list[int]:
    """The tokens of the first sequence."""
    if content.groups:
        group = content.groups[0]
        return [int(token) for token in group.tokens[group.cells_of(0)]]
    assert content.states is not None
    held = content.states.held[0]
    return [] if held is None else [int(token) for token in held.tokens]


def _cells(n_shared: int, n_own: Sequence[int]) -> tuple[Int32Array, Int64Array]:
    """Positions of cells, ascending, and who owns which."""
    cells = [(at, seq) for seq, n in enumerate(n_own) for at in range(n_shared, n_shared + n)]
    cells.sort()
    positions = [*range(n_shared), *(at for at, _ in cells)]
    owners = [(cell, seq) for cell in range(n_shared) for seq in range(len(n_own))]
    owners += [(n_shared + i, seq) for i, (_, seq) in enumerate(cells)]
    pairs = np.array(owners, np.int64).reshape(-1, 2).T
    return np.array(positions, np.int32), pairs


def _rows(spec: CacheSpec, n: int, rng: np.random.Generator) -> RowBytes:
    k = [_finite(spec.type_k, n, layer.n_embd_k, rng) for layer in spec.layers]
    v = [_finite(spec.type_v, n, layer.n_embd_v, rng) for layer in spec.layers]
    return RowBytes(tuple(k), tuple(v))


def _finite(kind: KVType, n: int, width: int, rng: np.random.Generator) -> ByteArray:
    return finite(kind, rng.integers(0, 256, (n, kind.row_bytes(width)), np.uint8))
