"""A Redis server of our own, on a free port and on a socket, with nothing kept on disk."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

StartRedis = Callable[..., str]


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The URL of a server that the whole session shares; use a prefix of your own."""
    with running_redis() as url:
        yield url


@pytest.fixture
def start_redis() -> Iterator[StartRedis]:
    """Starts a server with options of its own, returns its URL; it ends with the test."""
    with ExitStack() as stack:
        yield lambda *options: stack.enter_context(running_redis(*options))


@contextmanager
def running_redis(*options: str) -> Iterator[str]:
    """A server for as long as the context lasts."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        what = "neither redis-server nor valkey-server is installed"
        if os.environ.get("KVCELLAR_REQUIRE_DATA") == "1":
            pytest.fail(what)
        pytest.skip(what)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(5):
            port, path = _free_port(), Path(folder, "socket")
            listen = ["--bind", "127.0.0.1", "--port", str(port), "--unixsocket", str(path)]
            command = [binary, *listen, "--save", "", "--dir", folder, *options]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
                try:
                    if _listens(path, process):
                        yield f"redis://127.0.0.1:{port}/0"
                        return
                finally:
                    process.terminate()
        pytest.fail("the server does not listen")


def socket_of(url: str) -> str:
    """The URL of the same server's socket, as the server itself tells."""
    from kvcellar.stores.redis_client import RedisClient

    client = RedisClient(url)
    answer: Any = client.call("CONFIG", "GET", "unixsocket")
    client.close()
    found = answer[b"unixsocket"] if isinstance(answer, dict) else answer[1]
    return f"unix://{found.decode()}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(path: Path, process: subprocess.Popen[bytes]) -> bool:
    """Wait for this very server; False if it ended, as it does if its port was taken meanwhile.

    Its socket is asked, which it opens last: at the port another server might answer.
    """
    for _ in range(2000):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return True
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    return False
