"""What can be said about a snapshot without a model: whose it is, what it holds, its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcellar.cache.content import CacheContent, CellContent
from kvcellar.errors import SnapshotFileError
from kvcellar.snapshot.container import read_description
from kvcellar.snapshot.fingerprint import row_types
from kvcellar.snapshot.native import VERSION
from kvcellar.snapshot.reading import read_snapshot, snapshot_from
from kvcellar.snapshot.saved import Snapshot
from kvcellar.snapshot.stores.base import Buffer


@dataclass(frozen=True, slots=True)
class SequenceFacts:
    """A sequence: its tokens, those that left a window included, and where they stand."""

    n_tokens: int
    first_position: int
    last_position: int
    first_tokens: tuple[int, ...]
    has_logits: bool


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Layers whose K and V lie in the same cells; bytes are those of the checkpoints too."""

    n_layers: int
    type_k: str
    type_v: str
    n_cells: int
    n_checkpoints: int
    bytes_k: int
    bytes_v: int


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """A snapshot that has been read, so whose checksums hold.

    ``written_by`` is None where only the file would say; ``start`` is above 0 for a piece of text.
    """

    version: int
    written_by: str | None
    architecture: str
    weights: str
    start: int
    sequences: tuple[SequenceFacts, ...]
    groups: tuple[GroupFacts, ...]
    n_states: int
    bytes_states: int
    bytes_logits: int
    note: Mapping[str, str | int]


def facts_of_file(path: Path) -> SnapshotFacts:
    """Read a file as a whole.

    Raises:
        SnapshotFileError: it cannot be read, is no snapshot, or is damaged.
        LibraryError: it is compressed by a library that is not installed.
    """
    snapshot = read_snapshot(path)
    return _facts(snapshot, str(read_description(path).get("kvcellar", "unknown")))


def facts_of_value(value: Buffer) -> SnapshotFacts:
    """Read a value of a store.

    Raises:
        SnapshotFileError: it is no snapshot, or damaged.
        LibraryError: it is compressed by a library that is not installed.
    """
    return _facts(snapshot_from(value), None)


def _facts(snapshot: Snapshot, written_by: str | None) -> SnapshotFacts:
    """A snapshot whose checksums hold may contradict itself, if somebody made it so."""
    try:
        return _told(snapshot, written_by)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise SnapshotFileError(f"the snapshot contradicts itself: {error!r:.200}") from error


def _told(snapshot: Snapshot, written_by: str | None) -> SnapshotFacts:
    content, about = snapshot.content, snapshot.fingerprint
    kinds = row_types(about)
    groups = tuple(
        _group(group, k.label, v.label) for group, (k, v) in zip(content.groups, kinds, strict=True)
    )
    states = content.states
    logits = [text.logits for text in snapshot.texts]
    return SnapshotFacts(
        version=VERSION,
        written_by=written_by,
        architecture=str(about.get("architecture", "unknown")),
        weights=str(about.get("weights", "unknown")),
        start=content.start,
        sequences=tuple(
            _sequence(content, seq, logits[seq] is not None) for seq in range(content.n_seqs)
        ),
        groups=groups,
        n_states=0 if states is None else len(states.states),
        bytes_states=0 if states is None else states.states.nbytes,
        bytes_logits=sum(one.nbytes for one in logits if one is not None),
        note=snapshot.note,
    )


def _group(group: CellContent, type_k: str, type_v: str) -> GroupFacts:
    rows = [group.rows, *(one.rows for one in group.checkpoints)]
    return GroupFacts(
        n_layers=len(group.rows.k),
        type_k=type_k,
        type_v=type_v,
        n_cells=len(group.positions),
        n_checkpoints=len(group.checkpoints),
        bytes_k=sum(layer.nbytes for one in rows for layer in one.k),
        bytes_v=sum(layer.nbytes for one in rows for layer in one.v),
    )


def _sequence(content: CacheContent, seq: int, has_logits: bool) -> SequenceFacts:
    """As the part tells that has most of the text."""
    tokens = content.text_of(seq)[1]
    first, last = content.span(seq)
    return SequenceFacts(len(tokens), first, last, tuple(map(int, tokens[:8])), has_logits)
