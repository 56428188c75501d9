"""Why a block of a text is not in a store: looked for in the notes of what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

from kvcellar.snapshot.stores.base import Buffer, Entry, Note, Store

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
    "no whole block",
]

_MARK = b"kvcellar-absent:"
_MARKED: tuple[Cause, ...] = ("window slid", "no checkpoint")

MAX_ENTRIES = 10_000
"""How many entries are looked at for an explanation."""


@dataclass(frozen=True, slots=True)
class Absence:
    """Why the text could not be reused further than it was, and from which token on."""

    cause: Cause
    token: int

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
            "no whole block": f"from {where} on there is no whole block with a token behind it",
            "damaged": f"the block from {where} on was damaged and was dropped",
        }[self.cause]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The first block that is not there.

    Attributes:
        key: its key.
        parent: that of the block before it.
        start: the token it begins with.
        tokens: its tokens, or what there is of them at the end of a text.
        text: a key of the text up to its end that knows nothing of the model.
        model: a short name of the model.
    """

    key: str
    parent: str
    start: int
    tokens: Sequence[int]
    text: str
    model: str


def note_of(wanted: Wanted) -> Note:
    """What is noted of a block when it is stored, so that its absence can be explained later."""
    return {
        "parent": wanted.parent,
        "start": wanted.start,
        "tokens": " ".join(map(str, wanted.tokens)),
        "text": wanted.text,
        "model": wanted.model,
    }


def mark(cause: Cause) -> bytes:
    """What is stored in place of a block that cannot be."""
    return _MARK + cause.encode()


def marked(value: Buffer) -> Cause | None:
    """Why there is a mark in place of a block, None if there is none."""
    start = bytes(value[: len(_MARK) + 32])
    if not start.startswith(_MARK):
        return None
    said = start[len(_MARK) :].decode("ascii", "replace")
    return next((cause for cause in _MARKED if cause == said), "damaged")


def explain(store: Store, wanted: Wanted) -> Absence:
    """Why a block is not there."""
    kept = store.why_absent(wanted.key)
    if kept == "evicted":
        return Absence("evicted", wanted.start)
    if kept == "expired":
        return Absence("expired", wanted.start)
    best, cause = 0, None
    for entry in islice(store.entries(), MAX_ENTRIES):
        note = entry.note
        if note.get("parent") == wanted.parent and entry.key != wanted.key:
            best = max(best, 1 + _n_common(entry, wanted.tokens))
        elif note.get("text") == wanted.text and entry.key != wanted.key:
            cause = "other types" if note.get("model") == wanted.model else cause or "other model"
    if best:
        return Absence("diverged", wanted.start + best - 1)
    if cause == "other types":
        return Absence("other types", wanted.start)
    if cause == "other model":
        return Absence("other model", wanted.start)
    return Absence("nothing stored", wanted.start)


def _n_common(entry: Entry, tokens: Sequence[int]) -> int:
    stored = str(entry.note.get("tokens", "")).split()
    n = 0
    while n < min(len(stored), len(tokens)) and stored[n] == str(tokens[n]):
        n += 1
    return n
