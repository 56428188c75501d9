"""Values in this process's memory; the least recently used are evicted first."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from kvcellar.errors import ClosedError, not_copied
from kvcellar.stores.base import (
    REMEMBERED,
    Absence,
    BytesLike,
    Entry,
    Field,
    Note,
    check_budget,
    check_key,
    check_search,
    decode_note,
    encode_note,
    flat,
)


class MemoryStore:
    """The fastest store; its values end with the process.

    ::

        store = MemoryStore(max_bytes=2**30)
        store.put("3f9a", [header, rows], {"n_tokens": 512})
        store.get("3f9a")  # the pieces, joined

    Args:
        max_bytes: limit of the bytes of all values; None: no limit.
    """

    __reduce_ex__ = not_copied(
        "a store in memory",
        "share it among threads as it is; processes can share a store on disk or in Redis",
    )

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = check_budget(max_bytes)
        self._held: OrderedDict[str, tuple[bytes, Entry]] = OrderedDict()
        self._evicted: OrderedDict[str, None] = OrderedDict()
        self._bytes = 0
        self._closed = False
        self._lock = threading.Lock()

    def put(self, key: str, value: Sequence[BytesLike], note: Note | None = None) -> bool:
        """Store a copy of the pieces, joined; see :class:`~kvcellar.stores.base.Store`."""
        check_key(key)
        pieces, text = flat(value), encode_note(note)
        n_bytes = sum(piece.nbytes for piece in pieces)
        if self._max_bytes is not None and n_bytes > self._max_bytes:
            return False
        if self._use(key):
            return True
        joined, now = b"".join(pieces), time.time()
        with self._lock:
            self._check_open()
            if key not in self._held:
                self._make_room(n_bytes)
                self._held[key] = joined, Entry(key, n_bytes, now, now, decode_note(text))
                self._bytes += n_bytes
                self._evicted.pop(key, None)
        return True

    def get(self, key: str) -> BytesLike | None:
        """Return the value itself: bytes, which cannot be changed."""
        return held[0] if (held := self._use(check_key(key))) else None

    def has(self, key: str) -> bool:
        """Whether there is a value; does not count as a use."""
        with self._lock:
            self._check_open()
            return check_key(key) in self._held

    def touch(self, key: str) -> bool:
        """Make a value the most recently used."""
        return self._use(check_key(key)) is not None

    def why_absent(self, key: str) -> Absence:
        """What was deleted counts as never stored."""
        with self._lock:
            self._check_open()
            return "evicted" if check_key(key) in self._evicted else "never stored"

    def delete(self, key: str) -> bool:
        """Drop a value; False if there was none."""
        with self._lock:
            self._check_open()
            if (held := self._held.pop(check_key(key), None)) is None:
                return False
            self._bytes -= held[1].n_bytes
            return True

    def entries(self) -> Iterator[Entry]:
        """All values at this moment, least recently used first."""
        with self._lock:
            self._check_open()
            return iter([entry for _, entry in self._held.values()])

    def find(self, field: Field, key: str, most: int) -> list[Entry]:
        """Up to ``most`` values whose note has a key there. Looks at all of them."""
        check_search(field, key, most)
        return list(islice((e for e in self.entries() if e.note.get(field) == key), most))

    @property
    def bytes_used(self) -> int:
        """Bytes of all values."""
        with self._lock:
            self._check_open()
            return self._bytes

    def close(self) -> None:
        """Drop all values."""
        with self._lock:
            self._closed = True
            self._held.clear()
            self._evicted.clear()
            self._bytes = 0

    def _use(self, key: str) -> tuple[bytes, Entry] | None:
        with self._lock:
            self._check_open()
            if (held := self._held.get(key)) is None:
                return None
            self._held[key] = held[0], replace(held[1], used=time.time())
            self._held.move_to_end(key)
            return held

    def _make_room(self, n_bytes: int) -> None:
        if self._max_bytes is None:
            return
        while self._bytes + n_bytes > self._max_bytes:
            key, (_, entry) = self._held.popitem(last=False)
            self._bytes -= entry.n_bytes
            self._evicted[key] = None
        while len(self._evicted) > REMEMBERED:
            self._evicted.popitem(last=False)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store in memory was closed: its values are gone")
