"""A snapshot as a value: the content of sequences, what else is known of them, and of which model.

Its fingerprint is what has to be equal for K, V and states of one context to mean the same in
another: JSON values, so that it can be written down, compared field by field, and hashed the same
way everywhere. Some fields only say how rows are stored; rows can be converted to other types.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias, cast

from kvcellar.cache.content import CellData, RowBytes, SequenceData
from kvcellar.errors import OptionError, SnapshotError, SnapshotFileError, SnapshotMismatch, shown
from kvcellar.types import (
    ByteArray,
    CacheSpec,
    Float32Array,
    KVType,
    MemorySpec,
    RowFormat,
    all_finite,
)

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The content of one or several sequences.

    Attributes:
        fingerprint: of the context that they were in, and how rows are stored here.
        content: what the cache had.
        texts: what else is known, sequence by sequence.
        note: free text from the writer, for people.
    """

    fingerprint: Mapping[str, Json]
    content: SequenceData
    texts: tuple[SavedText, ...]
    note: Mapping[str, str | int] = field(default_factory=dict)


def check_note(note: object) -> dict[str, str | int]:
    """Return a note of a snapshot as it is written.

    Raises:
        OptionError: it is no mapping of names to texts and integers.
    """
    if note is None:
        return {}
    if not isinstance(note, Mapping):
        raise OptionError(f"note={shown(note)}: give a mapping of names to texts or integers")
    for name, value in note.items():
        if not isinstance(name, str) or not isinstance(value, (str, int)):
            raise OptionError(
                f"note: {shown(name)} is {shown(value)}: names, and texts or integers are written"
            )
    return dict(note)


@dataclass(frozen=True, slots=True, eq=False)
class SavedText:
    """The state of a saved sequence beside its cells.

    Attributes:
        logits: those of the next token, ``[n_vocab]``; None: they have to be computed again.
        self_extended: the first tokens in the order of the text, where positions were divided.
        self_extended_end: the position that they end before.
        inexact_from: the first token whose K and V are not what a fresh decode of the text would
            give, because something before it was removed or stands elsewhere; None: there is none.
        stored_as: the digest of a fingerprint in whose types K and V once were, if that was not
            how they are stored here; else "".
    """

    logits: Float32Array | None = None
    self_extended: tuple[int, ...] = ()
    self_extended_end: int = 0
    inexact_from: int | None = None
    stored_as: str = ""

    def part(self, start: int, stop: int, size: int, end: int) -> SavedText:
        """Return what is known of tokens ``[start, stop)`` by themselves.

        Args:
            start: the first of them.
            stop: the first one behind them.
            size: how many tokens there are in all.
            end: the position behind their last one.
        """
        first = 0 if start else self.inexact_from  # what stood before is missing
        return SavedText(
            self.logits if stop == size > start else None,
            self.self_extended[start:stop],
            min(self.self_extended_end, end),
            first if start < stop and first is not None and first < stop else None,
            self.stored_as,
        )


ROW_TYPES = ("type_k", "type_v", "hadamard_k", "hadamard_v")
"""Fields of a group that say how rows are stored, not what they mean."""

_HINTS: Mapping[str, str] = {
    "weights": "it was computed by another model, or by another quantisation of it",
    "architecture": "it was computed by another model",
    "type_k": "load it with convert=True, or make the context with that type_k",
    "type_v": "load it with convert=True, or make the context with that type_v",
}


def fingerprint(architecture: str, weights: str, spec: MemorySpec) -> dict[str, Json]:
    """Return the fingerprint of a context.

    Args:
        architecture: as the model file names it.
        weights: a hash of all that the model computes with.
        spec: the shape of its memory; sizes and numbers of sequences do not count.
    """
    states: list[Json] = [] if spec.states is None else [asdict(s) for s in spec.states.layers]
    groups: list[Json] = [_group(group) for group in spec.groups]
    return {
        "architecture": architecture,
        "weights": weights,
        "groups": groups,
        "states": states,
    }


def check_same(
    stored: Mapping[str, Json], wanted: Mapping[str, Json], *, row_types: bool = True
) -> None:
    """Check that two fingerprints are equal.

    Args:
        stored: that of a snapshot.
        wanted: that of a context.
        row_types: whether K and V have to be stored in the same types.

    Raises:
        SnapshotMismatch: they are not; names the field that says most.
    """
    if stored == wanted and digest(stored) == digest(wanted):  # 1 equals True, but not as JSON
        return
    found = [(_name(one[0]), *one) for one in _differences(dict(stored), dict(wanted), "")]
    # The weights' hash has all settings of a model in it, so one of these says more.
    found.sort(key=lambda one: 2 if one[0] in ROW_TYPES else int(one[0] == "weights"))
    is_other = any(name == "weights" for name, *_ in found)
    for name, path, a, b in found:
        if row_types or name not in ROW_TYPES:
            hint = _HINTS.get(name, _HINTS["weights"] if is_other else "")
            raise SnapshotMismatch(path, _short(a), _short(b), hint)


