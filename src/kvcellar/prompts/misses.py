"""Explain why a block of a text is not in a store, from the notes of what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvcellar.stores.base import Entry, Note, Store

Cause: TypeAlias = Literal[
    "nothing stored",
    "diverged",
    "evicted",
    "expired",
    "other model",
    "other types",
    "window slid",
    "no checkpoint",
    "damaged",
    "compressed",
    "shorter than a block",
    "no whole block",
    "over budget",
    "store failed",
]

_MARKS: tuple[Cause, ...] = ("window slid", "no checkpoint")

MAX_ENTRIES = 1000
"""Limit of the blocks that are compared: those after the same parent, or of the same text."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Why no more of a text was reused, and from which token on.

    Attributes:
        cause: one of the causes that docs/prompt-cache.md explains.
        token: the number of the first token that was not reused.
        block_size: tokens of a block, where the text is shorter than one; else 0.
    """

    cause: Cause
    token: int
    block_size: int = 0

    def __str__(self) -> str:
        where = f"token {self.token}"
        return {
            "nothing stored": f"nothing is stored from {where} on",
            "diverged": f"what is stored is another text from {where} on",
            "evicted": f"the block from {where} on was evicted to make room",
            "expired": f"the block from {where} on expired",
            "other model": "this text was stored by another model only",
            "other types": "this text was stored with other K/V types or another shape of cache",
            "window slid": f"the window at {where} had slid away when it was to be stored",
            "no checkpoint": f"no state was kept at {where} when it was to be stored",
            "shorter than a block": (
                f"the text is shorter than one block of {self.block_size} tokens"
            ),
            "no whole block": f"from {where} on there is no whole block with a token behind it",
            "compressed": (
                f"the block from {where} on is compressed: pip install 'kvcellar[zstd]' to read it"
            ),
            "over budget": f"with the block from {where} on, the text exceeds the store's budget",
            "store failed": f"the store failed when it was asked for {where} and what follows",
            "damaged": f"the block from {where} on was damaged and was dropped",
        }[self.cause]


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of a text, stored or not.

    Attributes:
        key: its key.
        parent: the key of the block before it.
        start: the number of its first token.
        tokens: its tokens.
        text: a key of the text up to its end that does not depend on the model.
        model: a short name of the model.
    """

    key: str
    parent: str
    start: int
    tokens: Sequence[int]
    text: str
    model: str


def note_of(block: BlockRef, begins: str = "") -> Note:
    """The note that a block is stored with, so that other misses can be explained by it.

    Args:
        block: what is stored.
        begins: how its text begins, for people; "" if that is not known.
    """
    return {
        "parent": block.parent,
        "start": block.start,
        "tokens": " ".join(map(str, block.tokens)),
        "text": block.text,
        "model": block.model,
        **({"begins": begins} if begins else {}),
    }


def mark(store: Store, block: BlockRef, cause: Cause) -> None:
    """Remember why a block could not be stored."""
    store.put(_mark_key(block.key), [cause.encode()], {"absent": cause, "start": block.start})


def absent_of(note: Note) -> Cause | None:
    """Why a block could not be stored, if the note is that of a mark."""
    return next((cause for cause in _MARKS if cause == note.get("absent")), None)


def explain(store: Store, block: BlockRef) -> Miss:
    """Explain why a block is not there.

    By what the store remembers, then by a mark, then by other blocks: those after the same parent,
    and those of the same text from other models or types.
    """
    gone = store.why_absent(block.key)
    if gone != "never stored":
        return Miss(gone, block.start)
    if (cause := _marked(store, block)) is not None:
        return Miss(cause, block.start)
    siblings = [e for e in store.find("parent", block.parent, MAX_ENTRIES) if e.key != block.key]
    n_common = max((_n_common(entry, block.tokens) for entry in siblings), default=-1)
    other = _of_others(store, block)
    # A text that has nothing in common here says less than the same one of another model.
    if other is not None and n_common < 1:
        return Miss(other, block.start)
    if n_common >= 0:
        return Miss("diverged", block.start + n_common)
    return Miss("nothing stored", block.start)


def _of_others(store: Store, block: BlockRef) -> Cause | None:
    """Whether the same text was stored by the same model with other types, or by another model."""
    same = store.find("text", block.text, MAX_ENTRIES)
    models = {entry.note.get("model") for entry in same if entry.key != block.key}
    if block.model in models:
        return "other types"
    return "other model" if models else None


def _mark_key(key: str) -> str:
    return f"{key}.absent"


def _marked(store: Store, block: BlockRef) -> Cause | None:
    """Why a block could not be stored, if that was marked."""
    value = store.get(_mark_key(block.key))
    said = None if value is None else bytes(value)
    return next((cause for cause in _MARKS if cause.encode() == said), None)


def _n_common(entry: Entry, tokens: Sequence[int]) -> int:
    stored = str(entry.note.get("tokens", "")).split()
    n = 0
    while n < min(len(stored), len(tokens)) and stored[n] == str(tokens[n]):
        n += 1
    return n
