"""Values in Redis or Valkey, shared by machines; bounded by the server's memory and by age.

A value is one hash on the server, which writes, evicts and expires it as a whole::

    head:KEY        the value, its length and xxh3-128, its note, times of creation and use
    gone:KEY        when the value expires, or "none"; outlives the value by 30 days
    by:FIELD:KEY    the names of the hashes whose note has that key in that field

What must not be torn apart is a script or a transaction. Times are the server's, so machines need
not agree. The last two are hints: the server may evict them, and the next use of a value writes
them again; a name whose hash is gone leaves the set when it is met there.

Older stores hold values cut into strings ``piece:KEY:GENERATION:NUMBER``; these values are still
read, renewed and deleted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any
from urllib.parse import parse_qs, urlsplit

import xxhash

from kvcellar.errors import (
    ClosedError,
    OptionError,
    StoreError,
    check_bool,
    check_range,
    check_real,
    check_text,
    not_copied,
)
from kvcellar.stores.base import (
    FIELDS,
    MAX_AGE_S,
    Absence,
    BytesLike,
    Entry,
    Field,
    Note,
    check_key,
    check_search,
    decode_note,
    encode_note,
    flat,
    keys_in,
)

_TRACE_S = 30 * 24 * 3600
_MAX_VALUE = 512 << 20
_BATCH = 1000

_PRELUDE = (
    f"local fields = {{{str(FIELDS)[1:-1]}}}"
    """
local head, trace, by, stem = unpack(KEYS)
local about = redis.call('HMGET', head, 'generation', 'n_pieces', unpack(fields))

