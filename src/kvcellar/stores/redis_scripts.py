"""What a Redis server does at once, in Lua: entering, using and dropping a value.

A value is a head, which is a hash, and pieces, which are strings named after the generation in the
head. Scripts about one take the same names: the head, the trace that tells why a value is gone, and
the stems of the names of pieces and of sets. Times are the server's, so machines need not agree.

Values are found by the keys in their notes through sets of heads, one for each field and key. A
head that the server evicted is taken out by whoever meets it there; a set that it evicted is made
anew as its values are used.
"""

from __future__ import annotations

from kvcellar.stores.base import FIELDS

MAX_PIECES = 100_000
"""No value has more, whatever a damaged head says."""

_PRELUDE = (
    f"local max_pieces, fields = {MAX_PIECES}, {{{str(FIELDS)[1:-1]}}}"
    """
local head, trace, stem, by = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local function now()
    local time = redis.call('TIME')
    return string.format('%d.%06d', tonumber(time[1]), tonumber(time[2]))
end

local function names(generation, n)
    local found = {}
    for i = 1, math.min(tonumber(n) or 0, max_pieces) do
        found[i] = stem .. generation .. ':' .. (i - 1)
    end
    return found
end

local function whole(pieces)
    for _, name in ipairs(pieces) do
        if redis.call('EXISTS', name) == 0 then return false end
    end
    return true
end

-- The names of the sets that the head belongs into.
local function sets()
    local found, keys = {}, redis.call('HMGET', head, unpack(fields))
    for i, field in ipairs(fields) do
        if keys[i] then found[#found + 1] = by .. field .. ':' .. keys[i] end
    end
    return found
end

local function drop(pieces)
    for _, name in ipairs(sets()) do redis.call('SREM', name, head) end
    redis.call('UNLINK', head)
    for _, name in ipairs(pieces) do redis.call('UNLINK', name) end
end

-- The head goes first, so that nobody meets one without its pieces.
local function renew(pieces, ttl, memory, time)
    local keep = function(name, ms)
        if ttl > 0 then redis.call('PEXPIRE', name, ms) else redis.call('PERSIST', name) end
    end
    keep(head, ttl)
    for _, name in ipairs(pieces) do keep(name, ttl + 60000) end
    local deadline = ttl > 0 and string.format('%.3f', time + ttl / 1000) or 'none'
    redis.pcall('SET', trace, deadline, 'PX', memory)
    for _, name in ipairs(sets()) do
        redis.pcall('SADD', name, head)
        redis.pcall('PEXPIRE', name, memory)
    end
end
"""
)

ENTER = (
    _PRELUDE
    + """
local ttl, memory, generation, n_pieces = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local pieces = names(generation, n_pieces)
local there = redis.call('HGET', head, 'generation')
if there == generation then return 'entered' end
if there or redis.call('EXISTS', head) == 1 then return 'held' end
if not whole(pieces) then return 'lost' end
local time = now()
redis.call('HSET', head, 'generation', generation, 'n_pieces', n_pieces, 'n_bytes', ARGV[5],
    'digest', ARGV[6], 'note', ARGV[7], 'created', time, 'used', time)
for i, field in ipairs(fields) do
    if ARGV[7 + i] ~= '' then redis.call('HSET', head, field, ARGV[7 + i]) end
end
renew(pieces, ttl, memory, time)
return 'entered'
"""
)
"""Make pieces that lie there a value, unless there is one or a piece was lost; twice is fine."""

PEEK = (
    _PRELUDE
    + """
local about = redis.call('HMGET', head, 'generation', 'n_pieces', 'n_bytes', 'digest')
if not about[1] then return false end
return {about[1], #names(about[1], about[2]), tonumber(about[3]) or -1, about[4] or ''}
"""
)
"""What there is to know for reading a value; nothing changes."""

USE = (
    _PRELUDE
    + """
local ttl, memory = tonumber(ARGV[1]), ARGV[2]
local about = redis.call('HMGET', head, 'generation', 'n_pieces', 'n_bytes', 'digest')
if not about[1] then return false end
local pieces = names(about[1], about[2])
if not whole(pieces) then drop(pieces) return false end
local time = now()
redis.pcall('HSET', head, 'used', time)  -- refused when memory is full; reading goes on
renew(pieces, ttl, memory, time)
return {about[1], #pieces, tonumber(about[3]) or -1, about[4] or ''}
"""
)
"""What there is to know for reading a value, whose time begins anew; remains are dropped."""

HAS = (
    _PRELUDE
    + """
local about = redis.call('HMGET', head, 'generation', 'n_pieces')
if about[1] and whole(names(about[1], about[2])) then return 1 end
return 0
"""
)
"""Whether there is a head with all its pieces."""

DROP = (
    _PRELUDE
    + """
local about = redis.call('HMGET', head, 'generation', 'n_pieces')
if not about[1] or (ARGV[1] ~= '' and ARGV[1] ~= about[1]) then return 0 end
local pieces = names(about[1], about[2])
local found = whole(pieces)
drop(pieces)
if ARGV[1] == '' then redis.call('UNLINK', trace) end
return found and 1 or 0
"""
)
"""Drop a value; with a generation only if it is that one, which then was damaged."""

WHY = (
    _PRELUDE
    + """
local deadline = redis.call('GET', trace)
if not deadline or redis.call('EXISTS', head) == 1 then return 'never stored' end
if deadline ~= 'none' and tonumber(deadline) <= tonumber(now()) then return 'expired' end
return 'evicted'
"""
)
"""Why there is no value: whether its time was over, or the server took it before."""

FIND = """
local found = {}
for _, head in ipairs(redis.call('SRANDMEMBER', KEYS[1], ARGV[1])) do
    if redis.call('EXISTS', head) == 1 then found[#found + 1] = head
    elseif ARGV[2] == '1' then redis.call('SREM', KEYS[1], head) end
end
return found
"""
"""Heads of a set, at most so many, without those that are gone; these leave it if we may write."""

LIST = """
local found = {}
for i, head in ipairs(KEYS) do
    found[i] = redis.call('HMGET', head, 'n_bytes', 'created', 'used', 'note')
end
return found
"""
"""What heads say; nothing of those that are gone."""
