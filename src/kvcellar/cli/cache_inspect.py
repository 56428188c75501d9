"""``kvcellar cache inspect``: what an entry of a store or a file of saved sequences holds.

Everything is read as a whole first, so what is printed has been checked. Reading an entry does not
count as a use. A snapshot says by itself what it is; a state file of llama.cpp can be read only
with its model at hand.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcellar.cache.content import CellData, SequenceData
from kvcellar.cli.blocks import Block
from kvcellar.cli.cache_list import SHORT, entry_data
from kvcellar.cli.console import console_for, facts_table, print_json, say, show
from kvcellar.cli.store_tools import existing, find, value_of
from kvcellar.cli.units import human_age, human_bytes
from kvcellar.errors import SnapshotFileError
from kvcellar.prompts.misses import Miss, absent_of
from kvcellar.runtime.demo import find_model
from kvcellar.runtime.llama_files import is_llama_file, read_file
from kvcellar.runtime.model import Model
from kvcellar.snapshot.container import read_description, read_snapshot, snapshot_from
from kvcellar.snapshot.llama.layout import LayerRows
from kvcellar.snapshot.native import VERSION
from kvcellar.snapshot.snapshot import Snapshot, row_types

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from kvcellar.snapshot.llama.layout import LlamaFile


def inspect_entry(where: str, prefix: str, *, as_json: bool) -> None:
    """Print what an entry of a store holds.

    Raises:
        OptionError: no key begins like that, or several do.
        SnapshotFileError: the value is damaged, or no snapshot.
        StoreError: there is no such store, or it cannot be read.
    """
    with existing(where, read_only=True) as store:
        block = Block.of(find(store, prefix))
        value = value_of(store, block.key)
        cause = absent_of(block.entry.note)
        facts = None if cause is not None else _snapshot_facts(snapshot_from(value), None)
    if as_json:
        snapshot = None if facts is None else asdict(facts)
        print_json({**entry_data(block), "absent": cause, "snapshot": snapshot})
        return
    parts = [_entry_table(block)]
    if facts is not None:
        parts.append(_snapshot_table("its value", facts))
    show(console_for(sys.stdout), *parts)
    if cause is not None:
        start = block.entry.note.get("start")
        say(f"no block: {Miss(cause, start if isinstance(start, int) else 0)}")


def inspect_file(path: Path, model: str | None, *, as_json: bool) -> None:
    """Print what a file holds.

    Raises:
        SnapshotError: it cannot be read, is no snapshot, or is damaged.
        NotSupported, ModelError: it is of llama.cpp, and cannot be read with that model.
        LibraryError: it is compressed by a library that is not installed.
    """
    facts: LlamaFacts | SnapshotFacts
    if is_llama_file(path):
        facts = _read_llama_file(path, model)
        table = _llama_table(path.name, facts)
    else:
        snapshot = read_snapshot(path)
        writer = str(read_description(path).get("kvcellar", "unknown"))
        facts = _snapshot_facts(snapshot, writer)
        table = _snapshot_table(path.name, facts)
    if as_json:
        print_json({"file": str(path), "n_bytes": path.stat().st_size, **asdict(facts)})
    else:
        show(console_for(sys.stdout), table)


def _entry_table(block: Block) -> Table:
    entry = block.entry
    rows = [
        ("key", block.key),
        ("value", human_bytes(entry.n_bytes)),
        ("stored", f"{human_age(time.time() - entry.created)} ago"),
    ]
    if block.tokens:
        rows.append(("tokens", f"{block.start} to {block.end - 1} of the text"))
        rows.append(("follows", block.parent if block.start else "nothing: it begins the text"))
    if block.begins:
        rows.append(("begins with", block.begins))
    return facts_table(f"entry {block.key[:SHORT]}", rows)


# --- snapshots ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowFacts:
    """K and V rows of layers that share their cells."""

    n_cells: int
    n_layers: int
    type_k: str
    type_v: str
    bytes_k: int
    bytes_v: int

    def line(self, more: str = "") -> str:
        """Say it in one line."""
        k = f"K {self.type_k} {human_bytes(self.bytes_k)}"
        v = f"V {self.type_v} {human_bytes(self.bytes_v)}"
        return f"{self.n_cells} cells in {self.n_layers} layers{more}; {k}, {v}"


@dataclass(frozen=True, slots=True)
class GroupFacts(RowFacts):
    """A layer group of a snapshot; its bytes include those of checkpoints."""

    n_checkpoints: int


@dataclass(frozen=True, slots=True)
class SequenceFacts:
    """A sequence: its tokens, evicted ones included, and their positions."""

    n_tokens: int
    first_position: int
    last_position: int
    first_tokens: tuple[int, ...]
    has_logits: bool


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """A snapshot that was read and whose checksums match.

    ``written_by`` is None for a value of a store; ``start`` is above 0 for a piece of a text.
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