def digest(print_: Mapping[str, Json]) -> str:
    """Hash a fingerprint to 64 hexadecimal digits, equal on every machine."""
    text = json.dumps(print_, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def row_types(print_: Mapping[str, Json]) -> list[tuple[KVType, KVType]]:
    """Return the types of K and V, group by group.

    Raises:
        SnapshotFileError: the fingerprint does not say.
    """
    try:
        groups = cast("list[dict[str, str]]", print_["groups"])
        return [(KVType.parse(one["type_k"]), KVType.parse(one["type_v"])) for one in groups]
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotFileError(f"the snapshot's fingerprint is damaged: {error}") from None


def with_row_types(print_: Mapping[str, Json], specs: list[CacheSpec]) -> dict[str, Json]:
    """Return the fingerprint with rows stored as caches of these shapes do."""
    return {**print_, "groups": [_group(spec) for spec in specs]}


def _group(spec: CacheSpec) -> dict[str, Json]:
    layers: list[Json] = [json.loads(json.dumps(asdict(layer))) for layer in spec.layers]
    numbers = range(len(spec.layers))
    return {
        "type_k": spec.type_k.label,
        "type_v": spec.type_v.label,
        "hadamard_k": [spec.hadamard_k(i) for i in numbers],
        "hadamard_v": [spec.hadamard_v(i) for i in numbers],
        "layers": layers,
    }


def _name(path: str) -> str:
    """Return the last field of a path."""
    return path.rpartition(".")[2].partition("[")[0]


def _differences(a: Json, b: Json, path: str) -> Iterator[tuple[str, Json, Json]]:
    """Yield where two values differ: paths like ``groups[0].layers[3].rope.freq_base``."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*b, *(key for key in a if key not in b)]:
            at = f"{path}.{key}" if path else key
            yield from _differences(a.get(key), b.get(key), at)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _differences(one, other, f"{path}[{i}]")
    elif a != b or type(a) is not type(b):
        yield path, a, b


def _short(value: Json) -> Json:
    text = str(value)
    if isinstance(value, list):
        return f"{len(value)} entries"
    return value if len(text) <= 24 else f"{text[:20]}…"


Convert: TypeAlias = Callable[[ByteArray, RowFormat, RowFormat], ByteArray]
"""Converts rows from one format to another."""


def converted(snapshot: Snapshot, specs: Sequence[CacheSpec], convert: Convert) -> Snapshot:
    """Convert a snapshot to how caches of these shapes store rows; return itself if they agree.

    Raises:
        SnapshotFileError: its rows are not what it says they are, or not finite.
        SnapshotError: a value is too large for its new type.
        OptionError: there is no such conversion.
    """
    print_: Mapping[str, Any] = snapshot.fingerprint
    stored = _formats(print_)
    wanted = [
        (tuple(spec.k_format(i) for i in layers), tuple(spec.v_format(i) for i in layers))
        for spec in specs
        for layers in [range(len(spec.layers))]
    ]
    if stored == wanted:
        return snapshot
    groups = tuple(
        _converted(group, old, new, convert)
        for group, old, new in zip(snapshot.content.groups, stored, wanted, strict=True)
    )
    return replace(
        snapshot,
        fingerprint=with_row_types(snapshot.fingerprint, list(specs)),
        content=replace(snapshot.content, groups=groups),
    )


Formats = tuple[tuple[RowFormat, ...], tuple[RowFormat, ...]]


def _formats(print_: Mapping[str, Any]) -> list[Formats]:
    """Return the formats of K and V, group by group and layer by layer."""
    found = []
    for group, (k, v) in zip(print_["groups"], row_types(print_), strict=True):
        sizes = [group.get(name) for name in ("hadamard_k", "hadamard_v")]
        n_layers = len(group["layers"])
        for one in sizes:
            if not isinstance(one, list) or len(one) != n_layers or not all(map(_is_size, one)):
                raise SnapshotFileError("the snapshot contradicts itself: sizes of transforms")
        of_k, of_v = ([RowFormat(t, n) for n in ns] for t, ns in zip((k, v), sizes, strict=True))
        found.append((tuple(of_k), tuple(of_v)))
    return found


def _is_size(size: object) -> bool:
    """Return whether a transform can have that size: a power of two, or 0 for none."""
    return isinstance(size, int) and 0 <= size == size & -size


def _converted(group: CellData, old: Formats, new: Formats, convert: Convert) -> CellData:
    def change(rows: RowBytes) -> RowBytes:
        k = tuple(_rows(*one, convert) for one in _layers("K", rows.k, old[0], new[0]))
        v = tuple(_rows(*one, convert) for one in _layers("V", rows.v, old[1], new[1]))
        return RowBytes(k, v)

    checkpoints = tuple(replace(one, rows=change(one.rows)) for one in group.checkpoints)
    return replace(group, rows=change(group.rows), checkpoints=checkpoints)


def _layers(
    name: str,
    rows: Sequence[ByteArray],
    old: Sequence[RowFormat],
    new: Sequence[RowFormat],
) -> Iterator[tuple[str, ByteArray, RowFormat, RowFormat]]:
    for layer, one in enumerate(zip(rows, old, new, strict=True)):
        yield (f"{name} of layer {layer}", *one)


def _rows(
    what: str, rows: ByteArray, src: RowFormat, dst: RowFormat, convert: Convert
) -> ByteArray:
    if src == dst or rows.shape[1] == 0:
        return rows
    n_values, rest = divmod(rows.shape[1], src.kind.block_bytes)
    if rest or (src.hadamard and n_values * src.kind.block_size % src.hadamard):
        said = f"rows of {rows.shape[1]} bytes cannot be {src}"
        raise SnapshotFileError(f"the snapshot contradicts itself: {said}")
    if not all_finite(src.kind.numbers(rows), src.kind):  # blocks would hide a NaN
        raise SnapshotFileError(f"{what} is not finite: compute the text again")
    converted = convert(rows, src, dst)
    if not all_finite(dst.kind.numbers(converted), dst.kind):
        raise SnapshotError(f"{what} overflows {dst.kind.label}: store it as bf16 or f32")
    return converted
