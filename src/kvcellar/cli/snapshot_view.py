"""A snapshot and a store's entry as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.cli.amounts import human_age
from kvcellar.cli.console import harmless, human_bytes
from kvcellar.cli.snapshot_facts import SequenceFacts, SnapshotFacts

if TYPE_CHECKING:
    from rich.table import Table

    from kvcellar.cli.blocks import Block


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
    rows += [(f"sequence {i}", _sequence(one)) for i, one in enumerate(facts.sequences)]
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


def _sequence(one: SequenceFacts) -> str:
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
