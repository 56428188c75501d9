"""The prompt cache of ``run`` and ``chat``: a help, and never what a run fails from.

A store that cannot be opened is an error, because it was named wrongly or is not what it should be.
One that fails later is complained about once, and the run goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvcellar.cli.console import note, parse_age, parse_size
from kvcellar.errors import CacheFull, ClosedError, OptionError, StoreError

if TYPE_CHECKING:
    from kvcellar.prompts.cache import PromptCache
    from kvcellar.runtime.sequence import Sequence as Text
    from kvcellar.stores.base import Absence, Buffer, Entry, Field, Note, Store

T = TypeVar("T")

FOLDER_BYTES = "10G"
"""What a folder may take if nobody says: a disk must not fill up unseen."""


@dataclass(frozen=True, slots=True)
class PromptStore:
    """What the options say about it.

    Attributes:
        where: a folder or URL; None: there is no prompt cache.
        salt: texts of another salt are never found.
        max_bytes: the budget of a folder, as it was written; None: ``FOLDER_BYTES``.
        ttl: how long a server keeps what nobody uses, as it was written; None: for good.

    Raises:
        OptionError: no such size or age, or an option of what is not there.
    """

    where: str | None
    salt: str | None = None
    max_bytes: str | None = None
    ttl: str | None = None

    def __post_init__(self) -> None:
        for option, value in (("salt", self.salt), ("bytes", self.max_bytes), ("ttl", self.ttl)):
            if value is not None and self.where is None:
                raise OptionError(f"--cache-{option} needs --prompt-cache")
        self._size()
        self._ttl()

    @contextmanager
    def open(self) -> Iterator[PromptCache | None]:
        """The prompt cache, if there is to be one; closed at the end.

        Raises:
            OptionError: no such store can be.
            StoreError: it cannot be opened.
        """
        if self.where is None:
            yield None
            return
        from kvcellar.cli.store_tools import open_or_make
        from kvcellar.prompts.cache import PromptCache
        from kvcellar.stores.opening import folder_of

        size = self._size()
        if size is None and folder_of(self.where) is not None:
            size = parse_size(FOLDER_BYTES, "--cache-bytes")
        with closing(open_or_make(self.where, size, self._ttl())) as store:
            yield PromptCache(BestEffortStore(store), cache_salt=self.salt or "")

    def _size(self) -> int | None:
        return None if self.max_bytes is None else parse_size(self.max_bytes, "--cache-bytes")

    def _ttl(self) -> float | None:
        return None if self.ttl is None else parse_age(self.ttl, "--cache-ttl")


@contextmanager
def stored_at_end(prompts: PromptCache | None, sequence: Text) -> Iterator[None]:
    """Store what a sequence holds at the end, also after Ctrl-C and when the cache was full."""
    try:
        yield
    except (CacheFull, KeyboardInterrupt):
        _store_computed(prompts, sequence)
        raise
    _store_computed(prompts, sequence)


def _store_computed(prompts: PromptCache | None, sequence: Text) -> None:
    """What only waits to be computed is dropped: there may be no room for it."""
    if prompts is None:
        return
    n_pending = len(sequence) - sequence.context.cache.seq_count(sequence.seq_id)
    if n_pending > 0:
        sequence.trim(n_pending)
    if len(sequence):
        prompts.store(sequence)


class BestEffortStore:
    """A store that is empty and keeps nothing from when it first fails."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._failed = False

    def put(self, key: str, value: Sequence[Buffer], note: Note | None = None) -> bool:
        """Keep a value; False if the store fails."""
        return self._try(lambda: self._store.put(key, value, note), False)

    def get(self, key: str) -> Buffer | None:
        """The value, None if the store fails."""
        return self._try(lambda: self._store.get(key), None)

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return self._try(lambda: self._store.has(key), False)

    def touch(self, key: str) -> bool:
        """Count a use of what is there."""
        return self._try(lambda: self._store.touch(key), False)

    def why_absent(self, key: str) -> Absence:
        """Why there is none."""
        return self._try(lambda: self._store.why_absent(key), "never stored")

    def delete(self, key: str) -> bool:
        """Drop a value."""
        return self._try(lambda: self._store.delete(key), False)

    def entries(self) -> Iterator[Entry]:
        """All values."""
        none: list[Entry] = []
        return iter(self._try(lambda: list(self._store.entries()), none))

    def find(self, field: Field, key: str, most: int) -> list[Entry]:
        """Values whose note has a key there."""
        none: list[Entry] = []
        return self._try(lambda: self._store.find(field, key, most), none)

    @property
    def bytes_used(self) -> int:
        """What all values take together."""
        return self._try(lambda: self._store.bytes_used, 0)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _try(self, action: Callable[[], T], otherwise: T) -> T:
        if self._failed:
            return otherwise
        try:
            return action()
        except (StoreError, ClosedError) as error:
            self._failed = True
            note(f"warning: going on without the prompt cache: {' '.join(str(error).split())}")
            return otherwise
