"""Types of the fixtures that run the command; the texts of a small store, and what it holds."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from typer.testing import Result

from kvcellar.stores.disk.index import index_path, newest_index

Invoke = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[bytes]"]

TRUNK, LEFT, RIGHT = [*range(65, 81)], [*range(81, 97)], [*range(40, 48)]
"""Two blocks that two texts begin with, and two and one that they go on with."""


def listed(invoke: Invoke, where: str | Path, *args: str) -> dict[str, Any]:
    result = invoke("cache", "list", where, "--json", *args)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def value_file(folder: Path, key: str) -> Path:
    (path,) = (folder / "values").rglob(f"{key}.*")
    return path


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def age(folder: Path, seconds: float) -> None:
    """Have nobody used anything of a store for so long."""
    with closing(sqlite3.connect(index_path(folder, newest_index(folder)))) as db, db:
        db.execute("UPDATE entries SET used = used - ?", (seconds,))


def tree(folder: Path) -> dict[str, bytes]:
    """All values of a store; its index may be opened."""
    return {str(path): path.read_bytes() for path in (folder / "values").rglob("*.*")}
