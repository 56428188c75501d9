"""The native format: a snapshot as named arrays and a description; see ``docs/format.md``.

Arrays have plain types and shapes, so that any reader of safetensors can look at them. The rest is
in the description, which is JSON.

A file is not trusted: :func:`outline` compares what it says of its arrays with what the description
needs, before any of them is read or decompressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

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


# -- sizes


class Declared(NamedTuple):
    """What a file says of an array: NumPy's name of its type, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """How large a snapshot is, as far as that is known before its arrays are read.

    Attributes:
        fingerprint: of what it was taken.
        n_seqs: how many sequences it has.
        n_cells: cells of each group of layers.
        n_kept: cells of all checkpoints of each group.
        n_states: recurrent states.
        n_logits: values of each row of logits.
    """

    fingerprint: Mapping[str, Json]
    n_seqs: int
    n_cells: tuple[int, ...]
    n_kept: tuple[int, ...]
    n_states: int
    n_logits: tuple[int, ...]


Admit: TypeAlias = Callable[[Outline], None]
"""Raises if a snapshot of that outline is not wanted."""


def outline(about: Mapping[str, Any], declared: Mapping[str, Declared]) -> Outline:
    """Compare the types and shapes of arrays with what a description needs.

    Raises:
        SnapshotFileError: one is missing, unknown, of another type, or of another size.
    """
    try:
        needs = _Needs(declared)
        found = _outline(about, needs)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise SnapshotFileError(f"the snapshot's description is damaged: {error!r}") from error
    needs.refuse_others()
    return found


def _outline(about: Mapping[str, Any], needs: _Needs) -> Outline:
    n_seqs, print_ = int(about["n_seqs"]), about["fingerprint"]
    if len(about["texts"]) != n_seqs:
        raise ValueError(f"{len(about['texts'])} texts of {n_seqs} sequences")
    n_cells, n_kept = [], []
    groups = zip(print_["groups"], row_types(print_), about["groups"], strict=True)
    for g, (group, kinds, one) in enumerate(groups):
        at, layers = f"group.{g}", group["layers"]
        n = needs.cells(at, layers, kinds)
        _, n_pairs = needs.take(f"{at}.owners", "<i8", 2, None)
        if n_pairs > n * n_seqs:
            raise ValueError(f"{n_pairs} owners of {n} cells")
        for i in range(n_seqs):
            needs.take(f"{at}.slid.{i}", "<i4", 2, None, required=False)
        kept = [f"{at}.checkpoint.{i}" for i in range(len(one["checkpoints"]))]
        for name in kept:
            needs.take(f"{name}.slid", "<i4", 2, None)
        n_kept.append(sum(needs.cells(name, layers, kinds) for name in kept))
        n_cells.append(n)
    n_states = 0
    if about["states"] is not None:
        width = sum(layer["n_conv"] + layer["n_ssm"] for layer in print_["states"])
        n_states, _ = needs.take("states", "<f4", None, width)
        held = [(i, one) for i, one in enumerate(about["states"]) if one is not None]
        if n_states > sum(1 + len(one["checkpoints"]) for _, one in held):
            raise ValueError(f"{n_states} states of {len(held)} sequences")
        for i, _ in held:
            (n_tokens,) = needs.take(f"state.{i}.positions", "<i4", None)
            needs.take(f"state.{i}.tokens", "<i4", n_tokens)
    logits = [
        needs.take(f"sequence.{i}.logits", "<f4", None, required=False) for i in range(n_seqs)
    ]
    n_logits = [shape[0] for shape in logits if shape]
    return Outline(print_, n_seqs, tuple(n_cells), tuple(n_kept), n_states, tuple(n_logits))


class _Needs:
    """What a file says of its arrays, less what was taken of them."""

    def __init__(self, declared: Mapping[str, Declared]) -> None:
        self._left = dict(declared)

    def take(
        self, name: str, dtype: str, *shape: int | None, required: bool = True
    ) -> tuple[int, ...]:
        """Return the shape of an array, which must have that type and, but for None, that shape.

        It is empty if an array is not there that need not be.
        """
        found = self._left.pop(name, None)
        if found is None:
            if required:
                raise SnapshotFileError(f"the array {name} is missing")
            return ()
        fits = found.dtype == dtype and len(found.shape) == len(shape)
        if not fits or any(n not in (None, m) for n, m in zip(shape, found.shape, strict=True)):
            said = f"{found.dtype} {list(found.shape)}"
            wanted = ["any" if n is None else n for n in shape]
            raise SnapshotFileError(f"the array {name} is {said}, and {dtype} {wanted} is needed")
        return found.shape

    def cells(self, at: str, layers: list[Mapping[str, Any]], kinds: tuple[KVType, KVType]) -> int:
        """Take cells with their rows in every layer; return how many cells there are."""
        (n,) = self.take(f"{at}.positions", "<i4", None)
        self.take(f"{at}.tokens", "<i4", n)
        for i, layer in enumerate(layers):
            has_v = layer["v_offset"] is None
            widths = layer["head_dim_k"], layer["head_dim_v"] if has_v else 0
            for part, kind, width in zip("kv", kinds, widths, strict=True):
                n_values = layer["n_head_kv"] * width
                dtype = _DTYPES.get(kind)
                if n_values and dtype is None:
                    self.take(f"{at}.layer.{i}.{part}", "|u1", n, kind.row_bytes(n_values))
                elif n_values:
                    self.take(f"{at}.layer.{i}.{part}", dtype or "", n, n_values)
        return n

    def refuse_others(self) -> None:
        """Raise SnapshotFileError if an array was not taken."""
        if self._left:
            names = ", ".join(sorted(self._left)[:3])
            raise SnapshotFileError(f"arrays that no snapshot has: {names}")


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
