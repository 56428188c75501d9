"""Commands to a Redis server, or to whatever answers at its address.

1. A URL is checked as a whole before anything is connected to.
2. Whatever goes wrong is a :class:`StoreError` that names the server, without its password: it
   cannot be reached, answers with an error, or speaks another protocol.
3. Answers end: one may take the time of ``socket_timeout`` and a second more for each megabyte that
   has come, and have so many bytes as the caller allows.
4. A connection is used again only if the last answer on it was read to its end. So no command gets
   the answer to another one, wherever a thread was interrupted.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from time import monotonic
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvcellar.errors import ClosedError, OptionError, StoreError

T = TypeVar("T")

CONNECT_S, ANSWER_S = 5.0, 20.0
"""Seconds in which a server has to accept, and to answer; the URL may name others."""

MOST_BYTES = 16 << 20
"""Bytes of an answer that holds no values."""

_BYTES_A_SECOND = 1 << 20
_READ_BYTES = 1 << 20


def anything(answer: Any) -> Any:  # any answer will do
    """Return the answer."""
    return answer


class RedisClient:
    """Sends commands; safe for threads.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, as the package takes it; options that
            change how answers are read are refused.

    Raises:
        OptionError: no such URL can be.
        StoreError: the package is not installed, or no Redis server answers.
    """

    def __init__(self, url: str) -> None:
        self._shown = without_secrets(url)
        self._redis = _package(self._shown)
        self._url, self._wait_s = _checked(url, self._shown)
        self._free: list[_Peer] = []
        self._closed = False
        try:
            self.call("PING", shape=_pong)
        except BaseException:
            self.close()
            raise

    def call(
        self, *command: Any, shape: Callable[[Any], T] = anything, most: int = MOST_BYTES
    ) -> T:
        """What the server answers to a command.

        Args:
            command: its name and arguments.
            shape: converts an answer; whatever it raises means that it is none of Redis.
            most: bytes that the answer may have.

        Raises:
            StoreError: there was no such answer.
        """
        return self._ask(lambda client: shape(client.execute_command(*command)), most)

    def calls(
        self,
        *commands: Sequence[Any],
        atomic: bool = False,
        shape: Callable[[list[Any]], T] = anything,
        most: int = MOST_BYTES,
    ) -> T:
        """What the server answers to commands that are sent together; atomic: all or none is done.

        They are sent again if the answer is lost, so each must do no harm twice.
        """

        def work(client: Any) -> T:
            with client.pipeline(transaction=atomic) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers = list(pipeline.execute())
            if len(answers) != len(commands):
                raise ValueError(f"{len(answers)} answers to {len(commands)} commands")
            return shape(answers)

        return self._ask(work, most)

    def close(self) -> None:
        """Close the connections; twice is fine."""
        self._closed = True
        while self._free:
            with suppress(IndexError):  # another thread took it
                self._free.pop().close()

    def _ask(self, work: Callable[[Any], T], most: int) -> T:
        if self._closed:
            raise ClosedError(f"the store at {self._shown} was closed: open it again")
        peer, is_clean = None, False
        try:
            peer = self._peer()
            peer.limit.begin(most)
            answer = work(peer.client)
            is_clean = True
        except self._redis.ResponseError as error:
            is_clean = True
            raise self._error(error) from error
        except Exception as error:
            raise self._error(error) from error
        finally:
            if peer is not None and is_clean and not self._closed:
                self._free.append(peer)
            elif peer is not None:
                peer.close()
        return answer

    def _peer(self) -> _Peer:
        with suppress(IndexError):
            return self._free.pop()
        return _Peer(self._redis, self._url, self._wait_s)

    def _error(self, error: Exception) -> StoreError:
        return StoreError(f"the store at {self._shown}: {_said(self._redis, error)}")


class _Peer:
    """A client of the package with a connection of its own, and the limit of what it reads."""

    def __init__(self, redis: ModuleType, url: str, wait_s: float) -> None:
        self.limit = _Limit(wait_s)
        kind = getattr(redis, _CONNECTIONS[url.partition(":")[0]])
        retry = import_module("redis.retry").Retry
        self.client = redis.Redis.from_url(
            url,
            connection_class=_watching(kind, self.limit),
            protocol=2,
            retry=retry(import_module("redis.backoff").NoBackoff(), 1, (redis.ConnectionError,)),
            retry_on_error=[redis.ConnectionError],
            socket_connect_timeout=CONNECT_S,
            socket_timeout=ANSWER_S,
            socket_read_size=_READ_BYTES,
        )

    def close(self) -> None:
        """Close the connection."""
        self.client.close()


# -- answers that end

_MAX_LINE = 1 << 16
_MAX_ITEMS = 1 << 20
_MAX_DEPTH = 8
_LENGTH = re.compile(rb"-1|[0-9]{1,18}")


class NoRedis(Exception):
    """What came is no answer of a Redis server; the client handles it."""


class _Limit:
    """How long an answer may take, how many bytes it may have, and how it has to look.

    The package reads whatever a length says, and searches a line again with each part that comes.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self.begin(0)

    def begin(self, most: int) -> None:
        """Begin with a command."""
        self._n_bytes, self._most = 0, most
        self.start()

    def start(self) -> None:
        """Begin with an answer: connecting has a time of its own."""
        self._start = monotonic()
        self._line, self._n_left, self._depth = b"", 0, 0

    def left_s(self) -> float:
        """Seconds in which the next bytes have to come.

        Raises:
            TimeoutError: none are left.
        """
        end = self._start + self._wait_s + self._n_bytes / _BYTES_A_SECOND
        left = min(end - monotonic(), self._wait_s)
        if left <= 0:
            raise TimeoutError(
                f"the answer is not complete after {monotonic() - self._start:.0f} s"
            )
        return left

    def check(self, data: bytes | memoryview) -> None:
        """Check bytes that came.

        Raises:
            NoRedis: they are too many, or nothing that Redis sends.
        """
        self._n_bytes += len(data)
        if self._n_bytes > self._most:
            raise NoRedis(f"an answer of more than {self._most} bytes")
        data, at = bytes(data), 0
        while at < len(data):
            if self._n_left:
                step = min(self._n_left, len(data) - at)
                self._n_left -= step
                at += step
                continue
            end = data.find(b"\n", at) + 1 or len(data)
            self._line += data[at : min(end, at + _MAX_LINE)]
            at = end
            if self._line.endswith(b"\n"):
                self._n_left, self._line = self._length(self._line), b""
            elif len(self._line) >= _MAX_LINE:
                raise NoRedis(f"a line of more than {_MAX_LINE} bytes")

    def _length(self, line: bytes) -> int:
        """The bytes of the string that a line announces, with the line's end behind it."""
        kind, said = line[:1], line[1:-2]
        is_length = kind in (b"$", b"*")
        if not line.endswith(b"\r\n") or kind not in (b"+", b"-", b":", b"$", b"*"):
            raise NoRedis(f"it says {line!r:.60}")
        if is_length and not _LENGTH.fullmatch(said):
            raise NoRedis(f"it says {line!r:.60}")
        self._depth = self._depth + 1 if kind == b"*" and said not in (b"0", b"-1") else 0
        if self._depth > _MAX_DEPTH:
            raise NoRedis("it sends lists in lists in lists")
        if is_length and int(said) > (self._most if kind == b"$" else _MAX_ITEMS):
            raise NoRedis(f"an answer of more than {self._most} bytes: {line!r:.60}")
        return int(said) + 2 if kind == b"$" and said != b"-1" else 0


