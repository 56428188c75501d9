"""One entry of a store: what the store says of it, and what its value is."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from kvcellar.cli.blocks import Block
from kvcellar.cli.console import console_for, show
from kvcellar.cli.entry_list import SHORT, entry_data
from kvcellar.cli.opened import existing, find, value_of
from kvcellar.cli.snapshot_facts import facts_of_value
from kvcellar.cli.snapshot_view import entry_table, facts_table
from kvcellar.snapshot.absence import Absence, absent_of


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
        print(f"no block: {Absence(cause, start if isinstance(start, int) else 0)}")
