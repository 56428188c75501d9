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
from typing import Any

import xxhash

from kvcellar.errors import (
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
    check_keys,
    check_search,
    decode_note,
    encode_note,
    flat,
    keys_in,
)
from kvcellar.stores.redis_client import MOST_BYTES, RedisClient

_TRACE_S = 30 * 24 * 3600
_MAX_VALUE = 512 << 20
_MAX_PIECES = 100_000
_BATCH = 1000
_LISTED = 200
"""Notes that are read at once: of the largest, as many as an answer may hold."""

_ROUNDS = 100_000
"""How often a list is continued: a hundred million values, or a server that knows no end."""

_ATTEMPTS = 3

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
        OptionError: an argument is out of range, or the URL is none.
        StoreError: the package redis is not installed, or no Redis server answers. Whatever
            answers later, the error says so, within a time that is bounded.
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
        self.max_bytes = None
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
            shape=lambda answers: _flag(answers[2]),
        )
        return True

    def get(self, key: str) -> BytesLike | None:
        """The value, checked; its time to live starts again."""
        look = self._script(_HAS if self.read_only else _USE, check_key(key), *self._times)
        fields = ("value", "digest", "n_bytes", "created", "generation", "n_pieces")

        def shape(answers: list[Any]) -> tuple[bool, list[bytes | None]]:
            return _flag(answers[0]), _strings(answers[1], len(fields))

        for _ in range(_ATTEMPTS):
            there, found = self._client.calls(
                look, ("HMGET", self._head(key), *fields), shape=shape, most=_MAX_VALUE + MOST_BYTES
            )
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
        return None

    def has(self, key: str) -> bool:
        """Whether there is a value; its time to live goes on."""
        return self._client.call(*self._script(_HAS, check_key(key)), shape=_flag)

    def touch(self, key: str) -> bool:
        """Start its time to live again."""
        return key in self.touch_all([key])

    def touch_all(self, keys: Sequence[str]) -> set[str]:
        """Start their times to live again, all at once; return which are there."""
        script, times = (_HAS, ()) if self.read_only else (_USE, self._times)
        keys = check_keys(keys)
        commands = [self._script(script, key, *times) for key in keys]
        there = self._client.calls(*commands, shape=_flags) if commands else []
        return {key for key, is_there in zip(keys, there, strict=True) if is_there}

    def why_absent(self, key: str) -> Absence:
        """What was deleted counts as never stored; the rest is remembered for 30 days."""
        trace, head = f"{self._prefix}gone:{check_key(key)}", self._head(key)
        return self._client.calls(("GET", trace), ("EXISTS", head), ("TIME",), shape=_absence)

    def delete(self, key: str) -> bool:
        """Drop a value; False if there was none."""
        self._check_writable()
        return self._client.call(*self._script(_DELETE, check_key(key)), shape=_flag)

    def entries(self) -> Iterator[Entry]:
        """All values, least recently used first; some may be evicted meanwhile."""
        pattern, cursor, found = _escaped(self._head("")) + "*", 0, dict[str, Entry]()
        for _ in range(_ROUNDS):
            cursor, heads = self._client.call(
                "SCAN", cursor, "MATCH", pattern, "COUNT", _BATCH, shape=_scanned
            )
            found |= {entry.key: entry for entry in self._listed(heads) if entry is not None}
            if cursor == 0:
                return iter(sorted(found.values(), key=lambda entry: (entry.used, entry.key)))
        raise StoreError(f"the store in Redis has more than {_ROUNDS * _BATCH} values, or no end")

    def find(self, field: Field, key: str, most: int) -> list[Entry]:
        """Up to ``most`` values whose note has a key there; any of them if there are more."""
        check_search(field, key, most)
        name = f"{self._prefix}by:{field}:{key}"
        heads = self._client.call("SRANDMEMBER", name, most, shape=_names)[:most]
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
        entries: list[Entry | None] = []
        for i in range(0, len(heads), _LISTED):
            some = heads[i : i + _LISTED]
            found = self._client.calls(
                *(("HMGET", head, *_LISTED_FIELDS) for head in some), shape=_abouts
            )
            entries += [self._entry(head, *about) for head, about in zip(some, found, strict=True)]
        return entries

    def _entry(self, head: bytes, *about: bytes | None) -> Entry | None:
        """What a hash says of its value, None if it is gone or says nothing of one."""
        n_bytes, created, used, note = (b"" if found is None else found for found in about)
        try:
            key = check_key(head.removeprefix(self._head("").encode()).decode())
            said = decode_note(note.decode(errors="replace"))
            return Entry(key, int(n_bytes), float(created), float(used), said)
        except ValueError:
            return None

    def _joined(self, key: str, generation: bytes, n_pieces: bytes) -> bytes | None:
        """A value that was written in pieces, None if one is gone."""
        stem = f"{self._prefix}piece:{key}:".encode() + generation
        n = min(int(n_pieces), _MAX_PIECES) if re.fullmatch(rb"[0-9]{1,9}", n_pieces) else 0
        pieces = self._client.calls(
            *(("GET", stem + b":%d" % i) for i in range(n)),
            shape=lambda answers: _strings(answers, n),
            most=_MAX_VALUE + MOST_BYTES,
        )
        whole = [piece for piece in pieces if piece is not None]
        return b"".join(whole) if len(whole) == n else None

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


def _digest(value: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(value).encode()


def _escaped(text: str) -> str:
    """Text that a pattern of Redis takes as it stands."""
    return re.sub(r"([*?\[\]\\^-])", r"\\\1", text)


# -- what the server may answer

_LISTED_FIELDS = ("n_bytes", "created", "used", "note")


def _flag(answer: Any) -> bool:
    if answer not in (0, 1):
        raise ValueError(f"{answer!r:.50} in place of 0 or 1")
    return bool(answer)


def _flags(answers: list[Any]) -> list[bool]:
    return [_flag(answer) for answer in answers]


def _strings(answer: Any, n: int) -> list[bytes | None]:
    if not isinstance(answer, list) or len(answer) != n:
        raise ValueError(f"{answer!r:.50} in place of {n} values")
    if not all(one is None or isinstance(one, bytes) for one in answer):
        raise ValueError("numbers in place of values")
    return answer


def _abouts(answers: list[Any]) -> list[list[bytes | None]]:
    return [_strings(answer, len(_LISTED_FIELDS)) for answer in answers]


def _names(answer: Any) -> list[bytes]:
    if not isinstance(answer, (list, set)) or not all(isinstance(one, bytes) for one in answer):
        raise ValueError(f"{answer!r:.50} in place of names")
    return list(answer)


def _scanned(answer: Any) -> tuple[int, list[bytes]]:
    cursor, names = answer
    return int(cursor), _names(names)


def _absence(answers: list[Any]) -> Absence:
    """Why a value is not there, by its trace, whether it is there, and the server's time."""
    deadline, there, (seconds, micros) = answers
    if deadline is None or _flag(there):
        return "never stored"
    is_over = deadline != b"none" and float(deadline) <= int(seconds) + int(micros) / 1e6
    return "expired" if is_over else "evicted"