class _WatchedSocket:
    """A socket that reads within a limit; all else it does as it did."""

    def __init__(self, socket: Any, limit: _Limit) -> None:
        self._socket, self._limit = socket, limit

    def recv(self, *args: Any) -> bytes:
        self._wait()
        data: bytes = self._socket.recv(*args)
        self._limit.check(data)
        return data

    def recv_into(self, buffer: Any, *args: Any) -> int:
        self._wait()
        n_bytes: int = self._socket.recv_into(buffer, *args)
        self._limit.check(memoryview(buffer)[:n_bytes])
        return n_bytes

    def _wait(self) -> None:
        if self._socket.gettimeout() != 0:  # else it only looks whether something has come
            self._socket.settimeout(self._limit.left_s())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def _watching(kind: Any, limit: _Limit) -> Any:
    """A class of the package's connections whose sockets read within a limit."""

    class Watching(kind):  # type: ignore[misc]  # the package is imported when it is needed
        def _connect(self) -> _WatchedSocket:
            socket = super()._connect()
            limit.start()
            return _WatchedSocket(socket, limit)

    return Watching


# -- errors in words

_REMEDIES = {
    "NOAUTH": "it wants a password: redis://USER:PASSWORD@HOST",
    "WRONGPASS": "check the user and the password in the URL: redis://USER:PASSWORD@HOST",
    "NOPERM": "its user may not do this: have it allowed",
    "LOADING": "it is still loading its data: try again later",
    "OOM": "its maxmemory is used up: raise it, or set maxmemory-policy allkeys-lru",
    "READONLY": "it is a replica: name its primary, or open the store with read_only=True",
    "MISCONF": "it cannot save its data, so it takes no more: look at its disk",
    "MASTERDOWN": "it is a replica that has lost its primary: name another server",
    "MOVED": "it is one of a cluster, which is not supported: name a server of its own",
    "WRONGTYPE": "others keep something under the same names: use another prefix",
}
_SAME = dict.fromkeys(("ASK", "CLUSTERDOWN", "CROSSSLOT", "TRYAGAIN"), "MOVED")
_CODES = re.compile(rf"\b({'|'.join((*_REMEDIES, *_SAME))})\b")
_CLASSES = {
    "NoPermissionError": "NOPERM",
    "AuthenticationError": "NOAUTH",
    "BusyLoadingError": "LOADING",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "MasterDownError": "MASTERDOWN",
    "ClusterError": "MOVED",
    "AskError": "MOVED",
    "TryAgainError": "MOVED",
    "ClusterDownError": "MOVED",
    "ClusterCrossSlotError": "MOVED",
}
"""Errors of the package that no longer have their code in the text."""

