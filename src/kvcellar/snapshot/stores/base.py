"""What every store of snapshots is: bytes under a key, within a budget.

Keys are hashes of what the value was computed from, so a value never changes under its key, and
two writers of one key write the same. A store knows nothing of what it keeps but its note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

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
