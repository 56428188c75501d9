"""Snapshots whose K and V are stored in other types than they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from kvcellar.cache.content import CellContent, RowBytes
from kvcellar.errors import SnapshotFileError
from kvcellar.snapshot.fingerprint import row_types, stored_as
from kvcellar.snapshot.saved import Snapshot
from kvcellar.types import ByteArray, CacheSpec, RowFormat

Convert: TypeAlias = Callable[[ByteArray, RowFormat, RowFormat], ByteArray]
"""Rows stored in a format, and the format that they are wanted in."""


def converted(snapshot: Snapshot, specs: Sequence[CacheSpec], convert: Convert) -> Snapshot:
    """The snapshot as caches of these shapes would store it; itself if they store it alike.

    Raises:
        SnapshotFileError: its rows are not what it says they are.
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
        fingerprint=stored_as(snapshot.fingerprint, list(specs)),
        content=replace(snapshot.content, groups=groups),
    )


Formats = tuple[tuple[RowFormat, ...], tuple[RowFormat, ...]]


def _formats(print_: Mapping[str, Any]) -> list[Formats]:
    """How K and V of each layer of each group are stored."""
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
    """Whether there is a transform of that size: a power of two, or 0 for none."""
    return isinstance(size, int) and 0 <= size == size & -size


def _converted(group: CellContent, old: Formats, new: Formats, convert: Convert) -> CellContent:
    def change(rows: RowBytes) -> RowBytes:
        k = _layers(rows.k, old[0], new[0], convert)
        return RowBytes(k, _layers(rows.v, old[1], new[1], convert))

    checkpoints = tuple(replace(one, rows=change(one.rows)) for one in group.checkpoints)
    return replace(group, rows=change(group.rows), checkpoints=checkpoints)


def _layers(
    layers: Sequence[ByteArray],
    old: Sequence[RowFormat],
    new: Sequence[RowFormat],
    convert: Convert,
) -> tuple[ByteArray, ...]:
    return tuple(_rows(*one, convert) for one in zip(layers, old, new, strict=True))


def _rows(rows: ByteArray, src: RowFormat, dst: RowFormat, convert: Convert) -> ByteArray:
    if src == dst or rows.shape[1] == 0:
        return rows
    n_values, rest = divmod(rows.shape[1], src.kind.block_bytes)
    if rest or (src.hadamard and n_values * src.kind.block_size % src.hadamard):
        what = f"rows of {rows.shape[1]} bytes cannot be {src}"
        raise SnapshotFileError(f"the snapshot contradicts itself: {what}")
    return convert(rows, src, dst)