_ANNOTATED = " of pipeline caused error: "
_UNASKED = ("Connection has data", "Connection not ready")
"""What the package says when something came that nobody asked for."""


def _said(redis: ModuleType, error: Exception) -> str:
    """Say what went wrong, and what helps if that is known; bounded, whatever the server said."""
    said = str(error).rpartition(_ANNOTATED)[2] or type(error).__name__
    text = "".join(c if c.isprintable() else " " for c in said[:300])
    is_of_redis = isinstance(error, (redis.RedisError, OSError))
    is_odd = isinstance(error, (NoRedis, redis.InvalidResponse)) or text in _UNASKED
    if is_odd or not is_of_redis:
        return f"what answers there is no Redis server ({text})"
    if isinstance(error, redis.TimeoutError):
        return f"there was no answer in time ({text}): is it a Redis server, and reached quickly?"
    found = _CODES.search(text)
    names = [kind.__name__ for kind in type(error).__mro__]
    code = found[1] if found else next((_CLASSES[name] for name in names if name in _CLASSES), "")
    remedy = _REMEDIES.get(_SAME.get(code, code))
    return f"{text.rstrip('. ')}: {remedy}" if remedy else text


def _pong(answer: Any) -> None:
    if answer not in (True, b"PONG", "PONG"):
        raise ValueError(f"PING is answered with {answer!r:.50}")


# -- URLs

_CONNECTIONS = {
    "redis": "Connection",
    "rediss": "SSLConnection",
    "unix": "UnixDomainSocketConnection",
}
_NUMBERS: dict[str, Callable[[str], float]] = {
    "db": int,
    "health_check_interval": int,
    "max_connections": int,
    "socket_connect_timeout": float,
    "socket_timeout": float,
}
_LOWEST = {"db": 0, "health_check_interval": 0, "max_connections": 1}
_HIGHEST = 10**6
_OPTIONS = (*_NUMBERS, "client_name", "password", "retry_on_timeout", "username")
_TCP_OPTIONS = ("socket_keepalive",)
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
_KNOWN = {
    "redis": _OPTIONS + _TCP_OPTIONS,
    "rediss": _OPTIONS + _TCP_OPTIONS + _TLS_OPTIONS,
    "unix": _OPTIONS,
}
_HOST = re.compile("[A-Za-z0-9_-]+([.][A-Za-z0-9_-]+)*[.]?")
_DATABASE = re.compile("/?|/[0-9]{1,6}/?")
_HIDDEN = "..."


