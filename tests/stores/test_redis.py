"""A store in Redis: time to live, values that the server takes, writers that meet or die."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from kvcellar.errors import OptionError, StoreError
from kvcellar.stores.base import MAX_AGE_S, Note
from kvcellar.stores.redis import RedisStore
from kvcellar.stores.redis_client import RedisClient, without_secrets
from kvcellar.testing.store_use import content, found, order, refusal, value_of
from tests.stores.conftest import StartRedis, running_redis, socket_of

VALUE = value_of("a", 100)
NOTE: Note = {"parent": "p", "text": "t"}
Open = Callable[..., RedisStore]


@pytest.fixture
def server(redis_url: str) -> Iterator[RedisClient]:
    """The session's server, empty."""
    client = RedisClient(redis_url)
    client.call("FLUSHALL")
    yield client
    client.close()


@pytest.fixture
def open_store(redis_url: str, server: RedisClient) -> Iterator[Open]:
    """Opens stores on it; all are closed at the end."""
    opened: list[RedisStore] = []

    def open_(url: str = redis_url, **options: Any) -> RedisStore:
        opened.append(RedisStore(url, **options))
        return opened[-1]

    assert server.call("DBSIZE") == 0
    yield open_
    for store in opened:
        store.close()


@pytest.fixture(params=["whole", "in pieces"])
def layout(request: pytest.FixtureRequest, open_store: Open, server: RedisClient) -> str:
    """A store that has "a", as it is written now, or as it was in pieces of 30 bytes."""
    layout = str(request.param)
    if layout == "whole":
        open_store().put("a", [VALUE], NOTE)
    else:
        lay_out_pieces(server)
        server.call("UNLINK", "kvcellar:head:b", "kvcellar:gone:b")
    return layout


def lay_out_pieces(server: RedisClient) -> None:
    """What an older version left on a server: "a" in four pieces, "b" without any."""
    found = json.loads(Path(__file__).with_name("redis_pieces.json").read_text())
    for name, data in found.items():
        if isinstance(data, dict):
            pairs = [text.encode("latin-1") for pair in data.items() for text in pair]
            server.call("HSET", name, *pairs)
        elif isinstance(data, list):
            server.call("SADD", name, *data)
        else:
            server.call("SET", name, data.encode("latin-1"))


def names(server: RedisClient, kind: str = "*") -> list[str]:
    found: list[bytes] = server.call("KEYS", f"kvcellar:{kind}*")
    return sorted(name.decode() for name in found)


# --- time to live -------------------------------------------------------------------------------


def test_what_nobody_uses_expires(open_store: Open, server: RedisClient) -> None:
    store = open_store(ttl_s=0.05)
    store.put("a", [VALUE])
    open_store(ttl_s=100).put("b", [VALUE])
    time.sleep(0.1)
    assert (store.get("a"), store.has("a"), order(store)) == (None, False, ["b"])
    assert store.bytes_used == 100
    assert [store.why_absent(key) for key in "ac"] == ["expired", "never stored"]
    assert names(server, "head:a") == []
    assert open_store(ttl_s=100).put("a", [VALUE])
    assert content(store, ["b"]) == [VALUE]


def test_use_renews_and_looking_does_not(
    open_store: Open, server: RedisClient, layout: str
) -> None:
    """The head before its pieces, so that none is met without them."""
    store = open_store(ttl_s=100)
    kept = [*names(server, "head:"), *names(server, "piece:")]
    assert len(kept) == (1 if layout == "whole" else 5)

    def left_after(use: Callable[[], object]) -> int:
        for name in kept:
            server.call("PEXPIRE", name, 50_000)
        use()
        return min(int(server.call("PTTL", name)) for name in kept)

    assert left_after(lambda: store.get("a")) > 50_000
    assert left_after(lambda: store.put("a", [VALUE])) > 50_000
    assert left_after(lambda: store.touch("a")) > 50_000
    assert [server.call("PTTL", name) > 150_000 for name in kept] == [False] + [True] * (
        len(kept) - 1
    )
    assert left_after(lambda: (store.has("a"), list(store.entries()))) <= 50_000


