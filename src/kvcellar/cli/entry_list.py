"""What a store holds, for people and for machines.

People see stretches of text, because a text is many blocks: what takes the room and what nobody
has used. Machines get every entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvcellar.cli.amounts import human_age
from kvcellar.cli.blocks import Block, Forest, Stretch
from kvcellar.cli.console import harmless, human_bytes
from kvcellar.snapshot.absence import absent_of
from kvcellar.snapshot.stores.base import WRITING_S

if TYPE_CHECKING:
    from rich.table import Table

Order: TypeAlias = Literal["used", "created", "bytes"]

SHORT = 8
"""Digits of a key that are shown; they suffice to name it."""


def list_data(where: str, forest: Forest, order: Order) -> dict[str, Any]:
    """For machines: every entry."""
    blocks = in_order([Stretch((b,), 1, forest.is_reachable(b)) for b in _all(forest)], order)
    return {
        "store": where,
        "n_entries": len(blocks),
        "n_bytes": sum(one.n_bytes for one in blocks),
        "entries": [{**entry_data(one.blocks[0]), "reachable": one.reachable} for one in blocks],
    }


def in_order(stretches: Sequence[Stretch], order: Order) -> list[Stretch]:
    """The latest or the largest first."""
    value = {
        "used": lambda one: one.used,
        "created": lambda one: one.created,
        "bytes": lambda one: one.n_bytes,
    }[order]
    return sorted(stretches, key=value, reverse=True)


def list_table(forest: Forest, order: Order, now: float) -> Table:
    """For people: a line a stretch."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("key", "model"):
        table.add_column(head, no_wrap=True)
    for head in ("tokens", "bytes", "stored", "used", "texts"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("begins with", overflow="ellipsis")  # no blanks, so it is cut and not wrapped
    shown = [one for one in forest.stretches() if absent_of(one.blocks[0].entry.note) is None]
    for one in in_order(shown, order):
        table.add_row(*_cells(one, now), style=None if one.reachable else "dim")
    return table


def totals(forest: Forest) -> list[str]:
    """What all takes together, and what of it is of no use."""
    blocks = _all(forest)
    lost = [block for block in blocks if not forest.is_reachable(block)]
    n_bytes = human_bytes(sum(block.entry.n_bytes for block in blocks))
    lines = [f"{len(blocks)} entries, {n_bytes}"]
    if n := sum(absent_of(block.entry.note) is not None for block in blocks):
        lines.append(f"{n} of them only say why a block could not be stored")
    if lost:
        lines.append(
            f"{len(lost)} of them, {human_bytes(sum(one.entry.n_bytes for one in lost))}, cannot "
            "be reached (texts: -): a block before them is gone; kvcellar cache gc removes them "
            f"{human_age(WRITING_S)} after their last use"
        )
    return lines


def _all(forest: Forest) -> list[Block]:
    return list(forest.blocks.values())


def _cells(one: Stretch, now: float) -> list[str]:
    first, last = one.blocks[0], one.blocks[-1]
    return [
        last.key[:SHORT],
        harmless(first.model[:8]) or "-",
        f"{first.start}-{last.end}" if last.tokens else "-",
        human_bytes(one.n_bytes),
        human_age(now - one.created),
        human_age(now - one.used),
        str(one.n_texts) if one.reachable else "-",
        ",".join(map(str, first.tokens[:8])),
    ]


def entry_data(block: Block) -> dict[str, Any]:
    """For machines: one entry."""
    return {
        "key": block.key,
        "model": block.model,
        "parent": block.parent,
        "start": block.start,
        "end": block.end,
        "tokens": list(block.tokens),
        "n_bytes": block.entry.n_bytes,
        "created": block.entry.created,
        "used": block.entry.used,
    }
