"""``kvcellar cache list``: for people a line for each stretch of text, for machines every entry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvcellar.cli.blocks import Block, Forest, Stretch
from kvcellar.cli.console import columns_table, visible_line
from kvcellar.cli.units import human_age, human_bytes
from kvcellar.prompts.misses import absent_of
from kvcellar.stores.base import WRITING_S

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

Order: TypeAlias = Literal["used", "created", "bytes"]

SHORT = 8
"""Characters of a key that are shown; they suffice to name it."""


def list_data(where: str, forest: Forest, order: Order) -> dict[str, Any]:
    """Return every entry, for ``--json``."""
    blocks = [Stretch((b,), 1, forest.is_reachable(b)) for b in forest.blocks.values()]
    return {
        "store": where,
        "n_entries": len(blocks),
        "n_bytes": sum(one.n_bytes for one in blocks),
        "entries": [
            {**entry_data(one.blocks[0]), "reachable": one.reachable}
            for one in in_order(blocks, order)
        ],
    }


def in_order(stretches: Sequence[Stretch], order: Order) -> list[Stretch]:
    """Return stretches with the latest or the largest first."""
    value = {
        "used": lambda one: one.used,
        "created": lambda one: one.created,
        "bytes": lambda one: one.n_bytes,
    }[order]
    return sorted(stretches, key=value, reverse=True)


def list_table(forest: Forest, order: Order, now: float) -> Table:
    """Return a table with a row for each stretch."""
    numbers = ("tokens", "bytes", "stored", "used", "texts")
    table = columns_table(("key", "model"), numbers, no_wrap=True, pad_edge=False)
    table.add_column("begins with")
    shown = [one for one in forest.stretches() if absent_of(one.blocks[0].entry.note) is None]
    for one in in_order(shown, order):
        style = None if one.reachable else "dim"
        table.add_row(*_cells(one, now), Cut(_beginning(one.blocks[0])), style=style)
    return table


def totals(forest: Forest) -> list[str]:
    """Return lines about the store as a whole: its size, and what cannot be used."""
    blocks = forest.blocks.values()
    lost = [block for block in blocks if not forest.is_reachable(block)]
    n_bytes = human_bytes(sum(block.entry.n_bytes for block in blocks))
    lines = [f"{len(blocks)} entries, {n_bytes}"]
    if n := sum(absent_of(block.entry.note) is not None for block in blocks):
        lines.append(f"{n} of them only say why a block could not be stored")
    if lost:
        lines.append(
            f"{len(lost)} of them, {human_bytes(sum(one.entry.n_bytes for one in lost))}, cannot "
            "be reached (texts: -), because a block before them is missing; kvcellar cache gc "
            f"removes them {human_age(WRITING_S)} after their last use"
        )
    return lines


def _cells(one: Stretch, now: float) -> list[str]:
    first, last = one.blocks[0], one.blocks[-1]
    return [
        last.key[:SHORT],
        first.model[:8] or "-",
        f"{first.start}-{last.end}" if last.tokens else "-",
        human_bytes(one.n_bytes),
        human_age(now - one.created),
        human_age(now - one.used),
        str(one.n_texts) if one.reachable else "-",
    ]


def _beginning(block: Block) -> str:
    return block.begins or f"tokens {','.join(map(str, block.tokens[:8]))}"


class Cut:
    """A cell of one line that is cut where the table has no more room, whatever blanks it has.

    A column that is not to be wrapped would take its room from the others.
    """

    def __init__(self, text: str) -> None:
        self._text = visible_line(text)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        longest = Measurement.get(console, options, self._text).maximum
        return Measurement(min(longest, SHORT), longest)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        cut = Text(self._text)
        cut.truncate(options.max_width, overflow="ellipsis")
        yield cut


def entry_data(block: Block) -> dict[str, Any]:
    """Return what is known of an entry, for ``--json``."""
    return {
        "key": block.key,
        "model": block.model,
        "parent": block.parent,
        "start": block.start,
        "end": block.end,
        "tokens": list(block.tokens),
        "begins": block.begins,
        "n_bytes": block.entry.n_bytes,
        "created": block.entry.created,
        "used": block.entry.used,
    }