def test_without_a_time_values_stay(open_store: Open, server: RedisClient, layout: str) -> None:
    """Also one that was put by somebody who gave it a time, once it is used."""
    open_store(ttl_s=50).touch("a")
    kept = [*names(server, "head:"), *names(server, "piece:")]
    assert len(kept) == (1 if layout == "whole" else 5)
    assert all(server.call("PTTL", name) > 0 for name in kept)
    open_store().get("a")
    assert all(server.call("PTTL", name) == -1 for name in kept)


# --- what the server takes ----------------------------------------------------------------------


def test_values_in_pieces_are_read(open_store: Open, server: RedisClient) -> None:
    """Written by an older version: found, listed, read, explained and deleted as any other."""
    lay_out_pieces(server)
    looking, store = open_store(read_only=True), open_store()
    for at in (looking, store):
        assert content(at, ["a", "b", "c"]) == [VALUE, b"", None]
        assert found(at, "parent", "p") == found(at, "text", "t") == ["a"]
        assert [at.has(key) for key in "abc"] == [at.touch(key) for key in "abc"]
        assert [(entry.note, entry.n_bytes) for entry in at.entries()] == [
            (NOTE, 100),
            ({"n": 7}, 0),
        ]
    assert store.put("a", [VALUE])
    assert len(names(server, "piece:")) == 4
    assert [store.delete(key) for key in "abc"] == [True, True, False]
    assert names(server) == []


@pytest.mark.parametrize("lost", range(5))
def test_a_value_that_lacks_a_piece_is_none(
    open_store: Open, server: RedisClient, lost: int
) -> None:
    """Or its head: what remains of it goes, and it can be put again."""
    lay_out_pieces(server)
    store = open_store()
    server.call("UNLINK", [*names(server, "head:a"), *names(server, "piece:")][lost])
    assert not store.has("a")
    assert store.get("a") is None
    assert store.why_absent("a") == "evicted"
    if lost > 0:
        assert names(server, "piece:") == []
    assert store.put("a", [VALUE])
    assert content(store, ["a"]) == [VALUE]


def test_putting_replaces_what_lacks_a_piece(open_store: Open, server: RedisClient) -> None:
    lay_out_pieces(server)
    store = open_store()
    server.call("UNLINK", names(server, "piece:")[2])
    assert store.put("a", [VALUE])
    assert content(store, ["a"]) == [VALUE]
    assert names(server, "piece:") == []