def without_secrets(url: str) -> str:
    """A URL without names, passwords and options; nothing of one that is not escaped properly.

    Raises:
        OptionError: it is no URL of such a server.
    """
    parts = _parts(url)
    if "@" in url.replace(parts.netloc, "", 1):
        return f"{parts.scheme}://{_HIDDEN}"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _parts(url: str) -> SplitResult:
    try:
        url.encode()
        parts = urlsplit(url)
    except (AttributeError, ValueError):  # no text, half a character, or brackets that do not fit
        raise OptionError("the URL of the store is none: redis://HOST:PORT/NUMBER is") from None
    if parts.scheme not in _CONNECTIONS:
        known = ", ".join(_CONNECTIONS)
        raise OptionError(f"scheme {parts.scheme!r:.20} of the store: {known} are known")
    return parts


def _checked(url: str, shown: str) -> tuple[str, float]:
    """The URL with its scheme in small letters, and the seconds to wait for an answer.

    Raises:
        OptionError: no server can have it.
    """
    parts = _parts(url)
    try:
        _check_place(url, parts)
        options = _options(parts, shown)
    except ValueError as error:
        if isinstance(error, OptionError):
            raise
        is_hidden = shown.endswith(_HIDDEN)
        why = "characters such as / # ? @ in a password are written as %2F %23 %3F %40"
        raise OptionError(
            f"the URL of the store at {shown} cannot be used: {why if is_hidden else error}"
        ) from None
    return parts.scheme + url[len(parts.scheme) :], options.get("socket_timeout", ANSWER_S)


def _check_place(url: str, parts: SplitResult) -> None:
    """Raise ValueError unless a host, a port and a database, or a socket can be named so."""
    if not url[len(parts.scheme) :].startswith("://"):
        raise ValueError("write two slashes: redis://HOST:PORT/NUMBER")
    if any(ord(c) < 32 or ord(c) == 127 for c in unquote(url)):
        raise ValueError("it has characters that cannot be printed")
    if "#" in url:
        raise ValueError("write # as %23")
    if parts.scheme == "unix":
        if "@" in parts.path:
            raise ValueError("write @ in a path as %40")
        if parts.netloc.rpartition("@")[2] or not parts.path.strip("/"):
            raise ValueError("name the socket: unix:///PATH, with three slashes")
        return
    if parts.port == 0:  # a port that is none raises
        raise ValueError("port 0 is none")
    if (host := parts.hostname) is not None:
        _check_host(host, is_bracketed="[" in parts.netloc)
    elif parts.port is not None:
        raise ValueError("name a host: redis://HOST:PORT/NUMBER")
    if _DATABASE.fullmatch(parts.path) is None:
        raise ValueError(f"the database {parts.path[1:]!r:.30} is no number: redis://HOST:PORT/0")


def _check_host(host: str, is_bracketed: bool) -> None:
    if is_bracketed:
        ipaddress.IPv6Address(host.partition("%")[0])
    elif _HOST.fullmatch(host.encode("idna").decode()) is None:
        raise ValueError(f"no host has the name {host!r:.50}")


def _options(parts: SplitResult, shown: str) -> dict[str, float]:
    """The options that are numbers; refuse what would change how values are read or written."""
    pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    known, found = _KNOWN[parts.scheme], dict[str, float]()
    for name, value in pairs:
        if name not in known:
            # Of a password that is not escaped, the end looks like an option.
            named = "an option" if shown.endswith(_HIDDEN) else f"option {name!r:.50}"
            raise OptionError(
                f"{named} in the URL of the store at {shown}: leave it out; "
                f"{', '.join(known)} are possible"
            )
        if [one for one, _ in pairs].count(name) > 1:
            raise ValueError(f"option {name} stands there twice")
        if name in _NUMBERS:
            found[name] = _number(name, value)
    return found


def _number(name: str, value: str) -> float:
    try:
        number = _NUMBERS[name](value)
    except ValueError:
        number = math.nan
    lowest = _LOWEST.get(name, 0.001)
    if not lowest <= number <= _HIGHEST:
        raise ValueError(f"option {name}={value:.20}: give a number from {lowest} to {_HIGHEST}")
    return number


def _package(shown: str) -> ModuleType:
    try:
        return import_module("redis")
    except ImportError:
        raise StoreError(
            f'the store at {shown} needs the package redis: pip install "kvcellar[redis]"'
        ) from None
