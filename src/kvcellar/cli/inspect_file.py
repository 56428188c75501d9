"""A file of saved sequences, ours or llama.cpp's: read as a whole, and told."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvcellar.cli.console import console_for, human_bytes, show
from kvcellar.cli.llama_facts import LlamaFacts, llama_facts
from kvcellar.cli.snapshot_facts import facts_of_file
from kvcellar.cli.snapshot_view import facts_table, two_columns
from kvcellar.runtime.llama_files import is_llama_file

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table


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