@pytest.mark.parametrize("bit", range(0, 240, 7))
def test_damaged_values_are_noticed(
    open_store: Open, server: RedisClient, layout: str, bit: int
) -> None:
    """Flipped, cut or longer."""
    store = open_store()

    def changed(data: bytearray) -> bytes:
        data[bit // 8 % len(data)] ^= 1 << bit % 8
        return (bytes(data), bytes(data[:-1]), bytes(data) + b"?")[bit % 3]

    if layout == "whole":
        where = ("kvcellar:head:a", "value")
        server.call("HSET", *where, changed(bytearray(server.call("HGET", *where))))
    else:
        piece = names(server, "piece:")[bit % 4]
        server.call("SET", piece, changed(bytearray(server.call("GET", piece))))
    assert open_store(read_only=True).get("a") is None
    assert len(names(server, "head:")) == 1
    assert store.get("a") is None
    assert names(server, "head:") == names(server, "piece:") == []
    assert store.put("a", [VALUE])
    assert content(store, ["a"]) == [VALUE]


@pytest.mark.parametrize("field", ["generation", "n_pieces", "n_bytes", "digest", "note", "used"])
@pytest.mark.parametrize("found", ["", "7", "-1", "9" * 30, "\udcff", "../x"])
def test_damaged_heads_raise_nothing_unnamed(
    open_store: Open, server: RedisClient, layout: str, field: str, found: str
) -> None:
    store = open_store()
    server.call("HSET", "kvcellar:head:a", field, found.encode(errors="surrogateescape"))
    assert all(entry.key == "a" for entry in store.entries())
    harmless = ("note", "used") + (("n_pieces",) if layout == "whole" else ())
    assert content(store, ["a"]) == [VALUE if field in harmless else None]
    assert all(entry.key == "a" for entry in store.entries())


def test_what_the_server_took_is_not_found(open_store: Open, server: RedisClient) -> None:
    """Whoever may write takes it out of the set."""
    store, looking = open_store(), open_store(read_only=True)
    for key in "abc":
        store.put(key, [VALUE], NOTE)
    server.call("UNLINK", "kvcellar:head:b")
    assert found(looking, "parent", "p") == ["a", "c"]
    assert server.call("SCARD", "kvcellar:by:parent:p") == 3
    assert found(store, "parent", "p") == ["a", "c"]
    assert server.call("SCARD", "kvcellar:by:parent:p") == 2


def test_a_set_that_the_server_took_is_made_anew_by_use(
    open_store: Open, server: RedisClient
) -> None:
    store = open_store()
    for key in "ab":
        store.put(key, [VALUE], NOTE)
    server.call("UNLINK", *names(server, "by:"))
    assert found(store, "parent", "p") == []
    store.touch("b")
    assert found(store, "parent", "p") == found(store, "text", "t") == ["b"]
    store.get("a")
    assert found(store, "parent", "p") == ["a", "b"]


def test_sets_go_with_what_they_hold(open_store: Open, server: RedisClient) -> None:
    """With the last value that is deleted, else 30 days after the last would have expired."""
    store = open_store(ttl_s=100)
    store.put("a", [VALUE], NOTE)
    times: list[int] = [server.call("TTL", name) for name in names(server, "by:")]
    assert len(times) == 2
    assert all(30 * 24 * 3600 < time <= 30 * 24 * 3600 + 100 for time in times)
    store.delete("a")
    assert names(server) == []


@pytest.mark.slow
def test_a_server_with_too_little_memory(start_redis: StartRedis) -> None:
    """It refuses; what was there can still be read and deleted."""
    store = RedisStore(start_redis("--maxmemory", "6mb"))
    value = value_of("a", 1 << 20)
    store.put("a", [value])
    assert "maxmemory" in refusal(StoreError, lambda: store.put("b", [bytes(16 << 20)]))
    assert (order(store), store.bytes_used, store.has("b")) == (["a"], 1 << 20, False)
    assert content(store, ["a"]) == [value]
    assert store.delete("a")
    store.close()


def test_reading_goes_on_when_memory_is_full(start_redis: StartRedis) -> None:
    url = start_redis()
    store, server = RedisStore(url), RedisClient(url)
    store.put("a", [VALUE])
    server.call("CONFIG", "SET", "maxmemory", "1kb")
    refusal(StoreError, lambda: store.put("b", [VALUE]))
    assert content(store, ["a"]) == [VALUE]
    assert store.delete("a")
    store.close()
    server.close()


def test_a_server_that_evicts(start_redis: StartRedis) -> None:
    """Anything: every value is whole or none."""
    options = ("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-random")
    store = RedisStore(start_redis(*options))
    keys, reasons = [f"k{i}" for i in range(40)], set()
    for key in keys:
        with suppress(StoreError):  # the server lacks memory for the moment
            store.put(key, [value_of(key, 1 << 19)])
    for key, value in zip(keys, content(store, keys), strict=True):
        assert value in (None, value_of(key, 1 << 19))
        reasons.add("there" if value else store.why_absent(key))
    assert {"there", "evicted"} <= reasons <= {"there", "evicted", "never stored"}
    assert store.bytes_used <= 8 << 20
    store.close()


# --- several at once ----------------------------------------------------------------------------


class Overtaken:
    """A client that lets others act, once, before commands whose text holds a word."""

    def __init__(self, client: RedisClient, word: str, act: Callable[[], object]) -> None:
        self.client, self.word, self.act = client, word, act

    def call(self, *command: Any, **options: Any) -> Any:
        self._look(str(command))
        return self.client.call(*command, **options)

    def calls(self, *commands: Any, **options: Any) -> Any:
        self._look(str(commands))
        return self.client.calls(*commands, **options)

    def _look(self, text: str) -> None:
        if self.word in text:
            self.word = "\0"
            self.act()

    def close(self) -> None:
        self.client.close()


def overtake(store: RedisStore, word: str, act: Callable[[], object]) -> None:
    store._client = Overtaken(store._client, word, act)  # type: ignore[assignment]


@pytest.mark.parametrize("word", ["EVAL", "'value', b"])
def test_two_writers_of_one_key(open_store: Open, server: RedisClient, word: str) -> None:
    """One of them counts, as a whole: they may have compressed it in different ways."""
    one, two, other = open_store(), open_store(), VALUE + b"differently"
    overtake(one, word, lambda: two.put("a", [other], NOTE))
    assert one.put("a", [VALUE], NOTE)
    assert content(one, ["a"]) == [other if word == "EVAL" else VALUE]
    assert found(one, "parent", "p") == ["a"]
    assert one.delete("a")
    assert names(server) == []


@pytest.mark.parametrize("put_again", [False, True])
@pytest.mark.parametrize("word", ["HMGET", ":3"])
def test_a_reader_is_overtaken(
    open_store: Open, server: RedisClient, word: str, put_again: bool
) -> None:
    """By one who deletes what it reads, and perhaps puts it again: whole, or none."""
    lay_out_pieces(server)
    one, two = open_store(), open_store()

    def act() -> None:
        two.delete("a")
        if put_again:
            two.put("a", [VALUE])

    overtake(one, word, act)
    assert content(one, ["a"]) == [VALUE if put_again else None]
    assert names(server, "piece:") == []
    assert two.has("a") == put_again


def test_a_writer_that_dies_is_never_seen(open_store: Open, server: RedisClient) -> None:
    store, other = open_store(), open_store()

    def die() -> None:
        store._client.close()
        raise ConnectionAbortedError

    overtake(store, "'value', b", die)
    refusal(ConnectionAbortedError, lambda: store.put("a", [VALUE]))
    assert (other.get("a"), other.has("a"), order(other)) == (None, False, [])
    assert names(server) == []
    assert other.put("a", [VALUE])
    assert content(other, ["a"]) == [VALUE]


def test_a_put_whose_answer_is_lost(
    open_store: Open, server: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent again, and meets itself."""
    store, read, lost = open_store(), redis.Connection.read_response, list[Any]()

    def lose_once(self: Any, *args: Any, **options: Any) -> Any:
        answer = read(self, *args, **options)
        if isinstance(answer, list) and not lost:  # of the transaction
            lost.append(answer)
            self.disconnect()
            raise redis.ConnectionError
        return answer

    monkeypatch.setattr(redis.Connection, "read_response", lose_once)
    assert store.put("a", [VALUE], NOTE)
    assert len(lost) == 1
    assert store.has("a")
    assert content(store, ["a"]) == [VALUE]
    assert found(store, "parent", "p") == ["a"]
    assert len(names(server)) == 4


def test_what_redis_cannot_hold_is_refused(open_store: Open, server: RedisClient) -> None:
    store, large = open_store(), np.zeros((512 << 20) + 1, np.uint8)
    message = refusal(StoreError, lambda: store.put("a", [large.data]))
    assert message == "a has 536870913 bytes: Redis takes at most 536870912 a value"
    assert names(server) == []


def test_prefixes_keep_stores_apart(open_store: Open) -> None:
    one, two = open_store(prefix="one:"), open_store(prefix="o*:")
    one.put("a", [b"1"])
    two.put("a", [b"2"])
    assert content(one, ["a"]) + content(two, ["a"]) == [b"1", b"2"]
    two.delete("a")
    assert (order(one), order(two)) == (["a"], [])


# --- reaching the server ------------------------------------------------------------------------


def test_sockets_work_too(open_store: Open, redis_url: str) -> None:
    open_store().put("a", [VALUE])
    assert content(open_store(socket_of(redis_url)), ["a"]) == [VALUE]


def test_passwords_are_not_shown(start_redis: StartRedis) -> None:
    url = start_redis("--requirepass", "hush").replace("//", "//me:wrong@")
    for work in (lambda: RedisStore(url), lambda: RedisStore("redis://me:wrong@127.0.0.1:1/0")):
        message = refusal(StoreError, work)
        assert "redis://127.0.0.1:" in message
        assert "wrong" not in message
    store = RedisStore(url.replace("me:wrong", ":hush"))
    assert store.put("a", [VALUE])
    store.close()
    assert without_secrets("unix://me:x@/run/s.sock?password=x&db=1") == "unix:///run/s.sock"
    for odd in ("redis://:hu/sh@host", "redis:/me:hush@host", "redis://:hu#sh@host"):
        assert without_secrets(odd) == "redis://..."


def test_looking_is_no_use(open_store: Open, server: RedisClient, layout: str) -> None:
    open_store(ttl_s=100).touch("a")
    looking = open_store(read_only=True)
    names_before: dict[str, int] = {
        name: server.call("PEXPIRETIME", name) for name in names(server)
    }
    before = list(looking.entries())
    assert looking.get("a") == VALUE
    assert looking.touch("a")
    assert list(looking.entries()) == before
    assert {name: server.call("PEXPIRETIME", name) for name in names(server)} == names_before
    for work in (lambda: looking.put("b", [VALUE]), lambda: looking.delete("a")):
        assert "read-only" in refusal(StoreError, work)
    assert looking.get("b") is None
    if layout == "in pieces":
        server.call("DEL", names(server, "piece")[0])
        assert looking.get("a") is None
        assert [entry.key for entry in looking.entries()] == ["a"]  # whoever may write drops it


def test_a_server_that_goes_away() -> None:
    with running_redis() as url:
        store = RedisStore(url)
        store.put("a", [VALUE])
    refusal(StoreError, lambda: store.find("parent", "p", 1))
    for work in (store.get, store.has, store.delete, store.why_absent):
        assert url in refusal(StoreError, lambda w=work: w("a"))  # type: ignore[misc]
    refusal(StoreError, lambda: store.put("b", [VALUE]))
    refusal(StoreError, lambda: list(store.entries()))
    store.close()


def test_the_longest_time_that_can_be(open_store: Open, server: RedisClient) -> None:
    store = open_store(ttl_s=MAX_AGE_S)
    store.put("a", [VALUE], NOTE)
    store.touch("a")
    assert content(store, ["a"]) == [VALUE]
    assert server.call("TTL", "kvcellar:head:a") > MAX_AGE_S - 100


def test_bad_arguments_are_refused(redis_url: str) -> None:
    for ttl in (0, 0.0001, -1, MAX_AGE_S + 1, 1e300, float("inf"), float("nan")):
        message = refusal(OptionError, lambda t=ttl: RedisStore(redis_url, ttl_s=t))  # type: ignore[misc]
        assert message == f"ttl_s={ttl}: must be a number in [0.001, 3153600000]"
    for url in ("http://x", "redis://[", "redis://host:port"):
        refusal(OptionError, lambda u=url: RedisStore(u))  # type: ignore[misc]


@pytest.mark.parametrize(
    "option",
    [
        "decode_responses=True",
        "decode_responses=False",
        "encoding=utf-16",
        "encoding_errors=ignore",
        "protocol=3",
        "retry=3",
        "parser_class=x",
        "foo=bar",
        "ssl_cert_reqs=none",
    ],
)
def test_options_that_change_what_is_read_are_refused(redis_url: str, option: str) -> None:
    name = option.partition("=")[0]
    message = refusal(OptionError, lambda: RedisStore(f"{redis_url}?db=0&{option}"))
    assert message.startswith(f"option '{name}' in the URL of the store at {redis_url}: leave it")
    assert "socket_timeout" in message


def test_options_that_are_possible(open_store: Open, redis_url: str) -> None:
    options = (
        "db=0&socket_timeout=9&socket_connect_timeout=2&socket_keepalive=yes&client_name=me"
        "&health_check_interval=30&max_connections=4&retry_on_timeout=True"
    )
    store = open_store(f"{redis_url}?{options}")
    store.put("a", [VALUE])
    assert content(store, ["a"]) == [VALUE]


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:1/0?max_connections=-1",
        "redis://127.0.0.1:1/0?db=x",
        "redis://127.0..1:1/0",
    ],
)
def test_urls_that_no_server_can_have(url: str) -> None:
    message = refusal(OptionError, lambda: RedisStore(url))
    assert f"the URL of the store at {url.partition('?')[0]} cannot be used: " in message


def test_what_may_be_a_password_is_no_name_of_an_option() -> None:
    message = refusal(OptionError, lambda: RedisStore("redis://:hu?sh=x@127.0.0.1:1/0"))
    assert message == (
        "the URL of the store at redis://... cannot be used: characters such as / # ? @ in a "
        "password are written as %2F %23 %3F %40"
    )


def test_tls_has_options_of_its_own() -> None:
    url = "rediss://127.0.0.1:1/0?ssl_cert_reqs=none&ssl_check_hostname=no&ssl_ca_certs=x"
    assert "rediss://127.0.0.1:1/0" in refusal(StoreError, lambda: RedisStore(url))
    assert "ssl_cert_reqs" in refusal(OptionError, lambda: RedisStore(f"{url}&encoding=x"))


def test_without_the_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    message = refusal(StoreError, lambda: RedisStore("redis://localhost"))
    assert 'pip install "kvcellar[redis]"' in message
