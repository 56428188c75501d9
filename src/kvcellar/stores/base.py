"""What every store of snapshots is: bytes under a key, within a budget.

Keys are hashes of what a value was computed from, so a value never changes under its key, and two
writers of one key write values that mean the same. A store knows nothing of a value but its note.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, get_args

from kvcellar.errors import (
    OptionError,
    check_choice,
    check_kind,
    check_path,
    check_range,
    shown,
)

BytesLike: TypeAlias = "bytes | bytearray | memoryview"
Buffer: TypeAlias = BytesLike  # goes with the next release
Note: TypeAlias = Mapping[str, "str | int"]
"""Facts about an entry, for people and to explain why another one was not found."""

Field: TypeAlias = Literal["parent", "text"]
"""Fields of a note that may hold a key; values can be found by it."""
FIELDS: tuple[Field, ...] = get_args(Field)

Absence: TypeAlias = Literal["never stored", "evicted", "expired"]
"""Why a store does not have a key, as far as it remembers."""

MAX_NOTE = 1 << 16
"""Characters of the largest note, as JSON."""

REMEMBERED = 10_000
"""How many evicted keys a store remembers."""

MAX_AGE_S = 100 * 365 * 24 * 3600
"""The longest time in seconds that can be asked for: servers take no infinite time."""

WRITING_S = 600
"""Seconds for which files that nothing refers to are left alone: they may be being written."""

_KEY = re.compile(r"[0-9a-z_-][0-9a-z._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One value in a store.

    ``created`` and ``used`` are seconds since 1970; ``n_bytes`` is the size of the value.
    """

    key: str
    n_bytes: int
    created: float
    used: float
    note: Note


class Store(Protocol):
    """Values by key. Keys are 1 to 128 characters of ``[0-9a-z._-]``, the first no dot.

    Safe for threads, and for processes where a store outlives one. A get returns what was put, or
    nothing: a damaged value counts as absent and is dropped. A verb that is interrupted, by
    whatever is raised in it, happened or did not; what it left half done is finished or taken back
    when the same thread uses the store again.
    """

    @property
    def max_bytes(self) -> int | None:
        """Limit of the bytes of all values; None: there is none, or the store does not know it."""

    def put(self, key: str, value: Sequence[BytesLike], note: Note | None = None) -> bool:
        """Store the pieces, joined, under a key. A value that is there stays, and is touched.

        Returns:
            False if the value alone exceeds the budget: nothing was stored or evicted.

        Raises:
            OptionError: the key is not valid.
            StoreError: the value cannot be written; the store is as it was.
        """

    def get(self, key: str) -> BytesLike | None:
        """Return the value, None if there is none. Counts as a use.

        Raises:
            StoreError: the store cannot be read.
        """

    def has(self, key: str) -> bool:
        """Whether there is a value; does not count as a use."""

    def touch(self, key: str) -> bool:
        """Count a use of a value without reading it; False if there is none.

        Raises:
            StoreError: the store cannot be read.
        """

    def touch_all(self, keys: Sequence[str]) -> set[str]:
        """Count a use of each value, in this order and in one step; return which are there.

        Raises:
            StoreError: the store cannot be read.
        """

    def why_absent(self, key: str) -> Absence:
        """Why there is no value; a store remembers a bounded number of evictions."""

    def delete(self, key: str) -> bool:
        """Drop a value; False if there was none."""

    def entries(self) -> Iterator[Entry]:
        """All values, least recently used first; others may change the store meanwhile."""

    def find(self, field: Field, key: str, most: int) -> list[Entry]:
        """Up to ``most`` values whose note has a key there; quick in a store of any size.

        Raises:
            OptionError: the key is not valid.
            StoreError: the store cannot be read.
        """

    @property
    def bytes_used(self) -> int:
        """Bytes of all values."""

    def close(self) -> None:
        """Release files and connections; values stay where they outlive the process."""


# -- what goes into a store, checked


def check_key(key: str) -> str:
    """Return the key; refuse one that could be taken for anything else, such as a path."""
    if not is_key(key):
        raise OptionError(
            f"key {shown(key, 200)}: a key is 1 to 128 characters of 0-9, a-z, '.', '_' and '-', "
            "and does not begin with a dot"
        )
    return key


def check_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys in a list, each checked."""
    return [check_key(key) for key in check_kind("keys", keys, list, tuple)]


def is_key(key: object) -> bool:
    """Whether it is a valid key."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def check_budget(max_bytes: int | None) -> int | None:
    """Return the budget in bytes; None: no limit."""
    return None if max_bytes is None else check_range("max_bytes", max_bytes, 0, 2**63 - 1)


def expanded(name: str, path: str | os.PathLike[str]) -> Path:
    """Return a path with the user's folder in place of ``~``."""
    try:
        return check_path(name, path).expanduser()
    except RuntimeError as error:  # there is no such user
        raise OptionError(f"{name}={shown(path)}: {error}") from None


def check_search(field: Field, key: str, most: int) -> None:
    """Check what entries are looked up by."""
    check_choice("field", field, FIELDS)
    check_key(key)
    check_range("most", most, 0, 2**31 - 1)


def check_store(store: object) -> None:
    """Check that something is a store, by its methods: other people write stores too."""
    verbs = ("put", "get", "has", "touch", "touch_all", "why_absent", "delete", "entries", "find")
    if isinstance(store, type) or not all(callable(getattr(store, verb, None)) for verb in verbs):
        raise OptionError(f"store={shown(store)}: open one first, with open_store(…)")


def flat(value: Sequence[BytesLike]) -> list[memoryview]:
    """The pieces as plain bytes, without a copy; without empty ones."""
    try:
        views = [memoryview(piece) for piece in value]
        return [view.cast("B") for view in views if view.nbytes]
    except TypeError as error:
        raise OptionError(
            f"value of {type(value).__name__}: give a list of contiguous buffers: {error}"
        ) from None


def encode_note(note: Note | None) -> str:
    """Return a note as JSON."""
    if note is not None:
        check_kind("note", note, Mapping)
    found: dict[object, object] = dict((note or {}).items())
    for name, content in found.items():
        if not isinstance(name, str) or not isinstance(content, (str, int)):
            raise OptionError(
                f"note {shown(name)}: {shown(content)}: a note has names, and str or int each"
            )
    try:
        text = json.dumps(found)
    except ValueError as error:  # a number of too many digits
        raise OptionError(f"note: {error}") from None
    if len(text) > MAX_NOTE:
        raise OptionError(f"note of {len(text)} characters: at most {MAX_NOTE} are kept")
    return text


def keys_in(note: Note | None) -> list[str | None]:
    """The key that a note has in each field, None if it has none."""
    said = [(note or {}).get(field) for field in FIELDS]
    return [key if isinstance(key, str) and is_key(key) else None for key in said]


def decode_note(text: str) -> Note:
    """Read a note that :func:`encode_note` wrote; empty if it cannot be read."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
