"""Why a block of a text is not in a store: looked for in the notes of what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

from kvcellar.snapshot.stores.base import Entry, Note, Store

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

_MARKS: tuple[Cause, ...] = ("window slid", "no checkpoint")

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
        tokens: its tokens.
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


def mark(store: Store, wanted: Wanted, cause: Cause) -> None:
    """Remember why a block could not be stored."""
    store.put(_mark_key(wanted.key), [cause.encode()], {"absent": cause, "start": wanted.start})


def absent_of(note: Note) -> Cause | None:
    """Why a block could not be stored, if the note is that of such a mark."""
    return next((cause for cause in _MARKS if cause == note.get("absent")), None)


def explain(store: Store, wanted: Wanted) -> Absence:
    """Why a block is not there.

    What the store remembers counts first, then what was marked. Else the notes of what is there
    are looked at: for a text that goes on differently at the block, or for the same one of others.
    """
    kept = store.why_absent(wanted.key)
    if kept != "never stored":
        return Absence(kept, wanted.start)
    if (cause := _marked(store, wanted)) is not None:
        return Absence(cause, wanted.start)
    n_common = -1
    other: Cause | None = None
    for entry in islice(store.entries(), MAX_ENTRIES):
        note = entry.note
        if entry.key == wanted.key:
            continue
        if note.get("parent") == wanted.parent:
            n_common = max(n_common, _n_common(entry, wanted.tokens))
        elif note.get("text") == wanted.text:
            same_model = note.get("model") == wanted.model
            other = "other types" if same_model else other or "other model"
    # A text that has nothing in common here says less than the same one of another model.
    if other is not None and n_common < 1:
        return Absence(other, wanted.start)
    if n_common >= 0:
        return Absence("diverged", wanted.start + n_common)
    return Absence("nothing stored", wanted.start)


def _mark_key(key: str) -> str:
    return f"{key}.absent"


def _marked(store: Store, wanted: Wanted) -> Cause | None:
    """Why a block could not be stored, if that was marked."""
    value = store.get(_mark_key(wanted.key))
    said = None if value is None else bytes(value)
    return next((cause for cause in _MARKS if cause.encode() == said), None)


def _n_common(entry: Entry, tokens: Sequence[int]) -> int:
    stored = str(entry.note.get("tokens", "")).split()
    n = 0
    while n < min(len(stored), len(tokens)) and stored[n] == str(tokens[n]):
        n += 1
    return n
