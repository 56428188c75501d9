"""What the notes of a store's entries tell: which block follows which, and what may go first.

Blocks form trees, because texts that begin alike share what they begin with. A block is of use only
while all before it are there, so removal goes from the ends of texts inward.

What a store holds, for people and for machines.

People see stretches of text, because a text is many blocks: what takes the room and what nobody
has used. Machines get every entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvcellar.cli.console import harmless, human_age, human_bytes
from kvcellar.prompts.misses import absent_of
from kvcellar.stores.base import WRITING_S, Entry

if TYPE_CHECKING:
    from rich.table import Table

Reason: TypeAlias = Literal["unreachable", "unused", "over budget"]


@dataclass(frozen=True, slots=True)
class Block:
    """An entry and what its note says; an entry that is no block has no tokens and begins at 0.

    Attributes:
        entry: as the store lists it.
        parent: the key of the block before it, or whatever the first block follows.
        start: the token that it begins with.
        tokens: their ids.
        model: a short name of the model.
    """

    entry: Entry
    parent: str
    start: int
    tokens: tuple[int, ...]
    model: str

    @classmethod
    def of(cls, entry: Entry) -> Block:
        """What a note says, as far as it says what we write."""
        note = entry.note
        start, words = note.get("start"), str(note.get("tokens", "")).split()
        tokens = tuple(int(word) for word in words if word.isdecimal() and len(word) < 12)
        return cls(
            entry,
            str(note.get("parent", "")),
            start if tokens and isinstance(start, int) and start >= 0 else 0,
            tokens,
            str(note.get("model", "")),
        )

    @property
    def key(self) -> str:
        """Its key."""
        return self.entry.key

    @property
    def end(self) -> int:
        """The token behind its last one."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks that follow each other and that the same texts have; at least one.

    Attributes:
        blocks: from the first to the last.
        n_texts: how many ways the text goes on from there, at least 1.
        reachable: whether all blocks before them are there.
    """

    blocks: tuple[Block, ...]
    n_texts: int
    reachable: bool

    @property
    def n_bytes(self) -> int:
        """What their values take."""
        return sum(block.entry.n_bytes for block in self.blocks)

    @property
    def created(self) -> float:
        """When the first of them was stored."""
        return min(block.entry.created for block in self.blocks)

    @property
    def used(self) -> float:
        """When the last use of any was."""
        return max(block.entry.used for block in self.blocks)


class Forest:
    """All blocks of a store."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.blocks: Mapping[str, Block] = {entry.key: Block.of(entry) for entry in entries}
        self._children: dict[str, list[Block]] = {}
        for block in self.blocks.values():
            if block.start:
                self._children.setdefault(block.parent, []).append(block)
        # From the start of texts on: whatever a note claims, nothing comes before its parent.
        self._ordered = sorted(self.blocks.values(), key=lambda block: block.start)
        self._reachable = self._find_reachable()

    def is_reachable(self, block: Block) -> bool:
        """Whether all blocks before it are there."""
        return block.key in self._reachable

    def chain(self, key: str) -> list[Block] | None:
        """The blocks of a text up to that one, None if one is missing."""
        found = [self.blocks[key]]
        while found[-1].start:
            parent = self.blocks.get(found[-1].parent)
            if parent is None or not parent.start < parent.end == found[-1].start:
                return None
            found.append(parent)
        return found[::-1]

    def stretches(self) -> list[Stretch]:
        """All blocks, each in one stretch."""
        n_texts = self._count_texts()
        done: set[str] = set()
        found = []
        for first in self._ordered:
            if first.key in done:
                continue
            blocks = [first]
            while (after := self._only_child(blocks[-1])) is not None:
                blocks.append(after)
            done.update(block.key for block in blocks)
            reachable = self.is_reachable(first)
            found.append(Stretch(tuple(blocks), n_texts[blocks[-1].key], reachable))
        return found

    def _leaving_order(self, used: Mapping[str, float]) -> list[Block]:
        """Which may go first: those whose text was not used for longest, from its end inward."""
        blocks = self.blocks.values()
        return sorted(blocks, key=lambda block: (used[block.key], -block.start, block.key))

    def leaving(
        self, max_bytes: int | None, unused_since: float | None, idle_since: float
    ) -> Iterator[tuple[Block, Reason]]:
        """What has to go: what is of no use, what was not used since, what is too much.

        A text is stored from its end on, so for a while its blocks lack those before them: what was
        used after ``idle_since`` is not of no use yet.
        """
        used, staying = self._last_uses(), list[Block]()
        for block in self._leaving_order(used):
            if not self.is_reachable(block) and used[block.key] <= idle_since:
                yield block, "unreachable"
            elif unused_since is not None and used[block.key] < unused_since:
                yield block, "unused"
            else:
                staying.append(block)
        total = sum(block.entry.n_bytes for block in staying)
        for block in staying:
            if max_bytes is None or total <= max_bytes:
                return
            yield block, "over budget"
            total -= block.entry.n_bytes

    def _follows(self, block: Block) -> Sequence[Block]:
        return [one for one in self._children.get(block.key, ()) if one.start == block.end]

    def _only_child(self, block: Block) -> Block | None:
        children = self._follows(block)
        return children[0] if len(children) == 1 and block.tokens else None

    def _find_reachable(self) -> set[str]:
        found: set[str] = set()
        for block in self._ordered:
            parent = self.blocks.get(block.parent)
            follows = parent is not None and parent.key in found and parent.end == block.start
            if follows or block.start == 0:
                found.add(block.key)
        return found

    def _count_texts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for block in reversed(self._ordered):
            counts[block.key] = sum(counts.get(one.key, 1) for one in self._follows(block)) or 1
        return counts

    def _last_uses(self) -> dict[str, float]:
        """Of each block its last use or that of any block behind it."""
        used: dict[str, float] = {}
        for block in reversed(self._ordered):
            behind = [used.get(one.key, 0.0) for one in self._follows(block)]
            used[block.key] = max([block.entry.used, *behind])
        return used


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
