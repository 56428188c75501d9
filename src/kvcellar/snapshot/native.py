"""The native format: a snapshot as named arrays and a description; see ``docs/format.md``.

Arrays have plain types and shapes, so that any reader of safetensors can look at them. The rest is
in the description, which is JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvcellar.cache.content import (
    CellData,
    RowBytes,
    SequenceData,
    SequenceStateData,
    StateData,
    WindowData,
)
from kvcellar.errors import SnapshotFileError
from kvcellar.snapshot.snapshot import Json, SavedText, Snapshot, row_types
from kvcellar.types import AnyArray, ByteArray, KVType

VERSION = 1

Arrays = dict[str, AnyArray]

_DTYPES: Mapping[KVType, str] = {KVType.F32: "<f4", KVType.F16: "<f2"}


class SnapshotArrays(NamedTuple):
    """A snapshot as a file has it: arrays by name, and what they mean."""

    arrays: Arrays
    description: dict[str, Json]


def to_arrays(snapshot: Snapshot) -> SnapshotArrays:
    """Turn a snapshot into arrays and a description; arrays are views where they can be."""
    content, arrays = snapshot.content, Arrays()
    groups: list[Json] = []
    kinds = row_types(snapshot.fingerprint)
    for g, (group, kind) in enumerate(zip(content.groups, kinds, strict=True)):
        arrays.update(_of_group(f"group.{g}", group, kind))
        owners: list[Json] = [list(one.owners) for one in group.checkpoints]
        groups.append({"checkpoints": owners})
    states: list[Json] | None = None
    if content.states is not None:
        arrays["states"] = content.states.states
        states = [_of_held(f"state.{i}", h, arrays) for i, h in enumerate(content.states.held)]
    texts: list[Json] = []
    for i, text in enumerate(snapshot.texts):
        if text.logits is not None:
            arrays[f"sequence.{i}.logits"] = text.logits
        self_extended: list[Json] = list(text.self_extended)
        known: dict[str, Json] = {"grouped": self_extended, "grouped_end": text.self_extended_end}
        texts.append({**known, "tainted": text.inexact_from, "rounded": text.stored_as})
    description: dict[str, Json] = {
        "fingerprint": dict(snapshot.fingerprint),
        "n_seqs": content.n_seqs,
        "start": content.start,
        "groups": groups,
        "states": states,
        "texts": texts,
        "note": dict(snapshot.note),
    }
    return SnapshotArrays(arrays, description)


def from_arrays(packed: SnapshotArrays) -> Snapshot:
    """Turn arrays and a description into the snapshot.

    Raises:
        SnapshotFileError: an array or a field is missing or of another kind.
    """
    try:
        return _from_arrays(packed.arrays, packed.description)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise SnapshotFileError(f"the snapshot's description is damaged: {error!r}") from error


def _from_arrays(arrays: Arrays, about: Mapping[str, Any]) -> Snapshot:
    n_seqs = int(about["n_seqs"])
    if len(about["texts"]) != n_seqs:
        raise ValueError(f"{len(about['texts'])} texts of {n_seqs} sequences")
    layers = [len(group["layers"]) for group in about["fingerprint"]["groups"]]
    cells = tuple(
        _to_group(f"group.{g}", arrays, n_layers, n_seqs, one["checkpoints"])
        for g, (n_layers, one) in enumerate(zip(layers, about["groups"], strict=True))
    )
    states = None
    if about["states"] is not None:
        held = tuple(_to_held(f"state.{i}", h, arrays) for i, h in enumerate(about["states"]))
        states = StateData(arrays["states"], held)
    texts = tuple(
        SavedText(
            arrays.get(f"sequence.{i}.logits"),
            tuple(int(token) for token in text["grouped"]),
            int(text["grouped_end"]),
            None if text["tainted"] is None else int(text["tainted"]),
            str(text["rounded"]),
        )
        for i, text in enumerate(about["texts"])
    )
    content = SequenceData(n_seqs, cells, states, int(about["start"]))
    return Snapshot(dict(about["fingerprint"]), content, texts, dict(about["note"]))


# -- cells


def _of_group(
    name: str, group: CellData, kinds: tuple[KVType, KVType]
) -> Iterator[tuple[str, AnyArray]]:
    yield f"{name}.positions", group.positions
    yield f"{name}.tokens", group.tokens
    yield f"{name}.owners", group.owners
    yield from _of_rows(name, group.rows, kinds)
    for i, evicted in enumerate(group.evicted):
        if evicted.shape[1]:
            yield f"{name}.slid.{i}", evicted
    for i, one in enumerate(group.checkpoints):
        at = f"{name}.checkpoint.{i}"
        yield f"{at}.positions", one.positions
        yield f"{at}.tokens", one.tokens
        yield f"{at}.slid", one.evicted
        yield from _of_rows(at, one.rows, kinds)


def _to_group(
    name: str, arrays: Arrays, n_layers: int, n_seqs: int, checkpoints: list[list[int]]
) -> CellData:
    none = np.empty((2, 0), np.int32)
    return CellData(
        positions=arrays[f"{name}.positions"],
        tokens=arrays[f"{name}.tokens"],
        owners=arrays[f"{name}.owners"],
        rows=_to_rows(name, arrays, n_layers),
        evicted=tuple(arrays.get(f"{name}.slid.{i}", none) for i in range(n_seqs)),
        checkpoints=tuple(
            WindowData(
                arrays[f"{name}.checkpoint.{i}.positions"],
                arrays[f"{name}.checkpoint.{i}.tokens"],
                _to_rows(f"{name}.checkpoint.{i}", arrays, n_layers),
                arrays[f"{name}.checkpoint.{i}.slid"],
                tuple(int(owner) for owner in owners),
            )
            for i, owners in enumerate(checkpoints)
        ),
    )


def _of_rows(
    name: str, rows: RowBytes, kinds: tuple[KVType, KVType]
) -> Iterator[tuple[str, AnyArray]]:
    for part, layers, kind in (("k", rows.k, kinds[0]), ("v", rows.v, kinds[1])):
        for i, layer in enumerate(layers):
            if layer.shape[1]:
                yield f"{name}.layer.{i}.{part}", _typed(layer, kind)


def _to_rows(name: str, arrays: Arrays, n_layers: int) -> RowBytes:
    n = len(arrays[f"{name}.positions"])
    at = [f"{name}.layer.{i}" for i in range(n_layers)]
    k = [_raw(arrays.get(f"{layer}.k"), n) for layer in at]
    return RowBytes(tuple(k), tuple([_raw(arrays.get(f"{layer}.v"), n) for layer in at]))


def _typed(rows: ByteArray, kind: KVType) -> AnyArray:
    """View rows as numbers where NumPy has their type, else as bytes."""
    dtype = _DTYPES.get(kind)
    return rows if dtype is None else np.ascontiguousarray(rows).view(dtype)


def _raw(rows: AnyArray | None, n: int) -> ByteArray:
    if rows is None:
        return np.empty((n, 0), np.uint8)
    if rows.ndim != 2:
        raise ValueError(f"rows of shape {rows.shape}")
    return rows.view(np.uint8)


# -- states


def _of_held(name: str, held: SequenceStateData | None, arrays: Arrays) -> Json:
    if held is None:
        return None
    arrays[f"{name}.positions"], arrays[f"{name}.tokens"] = held.positions, held.tokens
    checkpoints: list[Json] = [list(pair) for pair in held.checkpoints]
    return {"state": held.state, "checkpoints": checkpoints}


def _to_held(
    name: str, about: Mapping[str, Any] | None, arrays: Arrays
) -> SequenceStateData | None:
    if about is None:
        return None
    pairs = tuple((int(n), int(state)) for n, state in about["checkpoints"])
    positions, tokens = arrays[f"{name}.positions"], arrays[f"{name}.tokens"]
    return SequenceStateData(positions, tokens, int(about["state"]), pairs)
