"""What every store of snapshots is: bytes under a key, within a budget.

Keys are hashes of what the value was computed from, so a value never changes under its key, and
two writers of one key write the same. A store knows nothing of what it keeps but its note.

What goes into a store, checked: keys, the pieces of a value, notes; and how much it may take.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

from kvcellar.errors import OptionError

MAX_NOTE = 1 << 16
"""Characters that a note may take as JSON."""

REMEMBERED = 10_000
"""How many evicted keys a store remembers."""

MAX_AGE_S = 100 * 365 * 24 * 3600
"""The longest time, in seconds, that can be asked for; servers take no time without end."""

_KEY = re.compile(r"[0-9a-z_-][0-9a-z._-]{0,127}")


def check_key(key: str) -> str:
    """The key, refused if it could be taken for anything else, such as a path."""
    if not is_key(key):
        raise OptionError(
            f"key {key!r}: a key is 1 to 128 characters of 0-9, a-z, '.', '_' and '-', "
            "and does not begin with a dot"
        )
    return key


def is_key(key: object) -> bool:
    """Whether a store can keep something under it."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def check_budget(max_bytes: int | None) -> int | None:
    """The budget, refused if nothing can be within it."""
    if max_bytes is not None and max_bytes < 0:
        raise OptionError(f"max_bytes {max_bytes} is negative: give a size in bytes, or None")
    return max_bytes


def flat(value: Sequence[Buffer]) -> list[memoryview]:
    """The pieces as plain bytes, without a copy; empty ones left out."""
    try:
        views = [memoryview(piece) for piece in value]
        return [view.cast("B") for view in views if view.nbytes]
    except TypeError as error:
        raise OptionError(
            f"value of {type(value).__name__}: give a list of contiguous buffers: {error}"
        ) from None


def encode_note(note: Note | None) -> str:
    """A note as JSON."""
    found: dict[object, object] = dict((note or {}).items())
    for name, content in found.items():
        if not isinstance(name, str) or not isinstance(content, (str, int)):
            raise OptionError(f"note {name!r}: {content!r}: a note has names, and str or int each")
    text = json.dumps(found)
    if len(text) > MAX_NOTE:
        raise OptionError(f"note of {len(text)} characters: at most {MAX_NOTE} are kept")
    return text


def keys_in(note: Note | None) -> list[str | None]:
    """Of each field, the key that a value with such a note is found by."""
    said = [(note or {}).get(field) for field in FIELDS]
    return [key if isinstance(key, str) and is_key(key) else None for key in said]


def decode_note(text: str) -> Note:
    """What :func:`encode_note` was given; empty if it cannot be read."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


Buffer: TypeAlias = "bytes | bytearray | memoryview"
Note: TypeAlias = Mapping[str, "str | int"]
"""What a person wants to know of an entry, and what tells why another was not found."""

Field: TypeAlias = Literal["parent", "text"]
"""Where a note may have a key that values can be found by."""
FIELDS: tuple[Field, ...] = get_args(Field)

Absence: TypeAlias = Literal["never stored", "evicted", "expired"]
"""Why a store does not have a key, as far as it remembers."""

WRITING_S = 600
"""Seconds that what seems to be left behind is left alone: somebody may be writing the rest."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One value in a store.

    ``created`` and ``used`` are seconds since 1970; ``n_bytes`` is what its value takes.
    """

    key: str
    n_bytes: int
    created: float
    used: float
    note: Note


class Store(Protocol):
    """Values by key. Keys are 1 to 128 characters of ``[0-9a-z._-]``, the first no dot.

    Safe for threads; where a store outlives the process, for processes too. Whoever gets a value
    gets what was put, or nothing: what is damaged counts as absent and is dropped.
    """

    def put(self, key: str, value: Sequence[Buffer], note: Note | None = None) -> bool:
        """Keep the pieces, joined, under a key; what is there stays, only its use is renewed.

        Returns:
            False if the value alone exceeds the budget: nothing was kept, nothing was evicted.

        Raises:
            OptionError: no such key can be.
            StoreError: it cannot be written; the store is as it was.
        """

    def get(self, key: str) -> Buffer | None:
        """The value, None if there is none. Counts as a use.

        Raises:
            StoreError: the store cannot be read.
        """

    def has(self, key: str) -> bool:
        """Whether there is a value; does not count as a use."""

    def touch(self, key: str) -> bool:
        """Count as a use what is there, without reading it; False if there is nothing.

        Raises:
            StoreError: the store cannot be read.
        """

    def why_absent(self, key: str) -> Absence:
        """Why there is none; stores remember a bounded number of those that they evicted."""

    def delete(self, key: str) -> bool:
        """Drop a value; False if there was none."""

    def entries(self) -> Iterator[Entry]:
        """All values, those used longest ago first; others may change the store meanwhile."""

    def find(self, field: Field, key: str, most: int) -> list[Entry]:
        """Up to so many values whose note has a key there; quick, however many values there are.

        Raises:
            OptionError: no such key can be.
            StoreError: the store cannot be read.
        """

    @property
    def bytes_used(self) -> int:
        """What all values take together."""

    def close(self) -> None:
        """Give back what the store holds open; its values stay where they outlive the process."""
