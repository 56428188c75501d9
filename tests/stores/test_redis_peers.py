"""A store whose server speaks garbage, refuses, or cannot be: a named error, soon, and no more."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import pytest
import redis
from hypothesis import example, given
from hypothesis import strategies as st

from kvcellar.errors import ClosedError, KVCellarError, OptionError, StoreError
from kvcellar.stores import redis as redis_store
from kvcellar.stores.opening import open_store
from kvcellar.stores.redis import RedisStore
from kvcellar.stores.redis_client import MOST_BYTES, RedisClient
from kvcellar.testing.store_use import content, order, refusal, value_of
from tests.stores.fake_redis import GARBAGE, WRONG_TYPES, Proxy, serving, when_asked

VERBS: dict[str, Callable[[RedisStore], object]] = {
    "put": lambda store: store.put("b", [b"value"], {"parent": "p"}),
    "get": lambda store: store.get("a"),
    "has": lambda store: store.has("a"),
    "touch": lambda store: store.touch("a"),
    "touch_all": lambda store: store.touch_all(["a", "b"]),
    "why_absent": lambda store: store.why_absent("a"),
    "delete": lambda store: store.delete("a"),
    "entries": lambda store: list(store.entries()),
    "find": lambda store: store.find("parent", "p", 9),
    "bytes_used": lambda store: store.bytes_used,
}
WORST_S = 5.0
"""Seconds that a refusal may take on a slow machine; answers are waited for 0.2 s."""


@contextmanager
def bounded() -> Iterator[None]:
    """Neither long, nor with much memory."""
    tracemalloc.start()
    start = time.monotonic()
    try:
        yield
        assert time.monotonic() - start < WORST_S
        assert tracemalloc.get_traced_memory()[1] < 6 * MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.fixture
def proxy(redis_url: str) -> Iterator[tuple[Proxy, RedisStore]]:
    """A store that has "a", and what stands between it and its server."""
    made = Proxy(redis_url)
    with serving(made) as url:
        store = RedisStore(url, prefix="peers:")
        for key in ("a", "b"):
            store.delete(key)
        store.put("a", [value_of("a", 500)], {"parent": "p"})
        yield made, store
        store.close()


@pytest.mark.parametrize("what", GARBAGE | WRONG_TYPES)
def test_what_is_no_server_is_refused_at_opening(what: str) -> None:
    with serving(when_asked((GARBAGE | WRONG_TYPES)[what])) as url, bounded():
        message = refusal(StoreError, lambda: RedisStore(url))
        assert message.startswith(f"the store at {url.partition('?')[0]}: ")
        assert len(message) < 600
        assert message.isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("what", GARBAGE)
def test_a_server_that_begins_to_speak_garbage(proxy: tuple[Proxy, RedisStore], what: str) -> None:
    """Every verb says so; when it speaks again, the store works as before."""
    made, store = proxy
    for verb in VERBS.values():
        made.misbehave = GARBAGE[what]
        with bounded():
            refusal(StoreError, lambda verb=verb: verb(store))  # type: ignore[misc]
        made.misbehave = None
        assert content(store, ["a"]) == [value_of("a", 500)]
    assert order(store) == ["a"]


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG_TYPES)
def test_answers_of_other_types(
    proxy: tuple[Proxy, RedisStore], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Are errors, or what a server without values might answer."""
    monkeypatch.setattr(redis_store, "_ROUNDS", 30)
    made, store = proxy
    for name, verb in VERBS.items():
        made.misbehave = WRONG_TYPES[what]
        with bounded():
            try:
                answer = verb(store)
            except StoreError:
                answer = None
        assert answer in (None, False, [], "never stored", 0), name
        made.misbehave = None
        assert content(store, ["a"]) == [value_of("a", 500)]


def test_the_largest_value_is_no_excuse(proxy: tuple[Proxy, RedisStore]) -> None:
    """A value may have 512 MB, another answer may not."""
    made, store = proxy
    made.misbehave = GARBAGE["a huge length, and zeros"]
    with bounded():
        message = refusal(StoreError, lambda: store.has("a"))
    assert f"an answer of more than {MOST_BYTES} bytes" in message


