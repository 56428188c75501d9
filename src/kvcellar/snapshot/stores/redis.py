"""Values in Redis or Valkey, shared by machines; the server's memory and their age bound them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import xxhash

from kvcellar.errors import ClosedError, OptionError, StoreError
from kvcellar.snapshot.stores import redis_scripts
from kvcellar.snapshot.stores.base import WRITING_S, Absence, Buffer, Entry, Field, Note
from kvcellar.snapshot.stores.contents import (
    MAX_AGE_S,
    check_key,
    decode_note,
    encode_note,
    flat,
    keys_in,
)
from kvcellar.snapshot.stores.redis_client import RedisClient

_TRACE_S = 30 * 24 * 3600
_MAX_PIECE = 512 << 20
_BATCH = 500


class RedisStore:
    """Values in a Redis or Valkey server.

    ::

        store = RedisStore("redis://cache.lan:6379/0", ttl_s=7 * 24 * 3600)
        store.put("3f9a", [header, rows], {"n_tokens": 512})
        store.get("3f9a")

    A value lies there in pieces. They are written first, under names of their own, then all of
    them become the value at once, so a reader sees one whole put or nothing. Pieces of a writer
    that died vanish after ten minutes. The server may evict what it likes: a value that lacks a
    piece counts as absent, and its remains are dropped.

    The budget is the server's: set its ``maxmemory``, and ``maxmemory-policy allkeys-lru``. With
    ``ttl_s``, whatever the server leaves of a value vanishes in time; else when it is evicted too.
    Clusters are not supported, nor servers older than Redis 5.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, as the package redis takes it.
        prefix: what all names on the server begin with.
        ttl_s: seconds that a value stays without being used; None is for good.
        piece_bytes: how large pieces are.
        read_only: never write; a get then does not count as a use.

    Raises:
        OptionError: an argument is out of range.
        StoreError: the package redis is not installed, or the server cannot be reached.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "kvcellar:",
        ttl_s: float | None = None,
        piece_bytes: int = 8 << 20,
        read_only: bool = False,
    ) -> None:
        if ttl_s is not None and not 0.001 <= ttl_s <= MAX_AGE_S:
            raise OptionError(f"ttl_s {ttl_s}: give seconds, from 0.001 to {MAX_AGE_S}, or None")
        if not 1 <= piece_bytes <= _MAX_PIECE:
            raise OptionError(f"piece_bytes {piece_bytes}: from 1 to {_MAX_PIECE} are possible")
        self.read_only = read_only
        self._prefix = prefix
        self._piece_bytes = piece_bytes
        ttl_ms = 0 if ttl_s is None else int(ttl_s * 1000)
        self._times = (ttl_ms, ttl_ms + _TRACE_S * 1000)
        self._client = RedisClient(url)

    def put(self, key: str, value: Sequence[Buffer], note: Note | None = None) -> bool:
        """Write pieces, then the head; see :class:`~kvcellar.snapshot.stores.base.Store`."""
        check_key(key)
        pieces, text = flat(value), encode_note(note)
        self._check_writable()
        if self._run(redis_scripts.USE, key, *self._times) is not None:
            return True
        names = self._new_names(key, sum(piece.nbytes for piece in pieces))
        try:
            about = (*self._write(names, pieces), text, *(key or "" for key in keys_in(note)))
            outcome = self._run(redis_scripts.ENTER, key, *self._times, *about)
        except BaseException:
            self._give_up(names)
            raise
        if outcome != b"entered":
            self._give_up(names)
        if outcome == b"lost":
            raise StoreError(f"{key} lost a piece while it was put: the server lacks memory")
        return True

    def get(self, key: str) -> Buffer | None:
        """The value, checked; its time to live begins anew."""
        check_key(key)
        look = redis_scripts.PEEK if self.read_only else redis_scripts.USE
        while (about := self._run(look, key, *self._times)) is not None:
            generation, n_pieces, n_bytes, digest = about
            names = _Names(self._stem(key), generation, n_pieces)
            whole = b"".join(self._fetch(names))
            if len(whole) == n_bytes and xxhash.xxh3_128_hexdigest(whole).encode() == digest:
                return whole
            if self.read_only:
                return None
            self._run(redis_scripts.DROP, key, generation)
        return None

    def has(self, key: str) -> bool:
        """Whether there is a value with all its pieces; its time to live goes on."""
        return bool(self._run(redis_scripts.HAS, check_key(key)))

    def touch(self, key: str) -> bool:
        """Let its time to live begin anew."""
        if self.read_only:
            return self.has(key)
        return self._run(redis_scripts.USE, check_key(key), *self._times) is not None

    def why_absent(self, key: str) -> Absence:
        """What was deleted counts as never stored; the rest is remembered for 30 days."""
        return cast("Absence", self._run(redis_scripts.WHY, check_key(key)).decode())

    def delete(self, key: str) -> bool:
        """Drop a value; False if there was none."""
        self._check_writable()
        return bool(self._run(redis_scripts.DROP, check_key(key), ""))

    def entries(self) -> Iterator[Entry]:
        """All values, those used longest ago first; what the server evicts meanwhile may be in."""
        found = {entry.key: entry for batch in self._heads() for entry in self._listed(batch)}
        return iter(sorted(found.values(), key=lambda entry: (entry.used, entry.key)))

    def find(self, field: Field, key: str, most: int) -> list[Entry]:
        """Up to so many values whose note has a key there; any of them if there are more."""
        name = f"{self._prefix}by:{field}:{check_key(key)}"
        heads = self._client.call(
            "EVAL", redis_scripts.FIND, 1, name, most, int(not self.read_only)
        )
        return [entry for entry in self._listed(heads) if entry.note.get(field) == key]

    @property
    def bytes_used(self) -> int:
        """What all values take together. Asks for every one: it is not meant for each put."""
        return sum(entry.n_bytes for entry in self.entries())

    def close(self) -> None:
        """Close the connections; values stay on the server."""
        self._client.close()

    def _new_names(self, key: str, n_bytes: int) -> _Names:
        """Names of as many pieces as that takes, which no other put has."""
        n_pieces = -(-n_bytes // self._piece_bytes)
        if n_pieces > redis_scripts.MAX_PIECES:
            raise OptionError(f"piece_bytes {self._piece_bytes} is too small for {n_bytes} bytes")
        return _Names(self._stem(key), os.urandom(8).hex().encode(), n_pieces)

    def _write(self, names: _Names, pieces: Sequence[memoryview]) -> tuple[bytes, int, int, str]:
        """Write all pieces; what a head says of them."""
        digest, n_bytes = xxhash.xxh3_128(), 0
        for name, chunk in zip(names.all(), _chunks(pieces, self._piece_bytes), strict=True):
            self._client.call("SET", name, chunk, "EX", WRITING_S)
            digest.update(chunk)
            n_bytes += len(chunk)
        return names.generation, names.n_pieces, n_bytes, digest.hexdigest()

    def _fetch(self, names: _Names) -> Iterator[bytes]:
        """Pieces up to the first that is gone."""
        for name in names.all():
            piece = self._client.call("GET", name)
            if piece is None:
                return
            yield piece

    def _heads(self) -> Iterator[list[bytes]]:
        """Names of heads, in batches; one may come twice."""
        pattern, cursor = _escaped(f"{self._prefix}head:") + "*", 0
        while True:
            cursor, batch = self._client.call("SCAN", cursor, "MATCH", pattern, "COUNT", _BATCH)
            yield batch
            if int(cursor) == 0:
                return

    def _listed(self, heads: list[bytes]) -> Iterator[Entry]:
        n_prefix = len(f"{self._prefix}head:".encode())
        about = self._client.call("EVAL", redis_scripts.LIST, len(heads), *heads) if heads else []
        for head, (n_bytes, created, used, note) in zip(heads, about, strict=True):
            if None not in (n_bytes, created, used, note):
                key, told = head[n_prefix:].decode(), decode_note(note.decode(errors="replace"))
                yield Entry(key, int(n_bytes), float(created), float(used), told)

    def _stem(self, key: str) -> bytes:
        return f"{self._prefix}piece:{key}:".encode()

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError("the store in Redis was opened read-only: nothing can be changed")

    def _give_up(self, names: _Names) -> None:
        """Remove pieces of a put that came to nothing, if that can be; else they expire."""
        if names.n_pieces:
            with suppress(StoreError, ClosedError):
                self._client.call("UNLINK", *names.all())

    def _run(self, script: str, key: str, *args: object) -> Any:  # what the script returns
        own = (f"{self._prefix}{kind}:{key}" for kind in ("head", "gone"))
        names = (*own, self._stem(key), f"{self._prefix}by:")
        return self._client.call("EVAL", script, len(names), *names, *args)


@dataclass(frozen=True, slots=True)
class _Names:
    """Of the pieces of one put."""

    stem: bytes
    generation: bytes
    n_pieces: int

    def all(self) -> list[bytes]:
        return [self.stem + self.generation + f":{i}".encode() for i in range(self.n_pieces)]


def _chunks(pieces: Sequence[memoryview], size: int) -> Iterator[bytes]:
    """The pieces joined and cut anew, each cut of that size but the last."""
    held: list[memoryview] = []
    room = size
    for piece in pieces:
        while piece:
            held.append(piece[:room])
            piece = piece[room:]
            room -= held[-1].nbytes
            if room == 0:
                yield b"".join(held)
                held, room = [], size
    if held:
        yield b"".join(held)


def _escaped(text: str) -> str:
    """Text that a pattern of Redis takes as it stands."""
    return re.sub(r"([*?\[\]\\^-])", r"\\\1", text)
