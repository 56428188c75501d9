"""The blocks of a store, as trees: which block follows which, and what may be removed first.

Texts that begin alike share the blocks of what they begin with. A block can be used only while all
blocks before it are there, so texts are removed from their ends inward.

Parents and starts are what the notes of entries claim; whatever they claim, nothing here loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvcellar.stores.base import Entry

Reason: TypeAlias = Literal["unreachable", "unused", "over budget"]


@dataclass(frozen=True, slots=True)
class Block:
    """An entry and what its note says; an entry that is no block has no tokens and starts at 0.

    Attributes:
        entry: as the store lists it.
        parent: the key of the block before it; of a first block, that of its model and types.
        start: the index of its first token in the text.
        tokens: token ids.
        model: a short name of the model.
        begins: how its text begins; "" where the entry does not tell.
    """

    entry: Entry
    parent: str
    start: int
    tokens: tuple[int, ...]
    model: str
    begins: str

    @classmethod
    def of(cls, entry: Entry) -> Block:
        """Read an entry's note; what kvcellar does not write is ignored."""
        note = entry.note
        start, words = note.get("start"), str(note.get("tokens", "")).split()
        tokens = tuple(int(word) for word in words if word.isdecimal() and len(word) < 12)
        return cls(
            entry,
            str(note.get("parent", "")),
            start if tokens and isinstance(start, int) and start >= 0 else 0,
            tokens,
            str(note.get("model", "")),
            str(note.get("begins", "")),
        )

    @property
    def key(self) -> str:
        """The entry's key."""
        return self.entry.key

    @property
    def end(self) -> int:
        """The index after its last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Stretch:
    """One or more consecutive blocks that the same texts share.

    Attributes:
        blocks: from the first to the last.
        n_texts: how many texts continue from here, at least 1.
        reachable: whether all blocks before them are there.
    """

    blocks: tuple[Block, ...]
    n_texts: int
    reachable: bool

    @property
    def n_bytes(self) -> int:
        """The size of their values."""
        return sum(block.entry.n_bytes for block in self.blocks)

    @property
    def created(self) -> float:
        """When the first block was stored."""
        return min(block.entry.created for block in self.blocks)

    @property
    def used(self) -> float:
        """When any block was last used."""
        return max(block.entry.used for block in self.blocks)


class Forest:
    """All blocks of a store."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.blocks: Mapping[str, Block] = {entry.key: Block.of(entry) for entry in entries}
        self._children: dict[str, list[Block]] = {}
        for block in self.blocks.values():
            if block.start:
                self._children.setdefault(block.parent, []).append(block)
        # By start: whatever a note claims, no block precedes its parent.
        self._ordered = sorted(self.blocks.values(), key=lambda block: block.start)
        self._reachable = self._find_reachable()

    def is_reachable(self, block: Block) -> bool:
        """Return whether all blocks before it are there."""
        return block.key in self._reachable

    def chain(self, key: str) -> list[Block] | None:
        """Return the blocks of a text up to this one, None if one is missing."""
        found = [self.blocks[key]]
        while found[-1].start:
            parent = self.blocks.get(found[-1].parent)
            if parent is None or not parent.start < parent.end == found[-1].start:
                return None
            found.append(parent)
        return found[::-1]

    def stretches(self) -> list[Stretch]:
        """Return all blocks, each in exactly one stretch."""
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

    def removable(
        self, max_bytes: int | None, unused_since: float | None, idle_since: float
    ) -> Iterator[tuple[Block, Reason]]:
        """Yield unreachable blocks, those not used since, and then the least recently used.

        A text is stored from its end inward, so for a while its blocks are unreachable: those used
        after ``idle_since`` stay.
        """
        used, staying = self._last_uses(), list[Block]()
        order = sorted(self.blocks.values(), key=lambda b: (used[b.key], -b.start, b.key))
        for block in order:
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
        """Return for each block the last use of it or of any block that follows it."""
        used: dict[str, float] = {}
        for block in reversed(self._ordered):
            behind = [used.get(one.key, 0.0) for one in self._follows(block)]
            used[block.key] = max([block.entry.used, *behind])
        return used
