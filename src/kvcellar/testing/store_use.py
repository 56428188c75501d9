"""Stores of snapshots in tests: the obvious one, an oracle, and what others are used for.

:class:`NaiveStore` is a dict in the order of use; the functions ask a store what it holds and what
it refuses, and use it from several threads.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from kvcellar.stores.base import Absence, Field, Store


class NaiveStore:
    """Model a store with a budget: its values, its evictions, and the order of uses."""

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


BAD_KEYS = (
    "",
    ".",
    "..",
    ".hidden",
    "../x",
    "a/b",
    "/etc/passwd",
    "A",
    "é",
    "a\n",
    "a\0",
    "a" * 129,
)
GOOD_KEYS = ("a", "0", "_", "-", "a.", "a..b", "con", "0" * 128, "sha-256_0f.kv")


def refusal(error: type[Exception], work: Callable[[], object]) -> str:
    """The message of the error that work must raise."""
    try:
        work()
    except error as raised:
        return str(raised)
    raise AssertionError(f"no {error.__name__}")


def content(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """What a store has under keys, read in that order."""
    return [None if (value := store.get(key)) is None else bytes(value) for key in keys]


def order(store: Store) -> list[str]:
    """Keys, the one used longest ago first."""
    return [entry.key for entry in store.entries()]


def found(store: Store, field: Field, key: str) -> list[str]:
    """The keys of all values whose note has a key there."""
    return sorted(entry.key for entry in store.find(field, key, 999))


def value_of(key: str, n_bytes: int) -> bytes:
    """Bytes that belong to a key, so that a mix-up shows."""
    return random.Random(key).randbytes(n_bytes)


def hammer(store: Store, n_threads: int, n_steps: int) -> None:
    """Use a store from several threads; raises what any of them met."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            use_at_random(store, seed, n_steps)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def use_at_random(store: Store, seed: int, n_steps: int) -> None:
    """Put, get and delete a dozen keys; what is got must be what belongs to its key."""
    rng = random.Random(seed)
    for _ in range(n_steps):
        key = f"k{rng.randrange(12)}"
        value = value_of(key, 100 * int(key[1:]))
        choice = rng.random()
        if choice < 0.45:
            assert store.put(key, [value[:50], value[50:]], {"key": key})
        elif choice < 0.9:
            got = store.get(key)
            assert got is None or bytes(got) == value, f"{key} holds what belongs to another"
        elif choice < 0.95:
            store.delete(key)
        else:
            assert all(entry.note == {"key": entry.key} for entry in store.entries())
