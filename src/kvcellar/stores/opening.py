"""Open any store by a path or URL."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvcellar.errors import (
    OptionError,
    check_path,
)
from kvcellar.stores.base import Store, expanded

_SCHEME = re.compile("([A-Za-z][A-Za-z0-9+.-]+):")


def open_store(where: str | os.PathLike[str], **options: Any) -> Store:  # as the store takes them
    """Open the store that a path or URL names.

    ::

        open_store("memory:", max_bytes=2**30)
        open_store("~/.cache/prompts", max_bytes=20 * 2**30)
        open_store("file:///var/cache/prompts", read_only=True)
        open_store("redis://cache.lan:6379/0", ttl_s=86400)

    Args:
        where: ``memory:``; a path or ``file:``; ``redis://``, ``rediss://`` or ``unix://``.
        options: further arguments of the store's class.

    Raises:
        OptionError: there is no such store, or it has no such option.
        StoreError: the store cannot be opened.
    """
    name, scheme = _split(where)
    try:
        return _open(scheme, name, options)
    except TypeError as error:
        raise OptionError(f"options {', '.join(options)} of {scheme or 'path'}: {error}") from None


def folder_of(where: str | os.PathLike[str]) -> Path | None:
    """The folder that a path or ``file:`` URL names; None for another kind of store."""
    name, scheme = _split(where)
    if scheme not in ("", "file"):
        return None
    return expanded("where", _path(name) if scheme else Path(name))


def _open(scheme: str, name: str, options: dict[str, Any]) -> Store:
    """Import a store's module only when such a store is opened."""
    if scheme == "memory":
        from kvcellar.stores.memory import MemoryStore

        return MemoryStore(**options)
    if scheme in ("redis", "rediss", "unix"):
        from kvcellar.stores.redis import RedisStore

        return RedisStore(name, **options)
    if scheme not in ("", "file"):
        known = "memory:, file:, redis://, rediss://, unix:// and paths"
        raise OptionError(f"scheme {scheme!r} of the store: {known} are known")
    from kvcellar.stores.disk import DiskStore

    return DiskStore(_path(name) if scheme else Path(name), **options)


def _split(where: str | os.PathLike[str]) -> tuple[str, str]:
    """What is named, and by which scheme; "": by a path."""
    check_path("where", where)
    return os.fspath(where), _scheme(where) if isinstance(where, str) else ""


def _scheme(name: str) -> str:
    """The scheme before the colon; a single letter is a drive."""
    match = _SCHEME.match(name)
    return match[1].lower() if match else ""


def _path(url: str) -> Path:
    """The path of ``file:PATH`` or ``file:///PATH``."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise OptionError(
            f"host {parts.netloc!r} in {url!r}: write file:///PATH, with three slashes"
        )
    return Path(unquote(parts.path))