def _snapshot_facts(snapshot: Snapshot, written_by: str | None) -> SnapshotFacts:
    """Describe a snapshot; one whose checksums match may still contradict itself."""
    content, about = snapshot.content, snapshot.fingerprint
    states, logits = content.states, [text.logits for text in snapshot.texts]
    try:
        return SnapshotFacts(
            version=VERSION,
            written_by=written_by,
            architecture=str(about.get("architecture", "unknown")),
            weights=str(about.get("weights", "unknown")),
            start=content.start,
            sequences=tuple(
                _sequence_facts(content, seq, logits[seq] is not None)
                for seq in range(content.n_seqs)
            ),
            groups=tuple(
                _group_facts(group, k.label, v.label)
                for group, (k, v) in zip(content.groups, row_types(about), strict=True)
            ),
            n_states=0 if states is None else len(states.states),
            bytes_states=0 if states is None else states.states.nbytes,
            bytes_logits=sum(one.nbytes for one in logits if one is not None),
            note=snapshot.note,
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise SnapshotFileError(f"the snapshot contradicts itself: {error!r:.200}") from error


def _group_facts(group: CellData, type_k: str, type_v: str) -> GroupFacts:
    rows = [group.rows, *(one.rows for one in group.checkpoints)]
    return GroupFacts(
        n_cells=len(group.positions),
        n_layers=len(group.rows.k),
        type_k=type_k,
        type_v=type_v,
        bytes_k=sum(layer.nbytes for one in rows for layer in one.k),
        bytes_v=sum(layer.nbytes for one in rows for layer in one.v),
        n_checkpoints=len(group.checkpoints),
    )


def _sequence_facts(content: SequenceData, seq: int, has_logits: bool) -> SequenceFacts:
    tokens = content.text_of(seq)[1]
    first, last = content.span(seq)
    return SequenceFacts(len(tokens), first, last, tuple(map(int, tokens[:8])), has_logits)


def _snapshot_table(title: str, facts: SnapshotFacts) -> Table:
    writer = "" if facts.written_by is None else f", written by kvcellar {facts.written_by}"
    rows = [
        ("format", f"version {facts.version}{writer}"),
        ("checksums", "match"),
        ("architecture", facts.architecture),
        ("weights", facts.weights[:16]),
    ]
    if facts.start:
        rows.append(("piece", f"of a text, from position {facts.start} on"))
    rows += [(f"sequence {i}", _sequence_line(one)) for i, one in enumerate(facts.sequences)]
    for i, group in enumerate(facts.groups):
        older = f", {group.n_checkpoints} checkpoints" if group.n_checkpoints else ""
        rows.append((f"K/V group {i}", group.line(older)))
    if facts.n_states:
        rows.append(("states", f"{facts.n_states}, {human_bytes(facts.bytes_states)}"))
    if facts.bytes_logits:
        rows.append(("logits", human_bytes(facts.bytes_logits)))
    rows += [(f"note: {name}", str(content)) for name, content in facts.note.items()]
    return facts_table(title, rows)


def _sequence_line(one: SequenceFacts) -> str:
    if not one.n_tokens:
        return "empty"
    logits = ", with logits" if one.has_logits else ""
    return (
        f"{one.n_tokens} tokens at positions {one.first_position} to {one.last_position}{logits}; "
        + _ids(one.first_tokens, one.n_tokens)
    )


def _ids(first: tuple[int, ...], n_tokens: int) -> str:
    return f"ids {' '.join(map(str, first))}{' ...' if n_tokens > len(first) else ''}"


# --- state files of llama.cpp -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LlamaFacts:
    """A file that was read to its end; it has no checksums.

    Attributes:
        kind: a sequence or a session.
        generation: when llama.cpp wrote such files.
        version: the number in its head.
        architecture: None where the file does not say.
        n_tokens: length of its text.
        first_tokens: how the text begins.
        parts: its K and V.
        bytes_states: its recurrent states.
    """

    kind: str
    generation: str
    version: int
    architecture: str | None
    n_tokens: int
    first_tokens: tuple[int, ...]
    parts: tuple[RowFacts, ...]
    bytes_states: int


def _read_llama_file(path: Path, model_name: str | None) -> LlamaFacts:
    if model_name is None:
        raise SnapshotFileError(
            f"{path} is a state file of llama.cpp: name its model with --model, because the file "
            "does not describe its own layout"
        )
    with (
        Model.from_gguf(find_model(model_name), n_threads=1) as model,
        model.context(n_ctx=1) as context,
    ):
        return _llama_facts(read_file(path, context.memory_spec))


def _llama_facts(file: LlamaFile) -> LlamaFacts:
    states = file.states
    return LlamaFacts(
        kind=file.kind,
        generation=file.generation,
        version=file.version,
        architecture=file.arch,
        n_tokens=len(file.tokens),
        first_tokens=tuple(map(int, file.tokens[:8])),
        parts=tuple(
            RowFacts(
                n_cells=len(stream.cells),
                n_layers=len(stream.k),
                type_k=_type(stream.k),
                type_v=_type(stream.v),
                bytes_k=_bytes(stream.k),
                bytes_v=_bytes(stream.v),
            )
            for part in file.parts
            for stream in part
        ),
        bytes_states=0 if states is None else _bytes(states.conv) + _bytes(states.ssm),
    )


def _type(blocks: Sequence[LayerRows]) -> str:
    return ", ".join(sorted({block.kind.label for block in blocks})) or "-"


def _bytes(blocks: Sequence[LayerRows]) -> int:
    return sum(block.rows.nbytes for block in blocks)


def _llama_table(title: str, facts: LlamaFacts) -> Table:
    rows = [
        ("format", f"{facts.kind} of llama.cpp, version {facts.version}, as of {facts.generation}"),
        ("checksums", "none in this format; lengths are consistent"),
        ("architecture", facts.architecture or "not in the file"),
        ("text", f"{facts.n_tokens} tokens; {_ids(facts.first_tokens, facts.n_tokens)}"),
    ]
    rows += [(f"K/V part {i}", one.line()) for i, one in enumerate(facts.parts)]
    if facts.bytes_states:
        rows.append(("states", human_bytes(facts.bytes_states)))
    return facts_table(title, rows)
