"""A store in Redis: time to live, pieces that the server takes, writers that meet or die."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis

from kvcellar.errors import OptionError, StoreError
from kvcellar.stores.base import MAX_AGE_S, Note
from kvcellar.stores.redis import RedisClient, RedisStore, without_secrets
from kvcellar.testing.store_use import content, found, order, refusal, value_of
from tests.stores.conftest import StartRedis, running_redis, socket_of

VALUE = value_of("a", 100)
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
    """Opens stores on it, in pieces of 30 bytes; all are closed at the end."""
    opened: list[RedisStore] = []

    def open_(url: str = redis_url, **options: Any) -> RedisStore:
        opened.append(RedisStore(url, **{"piece_bytes": 30, **options}))
        return opened[-1]

    assert server.call("DBSIZE") == 0
    yield open_
    for store in opened:
        store.close()


def names(server: RedisClient, kind: str = "*") -> list[str]:
    return sorted(name.decode() for name in server.call("KEYS", f"kvcellar:{kind}*"))


# --- time to live -------------------------------------------------------------------------------


def test_what_nobody_uses_expires(open_store: Open, server: RedisClient) -> None:
    """With all its pieces, which go after the head."""
    store = open_store(ttl_s=0.05)
    store.put("a", [VALUE])
    open_store(ttl_s=100).put("b", [VALUE])
    time.sleep(0.1)
    assert (store.get("a"), store.has("a"), order(store)) == (None, False, ["b"])
    assert store.bytes_used == 100
    assert [store.why_absent(key) for key in "ac"] == ["expired", "never stored"]
    assert all(0 < server.call("PTTL", name) <= 60_050 for name in names(server, "piece:a"))
    assert open_store(ttl_s=100).put("a", [VALUE])
    assert content(store, ["b"]) == [VALUE]


def test_use_renews_and_looking_does_not(open_store: Open, server: RedisClient) -> None:
    store = open_store(ttl_s=100)
    store.put("a", [VALUE])
    kept = [*names(server, "head:"), *names(server, "piece:")]

    def left_after(use: Callable[[], object]) -> int:
        for name in kept:
            server.call("PEXPIRE", name, 50_000)
        use()
        return min(int(server.call("PTTL", name)) for name in kept)

    assert left_after(lambda: store.get("a")) > 50_000
    assert left_after(lambda: store.put("a", [VALUE])) > 50_000
    assert left_after(lambda: (store.has("a"), list(store.entries()))) <= 50_000


def test_without_a_time_values_stay(open_store: Open, server: RedisClient) -> None:
    """Also one that was put by somebody who gave it a time, once it is used."""
    open_store(ttl_s=50).put("a", [VALUE])
    kept = [*names(server, "head:"), *names(server, "piece:")]
    assert len(kept) == 5
    assert all(server.call("PTTL", name) > 0 for name in kept)
    open_store().get("a")
    assert all(server.call("PTTL", name) == -1 for name in kept)


# --- what the server takes ----------------------------------------------------------------------


@pytest.mark.parametrize("lost", range(5))
def test_a_value_that_lacks_anything_is_none(
    open_store: Open, server: RedisClient, lost: int
) -> None:
    """Its head or a piece: what remains of it goes, and it can be put again."""
    store = open_store()
    store.put("a", [VALUE])
    found = [*names(server, "head:"), *names(server, "piece:")]
    server.call("UNLINK", found[lost])
    assert not store.has("a")
    assert store.get("a") is None
    assert store.why_absent("a") == "evicted"
    if lost > 0:
        assert names(server, "piece:") == []
    assert store.put("a", [VALUE])
    assert content(store, ["a"]) == [VALUE]


def test_putting_replaces_what_lacks_a_piece(open_store: Open, server: RedisClient) -> None:
    store = open_store()
    store.put("a", [VALUE])
    server.call("UNLINK", names(server, "piece:")[2])
    assert store.put("a", [VALUE])
    assert content(store, ["a"]) == [VALUE]
    assert len(names(server, "piece:")) == 4


@pytest.mark.parametrize("bit", range(0, 240, 7))
def test_damaged_pieces_are_noticed(open_store: Open, server: RedisClient, bit: int) -> None:
    """Flipped, cut or longer."""
    store = open_store()
    store.put("a", [VALUE])
    piece = names(server, "piece:")[bit % 4]
    data = bytearray(server.call("GET", piece))
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    changed = (bytes(data), bytes(data[:-1]), bytes(data) + b"?")[bit % 3]
    server.call("SET", piece, changed)
    assert store.get("a") is None
    assert names(server, "head:") == names(server, "piece:") == []


@pytest.mark.parametrize("field", ["generation", "n_pieces", "n_bytes", "digest", "note"])
@pytest.mark.parametrize("found", ["", "7", "-1", "9" * 30, "\udcff", "../x"])
def test_damaged_heads_raise_nothing_unnamed(
    open_store: Open, server: RedisClient, field: str, found: str
) -> None:
    store = open_store()
    store.put("a", [VALUE])
    server.call("HSET", "kvcellar:head:a", field, found.encode(errors="surrogateescape"))
    assert content(store, ["a"]) == [VALUE if field == "note" else None]
    assert all(entry.key == "a" for entry in store.entries())


NOTE: Note = {"parent": "p", "text": "t"}


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
    times = [server.call("TTL", name) for name in names(server, "by:")]
    assert len(times) == 2
    assert all(30 * 24 * 3600 < time <= 30 * 24 * 3600 + 100 for time in times)
    store.delete("a")
    assert names(server) == []


def test_a_server_with_too_little_memory(start_redis: StartRedis) -> None:
    """It refuses; what was there can still be read and deleted."""
    store = RedisStore(start_redis("--maxmemory", "6mb"), piece_bytes=1 << 18)
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
    """Single pieces, of anything: every value is whole or none."""
    options = ("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-random")
    store = RedisStore(start_redis(*options), piece_bytes=1 << 17)
    keys, reasons = [f"k{i}" for i in range(40)], set()
    for key in keys:
        with suppress(StoreError):  # a piece was taken before the last was there
            store.put(key, [value_of(key, 1 << 19)])
    for key, value in zip(keys, content(store, keys), strict=True):
        assert value in (None, value_of(key, 1 << 19))
        reasons.add("there" if value else store.why_absent(key))
    assert {"there", "evicted"} <= reasons <= {"there", "evicted", "never stored"}
    assert store.bytes_used <= 8 << 20
    store.close()


# --- several at once ----------------------------------------------------------------------------


class Overtaken:
    """A client that lets others act, once, before a command whose text holds a word."""

    def __init__(self, client: RedisClient, word: str, act: Callable[[], object]) -> None:
        self.client, self.word, self.act = client, word, act

    def call(self, *command: Any) -> Any:
        if self.word in str(command):
            self.word = "\0"
            self.act()
        return self.client.call(*command)

    def close(self) -> None:
        self.client.close()


def overtake(store: RedisStore, word: str, act: Callable[[], object]) -> None:
    store._client = Overtaken(store._client, word, act)  # type: ignore[assignment]


@pytest.mark.parametrize("word", ["SET", ":2", "entered"])
def test_two_writers_of_one_key(open_store: Open, server: RedisClient, word: str) -> None:
    """One of them counts, and no piece of the other is left."""
    one, two = open_store(), open_store()
    overtake(one, word, lambda: two.put("a", [VALUE]))
    assert one.put("a", [VALUE])
    assert content(one, ["a"]) == [VALUE]
    assert len(names(server, "piece:")) == 4


@pytest.mark.parametrize("put_again", [False, True])
@pytest.mark.parametrize("piece", range(4))
def test_a_reader_is_overtaken(
    open_store: Open, server: RedisClient, piece: int, put_again: bool
) -> None:
    """By one who deletes what it reads, and perhaps puts it again: whole, or none."""
    one, two = open_store(), open_store()
    one.put("a", [VALUE])

    def act() -> None:
        two.delete("a")
        if put_again:
            two.put("a", [VALUE])

    overtake(one, f":{piece}", act)
    assert content(one, ["a"]) == [VALUE if put_again else None]
    assert len(names(server, "piece:")) == 4 * put_again


@pytest.mark.parametrize("word", [":0", ":3", "entered"])
def test_a_writer_that_dies_is_never_seen(open_store: Open, server: RedisClient, word: str) -> None:
    """Its pieces vanish by themselves."""
    store, other = open_store(), open_store()

    def die() -> None:
        store._client.close()
        raise ConnectionAbortedError

    overtake(store, word, die)
    refusal(ConnectionAbortedError, lambda: store.put("a", [VALUE]))
    assert (other.get("a"), other.has("a"), order(other)) == (None, False, [])
    assert all(0 < server.call("TTL", name) <= 600 for name in names(server))
    assert other.put("a", [VALUE])
    assert content(other, ["a"]) == [VALUE]


def test_a_put_whose_answer_is_lost(
    open_store: Open, server: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent again, and meets itself."""
    store, read, lost = open_store(), redis.Connection.read_response, list[Any]()

    def lose_once(self: Any, *args: Any, **options: Any) -> Any:
        answer = read(self, *args, **options)
        if answer == b"entered" and not lost:
            lost.append(answer)
            self.disconnect()
            raise redis.ConnectionError
        return answer

    monkeypatch.setattr(redis.Connection, "read_response", lose_once)
    assert store.put("a", [VALUE])
    assert lost == [b"entered"]
    assert store.has("a")
    assert content(store, ["a"]) == [VALUE]
    assert len(names(server, "piece:")) == 4


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