REFUSALS = {
    "NOAUTH Authentication required.": "it wants a password: redis://USER:PASSWORD@HOST",
    "WRONGPASS invalid username-password pair": "redis://USER:PASSWORD@HOST",
    "NOPERM this user has no permissions": "its user may not do this",
    "LOADING Redis is loading the dataset in memory": "it is still loading its data",
    "OOM command not allowed when used memory > 'maxmemory'.": "its maxmemory is used up",
    "READONLY You can't write against a read only replica.": "name its primary",
    "MISCONF Redis is configured to save RDB snapshots": "it cannot save its data",
    "MASTERDOWN Link with MASTER is down": "has lost its primary",
    "MOVED 1234 127.0.0.1:7001": "one of a cluster, which is not supported",
    "MOVED": "",
    "MOVED x y z": "",
    "ASK 1234 127.0.0.1:7001": "one of a cluster, which is not supported",
    "CLUSTERDOWN The cluster is down": "one of a cluster, which is not supported",
    "CROSSSLOT Keys in request don't hash to the same slot": "one of a cluster",
    "TRYAGAIN Multiple keys request during rehashing of slot": "one of a cluster",
    "ERR max number of clients reached": "max number of clients reached",
    "ERR unknown command 'EVAL'": "unknown command 'EVAL'",
    "ERR Error running script: WRONGTYPE Operation against a key": "use another prefix",
    "": "",
    "\x1b[31mred \xff": "[31mred",
    "X" * 5000: "XXX",
}


@pytest.mark.parametrize("refused", REFUSALS, ids=lambda text: text[:12])
def test_a_server_that_refuses_says_why(proxy: tuple[Proxy, RedisStore], refused: str) -> None:
    """At opening and later; what helps is said as far as it is known."""
    reply = b"-" + refused.encode("latin-1") + b"\r\n"
    made, store = proxy
    made.reply = reply
    url = store._client._url
    works: list[Callable[[], object]] = [partial(verb, store) for verb in VERBS.values()]
    for work in (*works, lambda: RedisStore(url)):
        message = refusal(StoreError, work)
        assert REFUSALS[refused] in message
        assert len(message) < 600
        assert message.isprintable()
    made.reply = b""
    assert content(store, ["a"]) == [value_of("a", 500)]


def test_names_that_others_use(redis_url: str) -> None:
    client = RedisClient(redis_url)
    client.call("SET", "taken:head:a", "text")
    store = RedisStore(redis_url, prefix="taken:")
    for verb in ("get", "has", "touch", "delete", "entries"):
        message = refusal(StoreError, lambda verb=verb: VERBS[verb](store))  # type: ignore[misc]
        assert "others keep something under the same names: use another prefix" in message
    client.call("DEL", "taken:head:a")
    client.close()
    store.close()


