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
    check_keys,
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
        self.max_bytes = check_budget(max_bytes)
        self._held: OrderedDict[str, tuple[bytes, Entry]] = OrderedDict()
        self._evicted: OrderedDict[str, None] = OrderedDict()
        self._bytes = 0
        self._is_changing = False
        self._closed = False
        self._lock = threading.Lock()

    def put(self, key: str, value: Sequence[BytesLike], note: Note | None = None) -> bool:
        """Store a copy of the pieces, joined; see :class:`~kvcellar.stores.base.Store`."""
        check_key(key)
        pieces, text = flat(value), encode_note(note)
        n_bytes = sum(piece.nbytes for piece in pieces)
        if self.max_bytes is not None and n_bytes > self.max_bytes:
            return False
        if self._use(key):
            return True
        joined, now = b"".join(pieces), time.time()
        with self._lock:
            self._begin()
            if key not in self._held:
                self._is_changing = True
                self._make_room(n_bytes)
                self._evicted.pop(key, None)
                self._held[key] = joined, Entry(key, n_bytes, now, now, decode_note(text))
                self._bytes += n_bytes
                self._is_changing = False
        return True

    def get(self, key: str) -> BytesLike | None:
        """Return the value itself: bytes, which cannot be changed."""
        return held[0] if (held := self._use(check_key(key))) else None

    def has(self, key: str) -> bool:
        """Whether there is a value; does not count as a use."""
        with self._lock:
            self._begin()
            return check_key(key) in self._held

    def touch(self, key: str) -> bool:
        """Make a value the most recently used."""
        return self._use(check_key(key)) is not None

    def touch_all(self, keys: Sequence[str]) -> set[str]:
        """Make values the most recently used; return which are there."""
        return {key for key in check_keys(keys) if self.touch(key)}

    def why_absent(self, key: str) -> Absence:
        """What was deleted counts as never stored."""
        with self._lock:
            self._begin()
            return "evicted" if check_key(key) in self._evicted else "never stored"

    def delete(self, key: str) -> bool:
        """Drop a value; False if there was none."""
        with self._lock:
            self._begin()
            if check_key(key) not in self._held:
                return False
            self._is_changing = True
            self._bytes -= self._held.pop(key)[1].n_bytes
            self._is_changing = False
            return True

    def entries(self) -> Iterator[Entry]:
        """All values at this moment, least recently used first."""
        with self._lock:
            self._begin()
            return iter([entry for _, entry in self._held.values()])

    def find(self, field: Field, key: str, most: int) -> list[Entry]:
        """Up to ``most`` values whose note has a key there. Looks at all of them."""
        check_search(field, key, most)
        return list(islice((e for e in self.entries() if e.note.get(field) == key), most))

    @property
    def bytes_used(self) -> int:
        """Bytes of all values."""
        with self._lock:
            self._begin()
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
            self._begin()
            if (held := self._held.get(key)) is None:
                return None
            self._held[key] = held[0], replace(held[1], used=time.time())
            self._held.move_to_end(key)
            return held

    def _make_room(self, n_bytes: int) -> None:
        if self.max_bytes is None:
            return
        while self._bytes + n_bytes > self.max_bytes:
            key = next(iter(self._held))
            self._evicted[key] = None
            self._evicted.move_to_end(key)
            self._bytes -= self._held.pop(key)[1].n_bytes
        while len(self._evicted) > REMEMBERED:
            self._evicted.popitem(last=False)

    def _begin(self) -> None:
        """Refuse a closed store; count again after a change that was interrupted."""
        if self._closed:
            raise ClosedError("the store in memory was closed: its values are gone")
        if self._is_changing:
            self._bytes = sum(entry.n_bytes for _, entry in self._held.values())
            for key in self._held.keys() & self._evicted.keys():
                del self._evicted[key]
            self._is_changing = False