def test_looking_is_no_use(open_store: Open, server: RedisClient) -> None:
    open_store(ttl_s=100).put("a", [VALUE])
    looking = open_store(read_only=True)
    names_before = {name: server.call("PEXPIRETIME", name) for name in names(server)}
    before = list(looking.entries())
    assert looking.get("a") == VALUE
    assert looking.touch("a")
    assert list(looking.entries()) == before
    assert {name: server.call("PEXPIRETIME", name) for name in names(server)} == names_before
    for work in (lambda: looking.put("b", [VALUE]), lambda: looking.delete("a")):
        assert "read-only" in refusal(StoreError, work)
    server.call("DEL", names(server, "piece")[0])
    assert looking.get("a") is None
    assert [entry.key for entry in looking.entries()] == ["a"]  # whoever may write drops it
    assert looking.get("b") is None


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
        assert message == f"ttl_s {ttl}: give seconds, from 0.001 to 3153600000, or None"
    assert "piece_bytes 0" in refusal(OptionError, lambda: RedisStore(redis_url, piece_bytes=0))
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
        "redis://127.0..1:1/0",  # these two are seen when it connects
        "unix:///absent?socket_keepalive=yes",
    ],
)
def test_urls_that_no_server_can_have(url: str) -> None:
    message = refusal(OptionError, lambda: RedisStore(url))
    assert f"the URL of the store at {url.partition('?')[0]} cannot be used: " in message


def test_what_may_be_a_password_is_no_name_of_an_option() -> None:
    message = refusal(OptionError, lambda: RedisStore("redis://:hu?sh=x@127.0.0.1:1/0"))
    assert "'" not in message
    assert message.startswith("an option in the URL of the store at redis://...: ")


def test_tls_has_options_of_its_own() -> None:
    url = "rediss://127.0.0.1:1/0?ssl_cert_reqs=none&ssl_check_hostname=no&ssl_ca_certs=x"
    assert "rediss://127.0.0.1:1/0" in refusal(StoreError, lambda: RedisStore(url))
    assert "ssl_cert_reqs" in refusal(OptionError, lambda: RedisStore(f"{url}&encoding=x"))


def test_without_the_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    message = refusal(StoreError, lambda: RedisStore("redis://localhost"))
    assert 'pip install "kvcellar[redis]"' in message
