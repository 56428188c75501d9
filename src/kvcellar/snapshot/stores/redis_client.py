"""Talking to a Redis server through the optional package redis; every failure is a StoreError."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvcellar.errors import ClosedError, OptionError, StoreError

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
