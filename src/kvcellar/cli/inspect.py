"""What can be said about a snapshot without a model: whose it is, what it holds, its bytes.

A snapshot and a store's entry as tables for people.

One entry of a store: what the store says of it, and what its value is.

What can be said about a state file of llama.cpp, which only its model can tell how to read.

A file of saved sequences, ours or llama.cpp's: read as a whole, and told.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcellar.cache.content import CellData, SequenceData
from kvcellar.cli.blocks import SHORT, Block, entry_data
from kvcellar.cli.console import console_for, harmless, human_age, human_bytes, show
from kvcellar.cli.store_tools import existing, find, value_of
from kvcellar.errors import SnapshotFileError
from kvcellar.prompts.misses import Miss, absent_of
from kvcellar.runtime.demo import find_model
from kvcellar.runtime.llama_files import is_llama_file
from kvcellar.runtime.model import Model
from kvcellar.snapshot.container import read_description, read_snapshot, snapshot_from
from kvcellar.snapshot.llama.layout import LayerRows
from kvcellar.snapshot.llama.reader import read_llama_file
from kvcellar.snapshot.native import VERSION
from kvcellar.snapshot.snapshot import Snapshot, row_types
from kvcellar.stores.base import Buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from kvcellar.snapshot.llama.layout import LlamaFile


def facts_table(title: str, facts: SnapshotFacts) -> Table:
    """Everything about a snapshot, a line each."""
    writer = "" if facts.written_by is None else f", written by kvcellar {facts.written_by}"
    rows = [
        ("format", f"version {facts.version}{writer}"),
        ("checksums", "hold"),
        ("architecture", facts.architecture),
        ("weights", facts.weights[:16]),
    ]
    if facts.start:
        rows.append(("piece", f"of a text, from position {facts.start} on"))
    rows += [(f"sequence {i}", _sequence_line(one)) for i, one in enumerate(facts.sequences)]
    for i, group in enumerate(facts.groups):
        older = f", {group.n_checkpoints} checkpoints" if group.n_checkpoints else ""
        what = f"{group.n_cells} cells in {group.n_layers} layers{older}"
        k, v = human_bytes(group.bytes_k), human_bytes(group.bytes_v)
        rows.append((f"K/V group {i}", f"{what}; K {group.type_k} {k}, V {group.type_v} {v}"))
    if facts.n_states:
        rows.append(("states", f"{facts.n_states}, {human_bytes(facts.bytes_states)}"))
    if facts.bytes_logits:
        rows.append(("logits", human_bytes(facts.bytes_logits)))
    rows += [(f"note: {name}", str(content)) for name, content in facts.note.items()]
    return two_columns(title, rows)


def entry_table(title: str, block: Block, now: float) -> Table:
    """What a store says of an entry, a line each."""
    entry = block.entry
    rows = [
        ("key", block.key),
        ("value", human_bytes(entry.n_bytes)),
        ("stored", f"{human_age(now - entry.created)} ago"),
    ]
    if block.tokens:
        rows.append(("tokens", f"{block.start} to {block.end - 1} of their text"))
        rows.append(("follows", block.parent if block.start else "nothing: it begins the text"))
    return two_columns(title, rows)


def _sequence_line(one: SequenceFacts) -> str:
    if not one.n_tokens:
        return "empty"
    ids = " ".join(map(str, one.first_tokens)) + (
        " ..." if one.n_tokens > len(one.first_tokens) else ""
    )
    logits = ", with logits" if one.has_logits else ""
    return (
        f"{one.n_tokens} tokens at positions {one.first_position} to {one.last_position}{logits}; "
        f"ids {ids}"
    )


def two_columns(title: str, rows: list[tuple[str, str]]) -> Table:
    """Names and values below each other."""
    from rich.table import Table

    table = Table(box=None, show_header=False, title=harmless(title), title_justify="left")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(harmless(name), harmless(value))
    return table


def inspect_entry(where: str, prefix: str, *, as_json: bool) -> None:
    """Print it; reading does not count as a use.

    Raises:
        OptionError: no key begins like that, or several do.
        SnapshotFileError: the value is damaged, or no snapshot.
        StoreError: there is no such store, or it cannot be read.
    """
    with existing(where, read_only=True) as store:
        block = Block.of(find(store, prefix))
        value = value_of(store, block.key)
        cause = absent_of(block.entry.note)
        facts = None if cause is not None else facts_of_value(value)
    if as_json:
        data = {"absent": cause, "snapshot": None if facts is None else asdict(facts)}
        json.dump({**entry_data(block), **data}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    parts = [entry_table(f"entry {block.key[:SHORT]}", block, time.time())]
    if facts is not None:
        parts.append(facts_table("its value", facts))
    show(console_for(sys.stdout), *parts)
    if cause is not None:
        start = block.entry.note.get("start")
        print(f"no block: {Miss(cause, start if isinstance(start, int) else 0)}")


@dataclass(frozen=True, slots=True)
class PartFacts:
    """Cells of one cache of K and V."""

    n_cells: int
    n_layers: int
    type_k: str
    type_v: str
    bytes_k: int
    bytes_v: int


@dataclass(frozen=True, slots=True)
class LlamaFacts:
    """A file that could be read to its end; it has no checksums.

    Attributes:
        kind: a sequence or a session.
        generation: when llama.cpp wrote such files.
        version: the number in its head.
        architecture: None where the file does not say.
        n_tokens: of the text that it names.
        first_tokens: how that begins.
        parts: its K and V.
        bytes_states: its recurrent states.
    """

    kind: str
    generation: str
    version: int
    architecture: str | None
    n_tokens: int
    first_tokens: tuple[int, ...]
    parts: tuple[PartFacts, ...]
    bytes_states: int


def llama_facts(path: Path, model: str | None) -> LlamaFacts:
    """Read a file as a whole.

    Raises:
        SnapshotFileError: it is damaged, or there is no model to read it with.
        SnapshotMismatch, NotSupported: it is not of that model, or cannot be read.
        ModelError: the model cannot be used.
    """
    if model is None:
        raise SnapshotFileError(
            f"{path} is a state file of llama.cpp: name its model with --model, because the file "
            "does not say how it goes on"
        )
    with Model.from_gguf(find_model(model), n_threads=1) as opened, opened.context(n_ctx=1) as one:
        try:
            return _llama_facts(read_llama_file(path.read_bytes(), one.memory_spec))
        except (SnapshotFileError, OSError) as error:
            raise SnapshotFileError(f"{path}: {error}") from error


def _llama_facts(file: LlamaFile) -> LlamaFacts:
    streams = [stream for part in file.parts for stream in part]
    states = file.states
    return LlamaFacts(
        kind=file.kind,
        generation=file.generation,
        version=file.version,
        architecture=file.arch,
        n_tokens=len(file.tokens),
        first_tokens=tuple(map(int, file.tokens[:8])),
        parts=tuple(
            PartFacts(
                n_cells=len(one.cells),
                n_layers=len(one.k),
                type_k=_type(one.k),
                type_v=_type(one.v),
                bytes_k=_bytes(one.k),
                bytes_v=_bytes(one.v),
            )
            for one in streams
        ),
        bytes_states=0 if states is None else _bytes(states.conv) + _bytes(states.ssm),
    )


def _type(blocks: Sequence[LayerRows]) -> str:
    return ", ".join(sorted({block.kind.label for block in blocks})) or "-"


def _bytes(blocks: Sequence[LayerRows]) -> int:
    return sum(block.rows.nbytes for block in blocks)


def inspect_file(path: Path, model: str | None, *, as_json: bool) -> None:
    """Print what a file holds.

    Raises:
        SnapshotError: it cannot be read, is none, or damaged.
        NotSupported, ModelError: it is of llama.cpp, and cannot be read with that model.
    """
    facts = llama_facts(path, model) if is_llama_file(path) else facts_of_file(path)
    if as_json:
        about = {"file": str(path), "n_bytes": path.stat().st_size, **asdict(facts)}
        json.dump(about, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    if isinstance(facts, LlamaFacts):
        show(console_for(sys.stdout), _llama_table(path.name, facts))
    else:
        show(console_for(sys.stdout), facts_table(path.name, facts))


def _llama_table(title: str, facts: LlamaFacts) -> Table:
    ids = " ".join(map(str, facts.first_tokens))
    more = " ..." if facts.n_tokens > len(facts.first_tokens) else ""
    rows = [
        ("format", f"{facts.kind} of llama.cpp, version {facts.version}, as of {facts.generation}"),
        ("checksums", "it has none; its lengths fit"),
        ("architecture", facts.architecture or "the file does not say"),
        ("text", f"{facts.n_tokens} tokens; ids {ids}{more}"),
    ]
    for i, one in enumerate(facts.parts):
        k, v = human_bytes(one.bytes_k), human_bytes(one.bytes_v)
        what = f"{one.n_cells} cells in {one.n_layers} layers"
        rows.append((f"K/V part {i}", f"{what}; K {one.type_k} {k}, V {one.type_v} {v}"))
    if facts.bytes_states:
        rows.append(("states", human_bytes(facts.bytes_states)))
    return two_columns(title, rows)


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


def _group(group: CellData, type_k: str, type_v: str) -> GroupFacts:
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


def _sequence(content: SequenceData, seq: int, has_logits: bool) -> SequenceFacts:
    """As the part tells that has most of the text."""
    tokens = content.text_of(seq)[1]
    first, last = content.span(seq)
    return SequenceFacts(len(tokens), first, last, tuple(map(int, tokens[:8])), has_logits)
