"""The obvious store of snapshots: a dict in the order of use. The oracle of all others."""

from __future__ import annotations

from kvcellar.stores.base import Absence


class NaiveStore:
    """What a store with a budget holds, has evicted, and in which order it was used."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held: dict[str, bytes] = {}
        self.evicted: set[str] = set()

    def put(self, key: str, value: bytes) -> bool:
        """Keep a value, and drop those used longest ago."""
        if len(value) > self.max_bytes:
            return False
        if self.get(key) is None:
            self.held[key] = value
            self.evicted.discard(key)
            while self.bytes_used > self.max_bytes:
                oldest = next(iter(self.held))
                del self.held[oldest]
                self.evicted.add(oldest)
        return True

    def get(self, key: str) -> bytes | None:
        """The value; it moves to the end."""
        value = self.held.pop(key, None)
        if value is not None:
            self.held[key] = value
        return value

    def delete(self, key: str) -> bool:
        """Drop a value."""
        return self.held.pop(key, None) is not None

    def why_absent(self, key: str) -> Absence:
        """Whether it was evicted."""
        return "evicted" if key in self.evicted else "never stored"

    @property
    def bytes_used(self) -> int:
        """The sum of all."""
        return sum(map(len, self.held.values()))
