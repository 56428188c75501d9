"""What has to be equal for K, V and states of one context to mean the same in another.

A nested mapping of plain values, so that it can be written down, compared field by field, and
hashed the same way everywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TypeAlias, cast

from kvcellar.errors import SnapshotFileError, SnapshotMismatch
from kvcellar.types import CacheSpec, KVType, MemorySpec

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

ROW_TYPES = ("type_k", "type_v", "hadamard_k", "hadamard_v")
"""Fields of a group that say how rows are stored, and nothing about what they mean."""

_HINTS: Mapping[str, str] = {
    "weights": "it was computed by another model, or by another quantisation of it",
    "architecture": "it was computed by another model",
    "type_k": "load it with convert=True, or make the context with that type_k",
    "type_v": "load it with convert=True, or make the context with that type_v",
}


def fingerprint(architecture: str, weights: str, spec: MemorySpec) -> dict[str, Plain]:
    """The fingerprint of a context.

    Args:
        architecture: as the model file names it.
        weights: a hash of all that the model computes with.
        spec: what it keeps; sizes and numbers of sequences do not count.
    """
    states: list[Plain] = [] if spec.states is None else [asdict(s) for s in spec.states.layers]
    groups: list[Plain] = [_group(group) for group in spec.groups]
    return {
        "architecture": architecture,
        "weights": weights,
        "groups": groups,
        "states": states,
    }


def check_same(
    stored: Mapping[str, Plain], wanted: Mapping[str, Plain], *, row_types: bool = True
) -> None:
    """See that two fingerprints are equal.

    Args:
        stored: that of a snapshot.
        wanted: that of a context.
        row_types: whether K and V have to be stored alike.

    Raises:
        SnapshotMismatch: they are not; names a field that differs, the most telling one.
    """
    found = [(_name(one[0]), *one) for one in _differences(dict(stored), dict(wanted), "")]
    # The weights' hash has all settings of a model in it, so one of these says more.
    found.sort(key=lambda one: 2 if one[0] in ROW_TYPES else int(one[0] == "weights"))
    is_other = any(name == "weights" for name, *_ in found)
    for name, path, a, b in found:
        if row_types or name not in ROW_TYPES:
            hint = _HINTS.get(name, _HINTS["weights"] if is_other else "")
            raise SnapshotMismatch(path, _short(a), _short(b), hint)


def digest(print_: Mapping[str, Plain]) -> str:
    """A hash of a fingerprint, 64 hexadecimal digits, equal on every machine."""
    text = json.dumps(print_, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def row_types(print_: Mapping[str, Plain]) -> list[tuple[KVType, KVType]]:
    """The types of K and of V in each group.

    Raises:
        SnapshotFileError: the fingerprint does not say.
    """
    try:
        groups = cast("list[dict[str, str]]", print_["groups"])
        return [(KVType.parse(one["type_k"]), KVType.parse(one["type_v"])) for one in groups]
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotFileError(f"the snapshot's fingerprint is damaged: {error}") from None


def stored_as(print_: Mapping[str, Plain], specs: list[CacheSpec]) -> dict[str, Plain]:
    """The fingerprint with rows stored as caches of these shapes would."""
    return {**print_, "groups": [_group(spec) for spec in specs]}


def _group(spec: CacheSpec) -> dict[str, Plain]:
    layers: list[Plain] = [json.loads(json.dumps(asdict(layer))) for layer in spec.layers]
    numbers = range(len(spec.layers))
    return {
        "type_k": spec.type_k.label,
        "type_v": spec.type_v.label,
        "hadamard_k": [spec.hadamard_k(i) for i in numbers],
        "hadamard_v": [spec.hadamard_v(i) for i in numbers],
        "layers": layers,
    }


def _name(path: str) -> str:
    """The last field of a path."""
    return path.rpartition(".")[2].partition("[")[0]


def _differences(a: Plain, b: Plain, path: str) -> Iterator[tuple[str, Plain, Plain]]:
    """Where two values differ: paths like ``groups[0].layers[3].rope.freq_base``."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*b, *(key for key in a if key not in b)]:
            at = f"{path}.{key}" if path else key
            yield from _differences(a.get(key), b.get(key), at)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _differences(one, other, f"{path}[{i}]")
    elif a != b or type(a) is not type(b):
        yield path, a, b


def _short(value: Plain) -> Plain:
    text = str(value)
    if isinstance(value, list):
        return f"{len(value)} entries"
    return value if len(text) <= 24 else f"{text[:20]}…"