@pytest.mark.parametrize("verb", ["get", "touch", "has"])
def test_no_command_gets_the_answer_to_another(
    proxy: tuple[Proxy, RedisStore], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """It is interrupted when it is sent, and its answer comes when the next one has been sent."""
    made, store = proxy
    store.put("b", [b"b"])
    read, made.pause_s = redis.Connection.read_response, 0.05

    def interrupted(*_: Any, **__: Any) -> NoReturn:
        monkeypatch.setattr(redis.Connection, "read_response", read)
        raise KeyboardInterrupt

    for _ in range(3):
        monkeypatch.setattr(redis.Connection, "read_response", interrupted)
        refusal(KeyboardInterrupt, lambda: VERBS[verb](store))  # type: ignore[arg-type]
        assert content(store, ["b", "absent", "a"]) == [b"b", None, value_of("a", 500)]


def test_a_closed_store_has_no_connections(proxy: tuple[Proxy, RedisStore]) -> None:
    _, store = proxy
    store.close()
    store.close()
    assert store._client._free == []
    refusal(ClosedError, lambda: store.get("a"))


# --- URLs ---------------------------------------------------------------------------------------

MALFORMED = {
    "redis://host/abc": "the database 'abc' is no number",
    "redis://host/0/1": "the database '0/1' is no number",
    "redis://host/-1": "the database '-1' is no number",
    "redis://host/1e3": "is no number",
    "redis://host/%30": "is no number",
    "redis://host/99999999999": "is no number",
    "redis://host:0/0": "port 0",
    "redis://host:99999/0": "range",
    "redis://host:port/0": "port",
    "redis://host:-1/0": "Port",
    "redis://:6379/0": "name a host",
    "redis://ho st/0": "no host has the name 'ho st'",
    "redis://ho..st/0": "",
    "redis://-/0#x": "write # as %23",
    "redis://[::1/0": "is none",
    "redis://[zz]/0": "",
    "redis://host,other/0": "no host",
    "redis://host/0?db": "",
    "redis://host/0?db=-1": "option db=-1: give a number from 0",
    "redis://host/0?db=1&db=2": "option db stands there twice",
    "redis://host/0?socket_timeout=nan": "socket_timeout=nan",
    "redis://host/0?socket_timeout=inf": "socket_timeout=inf",
    "redis://host/0?socket_timeout=0": "socket_timeout=0",
    "redis://host/0?socket_timeout=": "socket_timeout=:",
    "redis:host/0": "two slashes",
    "redis:/host/0": "two slashes",
    "redis://host/0%00": "",
    "redis://host\n/0": "characters that cannot be printed",
    "redis://host%0a/0": "characters that cannot be printed",
    "redis://\ud800/0": "is none",
    "unix://": "name the socket",
    "unix:///": "name the socket",
    "unix://run/redis.sock": "three slashes",
    "unix:///run/me@x": "",
    "unix:///run/x%00": "characters that cannot be printed",
    "http://host/0": "scheme 'http'",
    "//host/0": "scheme ''",
    "": "scheme ''",
}


@pytest.mark.parametrize("url", MALFORMED)
def test_malformed_urls_are_refused(url: str) -> None:
    assert MALFORMED[url] in refusal(OptionError, lambda: RedisStore(url))


@pytest.mark.parametrize("url", [None, 5, b"redis://host/0", ["redis://host"]])
def test_what_is_no_text_is_no_url(url: Any) -> None:
    assert "is none" in refusal(OptionError, lambda: RedisStore(url))


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://host",
        "REDIS://host/",
        "redis://user:p%40ss@host:6379/15?db=3",
        "redis://[::1]:6379/0",
        "redis://[fe80::1%25eth0]/0",
        "redis://bücher.example/0",
        "redis://a_b.example./0",
        "rediss://host/0?ssl_cert_reqs=none",
        "unix:///run/redis/redis.sock?db=2",
        "unix://user:pass@/run/my%20socket",
    ],
)
@pytest.mark.usefixtures("unreachable")
def test_sound_urls_are_connected_to(url: str) -> None:
    assert "nobody there" in refusal(StoreError, lambda: open_store(url))


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is connected to."""
    for kind in (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection):
        monkeypatch.setattr(kind, "_connect", _nobody)


def _nobody(_: object) -> None:
    raise OSError("nobody there")


URLS = st.builds(
    "{}{}{}".format,
    st.sampled_from(
        ["redis://", "rediss://", "unix://", "redis:", "redis", "REDIS://", "unix:///"]
    ),
    st.sampled_from(["", "me:hunter2@", "host", "host:1", "[::1]", "127.0.0.1:65535/", "@", "?"]),
    st.text(st.one_of(st.sampled_from("/:@?#[]%&=.0123456789-ab "), st.characters()), max_size=20),
)


@given(url=URLS)
@example(url="redis://me:hunter2@host/abc")
@example(url="redis://me:hunter2@host:x/0")
@example(url="redis://me:hunter2@/?db=x")
@example(url="redis://me:hunter2@[")
@example(url="redis://me:hunter2/@host")
def test_any_url_is_connected_to_or_refused(url: str) -> None:
    """With an error of ours, which does not tell the password."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection):
            patch.setattr(kind, "_connect", _nobody)
        with pytest.raises(KVCellarError) as raised:
            RedisStore(url)
    assert isinstance(raised.value, (OptionError, StoreError))
    assert "hunter2" not in str(raised.value)
