"""Values in Redis or Valkey, shared by machines; the server's memory and their age bound them.

Talking to a Redis server through the optional package redis; every failure is a StoreError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import xxhash

from kvcellar.errors import ClosedError, OptionError, StoreError
from kvcellar.stores import redis_scripts
from kvcellar.stores.base import (
    MAX_AGE_S,
    WRITING_S,
    Absence,
    Buffer,
    Entry,
    Field,
    Note,
    check_key,
    decode_note,
    encode_note,
    flat,
    keys_in,
)

_SCHEMES = ("redis", "rediss", "unix")
_OPTIONS = (
    "client_name",
    "db",
    "health_check_interval",
    "max_connections",
    "password",
    "retry_on_timeout",
    "socket_connect_timeout",
    "socket_keepalive",
    "socket_timeout",
    "username",
)
_TLS_OPTIONS = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_ciphers",
    "ssl_keyfile",
    "ssl_min_version",
    "ssl_password",
)
"""What the package takes in a URL and does no harm; others change what is read or written."""
_CONNECT_S, _ANSWER_S = 5.0, 60.0
_READ_BYTES = 1 << 20


class RedisClient:
    """Sends commands; safe for threads, which the package sees to.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, as the package takes it; options that
            change how answers are read are refused.

    Raises:
        OptionError: no such URL can be.
        StoreError: the package is not installed, or the server does not answer.
    """

    def __init__(self, url: str) -> None:
        self._shown = without_secrets(url)
        self._closed = False
        self._errors, self._client = _connect(url, self._shown)
        try:
            self.call("PING")
        except StoreError:
            self.close()
            raise
        except (ValueError, TypeError) as error:  # options are looked at when it connects
            self.close()
            raise _unusable(self._shown, error) from None

    def call(self, *command: Any) -> Any:  # whatever the server answers
        """What the server answers to a command."""
        if self._closed:
            raise ClosedError(f"the store at {self._shown} was closed: open it again")
        try:
            return self._client.execute_command(*command)
        except self._errors as error:
            raise StoreError(f"the store at {self._shown}: {error}") from error

    def close(self) -> None:
        """Close the connections; twice is fine."""
        self._closed = True
        self._client.close()


def without_secrets(url: str) -> str:
    """A URL without names, passwords and options; nothing of one that is not escaped properly."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise OptionError("the URL of the store is none: redis://HOST:PORT/NUMBER is") from None
    if parts.scheme not in _SCHEMES:
        raise OptionError(f"scheme {parts.scheme!r} of the store: {', '.join(_SCHEMES)} are known")
    if "@" in url.replace(parts.netloc, "", 1):
        return f"{parts.scheme}://..."
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _connect(url: str, shown: str) -> tuple[tuple[type[Exception], ...], Any]:
    """The errors that the package raises, and its client; it connects when it is first used."""
    try:
        redis = import_module("redis")
        retry = import_module("redis.retry").Retry(import_module("redis.backoff").NoBackoff(), 1)
    except ImportError:
        raise StoreError(
            f'the store at {shown} needs the package redis: pip install "kvcellar[redis]"'
        ) from None
    _check_options(url, shown)
    try:
        client = redis.Redis.from_url(
            url,
            retry=retry,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_ANSWER_S,
            socket_read_size=_READ_BYTES,
        )
    except (ValueError, TypeError) as error:
        raise _unusable(shown, error) from None
    return (redis.RedisError, OSError), client


def _check_options(url: str, shown: str) -> None:
    """Refuse what the package would do as it is told, whatever became of the values."""
    parts = urlsplit(url)
    known = _OPTIONS + (_TLS_OPTIONS if parts.scheme == "rediss" else ())
    for name in parse_qs(parts.query):
        if name not in known:
            # Of a password that is not escaped, the end looks like an option.
            named = "an option" if shown.endswith("://...") else f"option {name!r:.50}"
            raise OptionError(
                f"{named} in the URL of the store at {shown}: leave it out; "
                f"{', '.join(known)} are possible"
            )


def _unusable(shown: str, error: Exception) -> OptionError:
    return OptionError(f"the URL of the store at {shown} cannot be used: {error}")


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
        """Write pieces, then the head; see :class:`~kvcellar.stores.base.Store`."""
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
