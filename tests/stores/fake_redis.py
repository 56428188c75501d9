"""Servers that are no Redis servers, and one that is until it is told otherwise."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from urllib.parse import urlsplit

_COMMAND = re.compile(rb"(?:^|\r\n)\*[0-9]+\r\n\$")

Misbehave = Callable[[socket.socket], None]
"""What a server does with a connection when a command has come; then it closes it."""


def says(*pieces: bytes, pause_s: float = 0.0, then: str = "close") -> Misbehave:
    """Send pieces; then close the connection, or wait until the client does."""

    def act(connection: socket.socket) -> None:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)
        while then == "wait" and connection.recv(1 << 16):
            pass

    return act


def repeats(head: bytes, piece: bytes, pause_s: float = 0.0) -> Misbehave:
    """Send a head, then a piece without end."""

    def act(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(piece)
            time.sleep(pause_s)

    return act


def noise(seed: int) -> Misbehave:
    """Send random bytes."""
    return says(Random(seed).randbytes(3000))


GARBAGE: dict[str, Misbehave] = {
    "closes at once": says(),
    "says nothing": says(then="wait"),
    "half a reply, and closes": says(b"$10\r\nabc"),
    "half a reply, and waits": says(b"$10\r\nabc", then="wait"),
    "half a line": says(b"+PO", then="wait"),
    "a byte now and then": repeats(b"$1000\r\n", b"x", pause_s=0.05),
    "a line without an end": repeats(b"+", b"A" * 65536),
    "a list without an end": repeats(b"*1000000000\r\n", b":1\r\n" * 9999),
    "a huge length, and zeros": repeats(b"$1000000000000\r\n", bytes(1 << 16)),
    "a huge length, and waits": says(b"$1000000000000\r\n", then="wait"),
    "a negative length": says(b"$-5\r\n" * 9, then="wait"),
    "lengths that are none": says(b"$abc\r\n*abc\r\n", then="wait"),
    "a number that is none": says(b":abc\r\n" * 9, then="wait"),
    "a number of many digits": says(b":" + b"9" * 9999 + b"\r\n"),
    "lists in lists": says(b"*1\r\n" * 100_000),
    "HTTP": says(b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\n\r\n<html>"),
    "SMTP": says(b"220 mail.example ESMTP\r\n", then="wait"),
    "SSH": says(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "TLS": says(b"\x15\x03\x01\x00\x02\x02\x0a"),
    "empty lines": says(b"\r\n" * 99),
    **{f"noise {seed}": noise(seed) for seed in range(6)},
}

WRONG_TYPES: dict[str, Misbehave] = {
    name: says(reply * 40, then="wait")
    for name, reply in {
        "numbers": b":7\r\n",
        "negative numbers": b":-1\r\n",
        "text": b"+fine\r\n",
        "bytes": b"$3\r\n\xff\0\xfe\r\n",
        "nothing": b"$-1\r\n",
        "no list": b"*-1\r\n",
        "empty lists": b"*0\r\n",
        "lists of numbers": b"*6\r\n" + b":1\r\n" * 6,
        "lists of lists": b"*2\r\n*1\r\n:1\r\n*1\r\n$1\r\na\r\n",
        "lists of errors": b"*2\r\n-ERR a\r\n-OOM b\r\n",
        "a cursor without an end": b"*2\r\n$1\r\n7\r\n*0\r\n",
    }.items()
}


@contextmanager
def serving(act: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does that with each connection; its URL waits 0.2 s for answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=_handle, args=(act, connection), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0?socket_timeout=0.2"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def _handle(act: Callable[[socket.socket], None], connection: socket.socket) -> None:
    with connection, suppress(OSError):
        act(connection)


def when_asked(misbehave: Misbehave) -> Misbehave:
    """Wait for a command, then misbehave."""

    def act(connection: socket.socket) -> None:
        if connection.recv(1 << 16):
            misbehave(connection)

    return act


class Proxy:
    """Passes everything on to a Redis server while it has neither anything else to do nor to say.

    Attributes:
        misbehave: what to do when the next command comes; the connection is closed then.
        reply: the answer to each command.
        pause_s: how late the server's answers are.
    """

    def __init__(self, url: str) -> None:
        self._address = "127.0.0.1", int(urlsplit(url).port or 0)
        self.misbehave: Misbehave | None = None
        self.reply = b""
        self.pause_s = 0.0

    def __call__(self, connection: socket.socket) -> None:
        with socket.create_connection(self._address) as server:
            back = threading.Thread(target=self._pump, args=(server, connection), daemon=True)
            back.start()
            while data := connection.recv(1 << 16):
                if self.misbehave is not None:
                    self.misbehave(connection)
                    break
                if self.reply:
                    connection.sendall(self.reply * len(_COMMAND.findall(data)))
                else:
                    server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self.pause_s)
                target.sendall(data)
