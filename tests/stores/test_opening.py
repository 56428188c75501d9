"""One name opens any store."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcellar.errors import OptionError
from kvcellar.stores.disk import DiskStore
from kvcellar.stores.memory import MemoryStore
from kvcellar.stores.opening import folder_of, open_store
from kvcellar.stores.redis import RedisStore
from kvcellar.testing.store_use import refusal
from tests.stores.conftest import socket_of


def test_memory() -> None:
    store = open_store("memory:", max_bytes=3)
    assert isinstance(store, MemoryStore)
    assert not store.put("a", [b"four"])


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}", "file://localhost{}", "FILE:{}"])
def test_paths(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "store"
    store = open_store(form.format(folder), max_bytes=3)
    assert isinstance(store, DiskStore)
    assert not store.put("a", [b"four"])
    assert (folder / "values").parent.is_dir()
    store.close()
    open_store(folder, read_only=True).close()


def test_a_url_may_hold_any_path(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}/a%20b%3F").close()
    assert (tmp_path / "a b?").is_dir()


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_store("file:one").close()
    open_store("two/three").close()
    open_store(Path("odd:name")).close()
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "odd:name"}


def test_servers(redis_url: str) -> None:
    for url in (redis_url, socket_of(redis_url)):
        store = open_store(url, prefix="opening:", ttl_s=9)
        assert isinstance(store, RedisStore)
        store.close()


def test_folders_are_known_without_opening_them(tmp_path: Path) -> None:
    assert folder_of(f"file://{tmp_path}/a%20b") == folder_of(tmp_path / "a b") == tmp_path / "a b"
    assert folder_of("~") == Path.home()
    assert folder_of("C:odd") == Path("C:odd")
    for name in ("memory:", "redis://x", "unix:///x", "s3://x"):
        assert folder_of(name) is None


def test_what_is_unknown_is_refused(tmp_path: Path) -> None:
    message = refusal(OptionError, lambda: open_store("s3://me:secret@bucket/x"))
    assert "secret" not in message
    assert all(known in message for known in ("s3", "memory:", "file:", "redis://", "unix://"))
    refusal(OptionError, lambda: open_store("file://elsewhere/x"))
    assert "ttl" in refusal(OptionError, lambda: open_store("memory:", ttl=1))
    refusal(OptionError, lambda: open_store(str(tmp_path), piece_bytes=1))
    assert list(tmp_path.iterdir()) == []
