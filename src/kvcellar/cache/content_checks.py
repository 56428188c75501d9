"""Whether a content is sound and fits a cache; it may come from any file.

Nothing in a content is trusted: every index and size is checked here, so that an import can neither
fail half way nor read what is not there. K and V that are not finite would reach other sequences
(invariant 8), and states their own text, so these are refused wherever they come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcellar.cache.content import (
    CellData,
    RowBytes,
    SequenceData,
    SequenceStateData,
    StateData,
    WindowData,
)
from kvcellar.errors import SnapshotFileError, SnapshotMismatch
from kvcellar.types import (
    MAX_POSITION,
    AnyArray,
    CacheSpec,
    Int32Array,
    KVType,
    StateSpec,
    all_finite,
    finite_rows,
)


def check_content(content: SequenceData, specs: Sequence[CacheSpec | StateSpec]) -> None:
    """Check that a content is sound and has the shape of a cache over stores of these shapes.

    Raises:
        SnapshotMismatch: it has another shape.
        SnapshotFileError: it contradicts itself.
    """
    if not 0 <= content.start < MAX_POSITION:
        raise _contradiction(f"it begins at {content.start}")
    groups = [spec for spec in specs if isinstance(spec, CacheSpec)]
    states = [spec for spec in specs if isinstance(spec, StateSpec)]
    if len(groups) != len(content.groups):
        raise SnapshotMismatch("groups of K and V", len(content.groups), len(groups))
    if bool(states) != (content.states is not None):
        raise SnapshotMismatch("recurrent states", content.states is not None, bool(states))
    for group, spec in zip(content.groups, groups, strict=True):
        _check_group(group, spec, content.n_seqs)
    if content.states is not None:
        _check_states(content.states, states[0], content.n_seqs)
    check_finite(content, [(spec.type_k, spec.type_v) for spec in groups])
    _check_agreement(content)


def check_finite(content: SequenceData, kinds: Sequence[tuple[KVType, KVType]]) -> None:
    """Check that K, V and states are finite.

    Args:
        content: of rows that are as wide as whole blocks.
        kinds: how K and V of each group are stored.

    Raises:
        SnapshotFileError: one is not; says where.
    """
    for g, (group, (kind_k, kind_v)) in enumerate(zip(content.groups, kinds, strict=True)):
        among = f" of group {g}" if len(content.groups) > 1 else ""
        held = [("cell", group.rows)]
        held += [(f"checkpoint {i}, cell", one.rows) for i, one in enumerate(group.checkpoints)]
        for where, rows in held:
            for name, layers, kind in (("K", rows.k, kind_k), ("V", rows.v, kind_v)):
                for layer, part in enumerate(layers):
                    if not all_finite(kind.numbers(np.ascontiguousarray(part)), kind):
                        cell = int(np.argmin(finite_rows(part, kind)))
                        raise _not_finite(f"{name} of layer {layer}{among} in {where} {cell}")
    if content.states is not None and not np.isfinite(content.states.states).all():
        state = int(np.argmin(np.isfinite(content.states.states).all(axis=1)))
        raise _not_finite(f"state {state}")


def _not_finite(what: str) -> SnapshotFileError:
    return SnapshotFileError(
        f"{what} is not finite: the file is damaged or forged; compute the text again"
    )


def _check_group(group: CellData, spec: CacheSpec, n_seqs: int) -> None:
    _check_texts("cells", group.positions, group.tokens)
    n = len(group.positions)
    _check_rows(group.rows, spec, n)
    _check_owners(group.owners, n, n_seqs)
    if len(group.evicted) != n_seqs:
        raise _contradiction("it does not list what slid out for each sequence")
    for evicted in group.evicted:
        _check_slid(evicted)
    for one in group.checkpoints:
        _check_window(one, spec, n_seqs)
    ends = [(owner, int(one.positions[-1])) for one in group.checkpoints for owner in one.owners]
    if len(set(ends)) != len(ends):
        raise _contradiction("two checkpoints of a sequence end at one position")


def _check_window(one: WindowData, spec: CacheSpec, n_seqs: int) -> None:
    _check_texts("a checkpoint", one.positions, one.tokens)
    _require(len(one.positions) > 0, "a checkpoint is empty")
    _require(bool((np.diff(one.positions) >= 0).all()), "positions of a checkpoint descend")
    _check_rows(one.rows, spec, len(one.positions))
    _check_slid(one.evicted)
    owners = set(one.owners)
    _require(len(owners) == len(one.owners) > 0, "the owners of a checkpoint repeat")
    _require(owners <= set(range(n_seqs)), "a checkpoint belongs to an unknown sequence")


def _check_texts(what: str, positions: AnyArray, tokens: AnyArray) -> None:
    if not (positions.dtype == tokens.dtype == np.int32 and positions.ndim == tokens.ndim == 1):
        raise _contradiction(f"{what}: positions or tokens are no ints")
    if positions.shape != tokens.shape:
        raise _contradiction(f"{what}: not as many tokens as positions")
    if len(positions):
        for bad in (int(positions.min()), int(positions.max())):
            if not 0 <= bad < MAX_POSITION:
                raise _contradiction(f"{what}: position {bad}")
        if int(tokens.min()) < -1:
            raise _contradiction(f"{what}: token {tokens.min()}")


def _check_slid(evicted: AnyArray) -> None:
    if evicted.ndim != 2 or len(evicted) != 2:
        raise _contradiction("what slid out is not positions over tokens")
    _check_texts("what slid out", evicted[0], evicted[1])
    if (np.diff(evicted[0]) < 0).any():
        raise _contradiction("positions of what slid out descend")


def _check_rows(rows: RowBytes, spec: CacheSpec, n: int) -> None:
    for name, parts in (("K", rows.k), ("V", rows.v)):
        if len(parts) != len(spec.layers):
            raise SnapshotMismatch(f"layers of {name}", len(parts), len(spec.layers))
    for i, layer in enumerate(spec.layers):
        for name, part, kind, width in (
            ("K", rows.k[i], spec.type_k, layer.n_embd_k),
            ("V", rows.v[i], spec.type_v, layer.n_embd_v),
        ):
            if part.dtype != np.uint8 or part.ndim != 2:
                raise _contradiction(f"rows of {name} are no bytes")
            if len(part) != n:
                raise _contradiction(f"{len(part)} rows of {name} for {n} cells")
            if part.shape[1] != (row_bytes := kind.row_bytes(width)):
                what = f"bytes a row of {name} in layer {i}"
                raise SnapshotMismatch(what, part.shape[1], row_bytes)


def _check_owners(owners: AnyArray, n: int, n_seqs: int) -> None:
    if owners.ndim != 2 or len(owners) != 2:
        raise _contradiction("owners are not cells over sequences")
    if owners.dtype != np.int64:
        raise _contradiction("owners are no ints")
    for what, numbers, end in (("cell", owners[0], n), ("sequence", owners[1], n_seqs)):
        bad = numbers[(numbers < 0) | (numbers >= end)]
        if len(bad):
            raise _contradiction(f"an owner of {what} {bad[:1].tolist()}, of {end}")
    if len(np.unique(owners[0] * n_seqs + owners[1])) != owners.shape[1]:
        raise _contradiction("a cell has an owner twice")
    if len(np.unique(owners[0])) != n:
        raise _contradiction("a cell has no owner")


def _check_states(content: StateData, spec: StateSpec, n_seqs: int) -> None:
    states, width = content.states, spec.row_bytes // 4
    _require(states.dtype == np.float32 and states.ndim == 2, "states are no f32 rows")
    if len(states) and states.shape[1] != width:
        raise SnapshotMismatch("values a state", states.shape[1], width)
    _require(len(content.held) == n_seqs, "it does not list which state each sequence has")
    texts: dict[int, bytes] = {}
    for held in content.held:
        if held is not None:
            _check_held(held, len(states))
            for n, state in [(len(held.tokens), held.state), *held.checkpoints]:
                text = held.tokens[:n].tobytes()
                _require(texts.setdefault(state, text) == text, f"state {state} is of two texts")


def _check_held(held: SequenceStateData, n_states: int) -> None:
    _check_texts("a state", held.positions, held.tokens)
    n, ends = len(held.positions), [end for end, _ in held.checkpoints]
    _require(n > 0, "a state has absorbed nothing")
    _require(bool((np.diff(held.positions) >= 0).all()), "positions of a state descend")
    _require(ends == sorted(set(ends)), "checkpoints of a state are in disorder")
    _require(all(0 < end <= n for end in ends), "a checkpoint of a state lies beyond it")
    rows = [held.state, *(state for _, state in held.checkpoints)]
    _require(all(0 <= row < n_states for row in rows), "there is no such state")


def _check_agreement(content: SequenceData) -> None:
    """Check that all parts hold sequences up to the same position."""
    for seq in range(content.n_seqs):
        ends = set()
        for group in content.groups:
            ends.add(_check_text(group, seq, content.start))
        if content.states is not None:
            held = content.states.held[seq]
            ends.add(-1 if held is None else int(held.positions[-1]))
            _require(held is None or held.positions[0] >= content.start, "it begins too early")
        if len(ends) > 1:
            raise _contradiction(f"the parts end sequence {seq} at different positions")


def _check_text(group: CellData, seq: int, start: int) -> int:
    """Check that a sequence is one text, which its checkpoints begin; return where it ends."""
    text, n_slid = group.text_of(seq), group.evicted[seq].shape[1]
    n = text.shape[1]
    if n_slid and (n_slid == n or text[0][n_slid - 1] > text[0][n_slid]):
        raise _contradiction("what slid out is not behind")
    if n and int(text[0][0]) < start:
        raise _contradiction("it begins too early")
    for one in group.checkpoints:
        if seq in one.owners:
            kept = np.concatenate((one.evicted, np.stack((one.positions, one.tokens))), axis=1)
            begin = text[:, text[0] <= one.positions[-1]]
            is_same = np.array_equal(_in_order(kept), _in_order(begin))
            _require(is_same, f"a checkpoint of sequence {seq} is of another text")
    return int(text[0][-1]) if n else -1


def _in_order(text: Int32Array) -> Int32Array:
    """Positions over tokens, sorted; where positions are equal, cells have no order."""
    return text[:, np.lexsort((text[1], text[0]))]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise _contradiction(what)


def _contradiction(what: str) -> SnapshotFileError:
    return SnapshotFileError(f"the snapshot contradicts itself: {what}")