local sets, pieces = {}, {}
for i, field in ipairs(fields) do
    if about[i + 2] then sets[#sets + 1] = by .. field .. ':' .. about[i + 2] end
end
for i = 1, about[1] and math.min(tonumber(about[2]) or 0, 100000) or 0 do
    pieces[i] = stem .. about[1] .. ':' .. (i - 1)
end

local function is_there()
    for _, name in ipairs(pieces) do
        if redis.call('EXISTS', name) == 0 then return false end
    end
    return redis.call('EXISTS', head) == 1
end

local function drop()
    for _, name in ipairs(sets) do redis.call('SREM', name, head) end
    redis.call('UNLINK', head)
    for _, name in ipairs(pieces) do redis.call('UNLINK', name) end
end
"""
)

_HAS = _PRELUDE + "return is_there() and 1 or 0"

_USE = (
    _PRELUDE
    + """
if not is_there() then drop() return 0 end
local ttl, memory, time = tonumber(ARGV[1]), ARGV[2], redis.call('TIME')
local now = string.format('%d.%06d', tonumber(time[1]), tonumber(time[2]))
local function keep(name, ms)
    if ttl > 0 then redis.call('PEXPIRE', name, ms) else redis.call('PERSIST', name) end
end
keep(head, ttl)
for _, name in ipairs(pieces) do keep(name, ttl + 60000) end
redis.pcall('HSETNX', head, 'created', now)  -- these are refused when memory is full; go on
redis.pcall('HSET', head, 'used', now)
local deadline = ttl > 0 and string.format('%.3f', now + ttl / 1000) or 'none'
redis.pcall('SET', trace, deadline, 'PX', memory)
for _, name in ipairs(sets) do
    redis.pcall('SADD', name, head)
    redis.pcall('PEXPIRE', name, memory)
end
return 1
"""
)
"""Count a use: the time to live starts again. What lacks a piece is dropped."""

_DROP = _PRELUDE + "if (redis.call('HGET', head, 'created') or '') == ARGV[1] then drop() end"
"""Drop a damaged value, unless it was put again meanwhile."""

_DELETE = (
    _PRELUDE
    + """
local found = is_there()
drop()
redis.call('UNLINK', trace)
return found and 1 or 0
"""
)


class RedisStore:
    """Values in a Redis or Valkey server, for any number of machines.

    ::

        store = RedisStore("redis://cache.lan:6379/0", ttl_s=7 * 86400)
        store.put("3f9a", [header, rows], {"n_tokens": 512})
        store.get("3f9a")  # copied from the server, and checked

    The budget is the server's: set its ``maxmemory``, and ``maxmemory-policy allkeys-lru``. A
    value has at most 512 MB, which is Redis' own limit. Clusters are not supported, nor servers
    older than Redis 5.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, as the package redis takes it.
        prefix: what all names on the server begin with.
        ttl_s: seconds that a value stays without being used; None keeps it for good.
        piece_bytes: has no effect; values are no longer cut up. Goes with the next release.
        read_only: never write; a get then does not count as a use.

    Raises:
        OptionError: an argument is out of range.
        StoreError: the package redis is not installed, or the server cannot be reached.
    """

    __reduce_ex__ = not_copied("an open store", "open its URL again: any number of processes may")

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "kvcellar:",
        ttl_s: float | None = None,
        piece_bytes: int | None = None,
        read_only: bool = False,
    ) -> None:
        if ttl_s is not None:
            check_real("ttl_s", ttl_s, 0.001, MAX_AGE_S)
        if piece_bytes is not None:
            check_range("piece_bytes", piece_bytes, 1, 2**63 - 1)
        self.read_only = check_bool("read_only", read_only)
        self._prefix = check_text("prefix", prefix)
        ttl_ms = 0 if ttl_s is None else int(ttl_s * 1000)
        self._times = (ttl_ms, ttl_ms + _TRACE_S * 1000)
        self._client = RedisClient(url)

    def put(self, key: str, value: Sequence[BytesLike], note: Note | None = None) -> bool:
        """Write a value in one transaction; see :class:`~kvcellar.stores.base.Store`."""
        check_key(key)
        pieces, text = flat(value), encode_note(note)
        self._check_writable()
        n_bytes = sum(piece.nbytes for piece in pieces)
        if n_bytes > _MAX_VALUE:
            raise StoreError(f"{key} has {n_bytes} bytes: Redis takes at most {_MAX_VALUE} a value")
        if self.touch(key):
            return True
        whole, head = b"".join(pieces), self._head(key)
        about = {"value": whole, "n_bytes": n_bytes, "digest": _digest(whole), "note": text}
        about |= {field: found for field, found in zip(FIELDS, keys_in(note), strict=True) if found}
        self._client.calls(
            ("UNLINK", head),
            ("HSET", head, *(item for pair in about.items() for item in pair)),
            self._script(_USE, key, *self._times),
            atomic=True,
        )
        return True

    def get(self, key: str) -> BytesLike | None:
        """The value, checked; its time to live starts again."""
        look = self._script(_HAS if self.read_only else _USE, check_key(key), *self._times)
        fields = ("value", "digest", "n_bytes", "created", "generation", "n_pieces")
        while True:
            there, found = self._client.calls(look, ("HMGET", self._head(key), *fields))
            if not there:
                return None
            value, digest, n_bytes, created, generation, n_pieces = found
            if generation is not None:
                value = self._joined(key, generation, n_pieces or b"")
            if value is not None and (b"%d" % len(value), _digest(value)) == (n_bytes, digest):
                return bytes(value)
            if self.read_only:
                return None
            self._client.call(*self._script(_DROP, key, created or ""))

    def has(self, key: str) -> bool:
        """Whether there is a value; its time to live goes on."""
        return bool(self._client.call(*self._script(_HAS, check_key(key))))

    def touch(self, key: str) -> bool:
        """Start its time to live again."""
        if self.read_only:
            return self.has(key)
        return bool(self._client.call(*self._script(_USE, check_key(key), *self._times)))

    def why_absent(self, key: str) -> Absence:
        """What was deleted counts as never stored; the rest is remembered for 30 days."""
        trace, head = f"{self._prefix}gone:{check_key(key)}", self._head(key)
        deadline, there, now = self._client.calls(("GET", trace), ("EXISTS", head), ("TIME",))
        if deadline is None or there:
            return "never stored"
        is_over = deadline != b"none" and float(deadline) <= now[0] + now[1] / 1e6
        return "expired" if is_over else "evicted"

    def delete(self, key: str) -> bool:
        """Drop a value; False if there was none."""
        self._check_writable()
        return bool(self._client.call(*self._script(_DELETE, check_key(key))))

    def entries(self) -> Iterator[Entry]:
        """All values, least recently used first; some may be evicted meanwhile."""
        pattern, cursor, found = _escaped(self._head("")) + "*", 0, dict[str, Entry]()
        while True:
            cursor, heads = self._client.call("SCAN", cursor, "MATCH", pattern, "COUNT", _BATCH)
            found |= {entry.key: entry for entry in self._listed(heads) if entry is not None}
            if int(cursor) == 0:
                return iter(sorted(found.values(), key=lambda entry: (entry.used, entry.key)))

    def find(self, field: Field, key: str, most: int) -> list[Entry]:
        """Up to ``most`` values whose note has a key there; any of them if there are more."""
        check_search(field, key, most)
        name = f"{self._prefix}by:{field}:{key}"
        heads = self._client.call("SRANDMEMBER", name, most)
        entries = self._listed(heads)
        gone = [head for head, entry in zip(heads, entries, strict=True) if entry is None]
        if gone and not self.read_only:
            self._client.call("SREM", name, *gone)
        return [entry for entry in entries if entry is not None and entry.note.get(field) == key]

    @property
    def bytes_used(self) -> int:
        """Bytes of all values. Asks for every one: it is not meant for each put."""
        return sum(entry.n_bytes for entry in self.entries())

    def close(self) -> None:
        """Close the connections; values stay on the server."""
        self._client.close()

    def _listed(self, heads: list[bytes]) -> list[Entry | None]:
        """What hashes say of their values; None for those that are gone."""
        start = len(self._head("").encode())
        fields = ("n_bytes", "created", "used", "note")
        found = self._client.calls(*(("HMGET", head, *fields) for head in heads))
        pairs = zip(heads, found, strict=True)
        return [_entry(head[start:].decode(), *about) for head, about in pairs]

    def _joined(self, key: str, generation: bytes, n_pieces: bytes) -> bytes | None:
        """A value that was written in pieces, None if one is gone."""
        stem = f"{self._prefix}piece:{key}:".encode() + generation
        names = [stem + b":%d" % i for i in range(int(n_pieces) if n_pieces.isdigit() else 0)]
        pieces = self._client.calls(*(("GET", name) for name in names))
        return None if None in pieces else b"".join(pieces)

    def _head(self, key: str) -> str:
        return f"{self._prefix}head:{key}"

    def _script(self, script: str, key: str, *args: object) -> tuple[object, ...]:
        """The command that runs a script on what belongs to a key."""
        trace, by, stem = (
            f"{self._prefix}{name}" for name in (f"gone:{key}", "by:", f"piece:{key}:")
        )
        return ("EVAL", script, 4, self._head(key), trace, by, stem, *args)

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError("the store in Redis was opened read-only: nothing can be changed")


def _entry(key: str, *about: bytes | None) -> Entry | None:
    n_bytes, created, used, note = (b"" if found is None else found for found in about)
    try:
        said = decode_note(note.decode(errors="replace"))
        return Entry(key, int(n_bytes), float(created), float(used), said)
    except ValueError:
        return None


def _digest(value: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(value).encode()


def _escaped(text: str) -> str:
    """Text that a pattern of Redis takes as it stands."""
    return re.sub(r"([*?\[\]\\^-])", r"\\\1", text)


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
"""Options of the package that may stand in a URL; others change what is read or written."""
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
        self._shown = without_secrets(check_text("url", url))
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
        self._check_open()
        try:
            return self._client.execute_command(*command)
        except self._errors as error:
            raise StoreError(f"the store at {self._shown}: {error}") from error

    def calls(self, *commands: Sequence[Any], atomic: bool = False) -> list[Any]:
        """What the server answers to commands that are sent together; atomic: all or none is done.

        They are sent again if the answer is lost, so each must do no harm twice.
        """
        self._check_open()
        try:
            with self._client.pipeline(transaction=atomic) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return list(pipeline.execute())
        except self._errors as error:
            raise StoreError(f"the store at {self._shown}: {error}") from error

    def close(self) -> None:
        """Close the connections; twice is fine."""
        self._closed = True
        self._client.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the store at {self._shown} was closed: open it again")


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
            retry_on_error=[redis.ConnectionError, redis.TimeoutError],
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_ANSWER_S,
            socket_read_size=_READ_BYTES,
        )
    except (ValueError, TypeError) as error:
        raise _unusable(shown, error) from None
    return (redis.RedisError, OSError), client


def _check_options(url: str, shown: str) -> None:
    """Refuse options that would change how values are read or written."""
    parts = urlsplit(url)
    known = _OPTIONS + (_TLS_OPTIONS if parts.scheme == "rediss" else ())
    if parts.scheme != "unix" and re.fullmatch(r"/?[0-9]*", parts.path) is None:
        raise OptionError(f"the path of {shown}: the number of a database is one, as in /0")
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
