"""Small snapshots made by hand, with everything in them that there can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcellar.cache.content import (
    NO_TOKENS,
    CellData,
    RowBytes,
    SequenceData,
    SequenceStateData,
    StateData,
    WindowData,
)
from kvcellar.snapshot.native import to_arrays
from kvcellar.snapshot.snapshot import SavedText, Snapshot, fingerprint
from kvcellar.types import (
    ByteArray,
    CacheSpec,
    Int32Array,
    KVType,
    LayerPlace,
    LayerSpec,
    MemorySpec,
    RopeSpec,
    StateLayer,
    StateSpec,
)

N_VOCAB, WINDOW, N_SEQS = 11, 3, 3
ROPE = RopeSpec("neox", 8, factors=(1.0, 1.5, 2.0, 4.0))


def memory_spec(kind_k: KVType = KVType.F16, kind_v: KVType = KVType.F16) -> MemorySpec:
    """Two layers that see everything (one without V), one with a window, and states."""
    full = (LayerSpec(2, 32, 32, ROPE), LayerSpec(1, 128, 64, None, v_offset=0))
    window = (LayerSpec(1, 32, 32, ROPE, window=WINDOW),)
    groups = tuple(CacheSpec(16, 4, layers, kind_k, kind_v) for layers in (full, window))
    places = (LayerPlace(0, 0, 0), LayerPlace(0, 1, -1), LayerPlace(1, 0, 1))
    return MemorySpec(groups, StateSpec(8, 4, (StateLayer(3, 4), StateLayer(2))), places)


def sample(
    seed: int = 0,
    lengths: Sequence[int] = (6, 4, 0),
    kind_k: KVType = KVType.F16,
    kind_v: KVType = KVType.F16,
) -> Snapshot:
    """Sequences of these lengths; the second begins with tokens of the first."""
    rng, spec = np.random.default_rng(seed), memory_spec(kind_k, kind_v)
    texts = [rng.integers(0, N_VOCAB, n).astype(np.int32) for n in lengths]
    full, window = spec.groups
    content = SequenceData(
        len(lengths),
        (_full(rng, full, texts), _window(rng, window, texts)),
        _states(rng, texts),
    )
    saved = tuple(_text(rng, i, len(text)) for i, text in enumerate(texts))
    return Snapshot(fingerprint("sample", "ab" * 32, spec), content, saved, {"for": "tests"})


def _full(rng: np.random.Generator, spec: CacheSpec, texts: list[Int32Array]) -> CellData:
    """All tokens, a cell each; the first cells of the first two sequences are shared."""
    shared = min([len(text) for text in texts[:2]], default=0) // 2
    pairs: list[tuple[int, int]] = []
    at: list[int] = []
    tokens: list[int] = []
    for seq, text in enumerate(texts):
        for position, token in enumerate(text.tolist()):
            if seq == 1 and position < shared:
                pairs.append((position, seq))
                continue
            pairs.append((len(at), seq))
            at.append(position)
            tokens.append(token)
    owners = np.array(pairs, np.int64).reshape(-1, 2).T.copy()
    rows = _rows(rng, spec, len(at))
    none = (NO_TOKENS,) * len(texts)
    return CellData(np.array(at, np.int32), np.array(tokens, np.int32), owners, rows, none)


def _window(rng: np.random.Generator, spec: CacheSpec, texts: list[Int32Array]) -> CellData:
    """The last tokens of each, what slid out before them, and a checkpoint of the first."""
    positions = [np.arange(len(text), dtype=np.int32) for text in texts]
    kept = [at[-WINDOW:] for at in positions]
    seqs = np.repeat(np.arange(len(texts)), [len(at) for at in kept])
    at = np.concatenate([np.empty(0, np.int32), *kept])
    tokens = np.concatenate(
        [np.empty(0, np.int32), *(t[i] for t, i in zip(texts, kept, strict=True))]
    )
    evicted = tuple(
        np.stack((p[:-WINDOW], t[:-WINDOW])) for p, t in zip(positions, texts, strict=True)
    )
    owners = np.stack((np.arange(len(at)), seqs)).astype(np.int64)
    checkpoints: tuple[WindowData, ...] = ()
    if texts and len(texts[0]) > WINDOW:
        old = positions[0][:WINDOW]
        rows = _rows(rng, spec, WINDOW)
        checkpoints = (WindowData(old, texts[0][old], rows, NO_TOKENS, (0,)),)
    return CellData(at, tokens, owners, _rows(rng, spec, len(at)), evicted, checkpoints)


def _states(rng: np.random.Generator, texts: list[Int32Array]) -> StateData:
    held: list[SequenceStateData | None] = []
    n_states = 0
    for text in texts:
        if not len(text):
            held.append(None)
            continue
        kept = ((len(text) // 2, n_states + 1),) if len(text) > 1 else ()
        at = np.arange(len(text), dtype=np.int32)
        held.append(SequenceStateData(at, text, n_states, kept))
        n_states += 1 + len(kept)
    return StateData(rng.normal(size=(n_states, 9)).astype(np.float32), tuple(held))


def _rows(rng: np.random.Generator, spec: CacheSpec, n: int) -> RowBytes:
    def made(kind: KVType, width: int) -> ByteArray:
        return finite(kind, rng.integers(0, 256, (n, kind.row_bytes(width)), np.uint8))

    k = tuple(made(spec.type_k, layer.n_embd_k) for layer in spec.layers)
    return RowBytes(k, tuple(made(spec.type_v, layer.n_embd_v) for layer in spec.layers))


def finite(kind: KVType, rows: ByteArray) -> ByteArray:
    """Make random rows finite: every value or scale gets a zero into its exponent."""
    for last in (1, 3) if kind.is_quantized else (kind.block_bytes - 1,):
        rows[:, last :: kind.block_bytes] &= 0b1011_1111
    return rows


def _text(rng: np.random.Generator, number: int, size: int) -> SavedText:
    if size == 0:
        return SavedText()
    logits = rng.normal(size=N_VOCAB).astype(np.float32)
    return SavedText(logits) if number else SavedText(None, (4, 2), 1, 1)


def assert_same(a: Snapshot, b: Snapshot) -> None:
    """See that two snapshots are equal, byte for byte."""
    one, other = to_arrays(a), to_arrays(b)
    assert one.description == other.description
    assert list(one.arrays) == list(other.arrays)
    for name, array in one.arrays.items():
        again = other.arrays[name]
        assert (array.dtype, array.shape) == (again.dtype, again.shape), name
        assert array.tobytes() == again.tobytes(), name
