"""Stores as the commands open them: one that is there, shown without passwords, keys by prefix.

Nothing but ``run``, ``chat`` and ``import`` makes a store; a mistyped path must not become one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from kvcellar.errors import OptionError, SnapshotFileError, StoreError

if TYPE_CHECKING:
    from kvcellar.snapshot.stores.base import Buffer, Entry, Store

_MIN_PREFIX = 4
_MOST_NAMED = 3


@contextmanager
def existing(where: str, *, read_only: bool = False) -> Iterator[Store]:
    """A store that is there; closed at the end.

    With ``read_only`` nothing changes there, not even the order of use; but the order of use is
    not known either, where the store is a folder.

    Raises:
        StoreError: there is none, or it cannot be opened.
        OptionError: no such store can be.
    """
    from kvcellar.snapshot.stores import open_store
    from kvcellar.snapshot.stores.disk.folder import is_store
    from kvcellar.snapshot.stores.opening import folder_of

    if (folder := folder_of(where)) is None:
        _refuse_memory(where)
        options = {"read_only": True} if read_only else {}
    else:
        if not folder.exists():
            raise StoreError(
                f"{folder} does not exist: name the folder of a store; "
                f"kvcellar run --prompt-cache makes one"
            )
        try:
            found = is_store(folder)
        except OSError as error:
            raise StoreError(f"{folder} cannot be read: {error}") from error
        if not found:
            raise StoreError(f"{folder} is no store: name the folder that --prompt-cache was given")
        options = {"read_only": read_only}
    with closing(open_store(where, **options)) as store:
        yield store


def open_or_make(where: str, max_bytes: int | None = None, ttl_s: float | None = None) -> Store:
    """A store that outlives this process, made if it is a folder that is not there.

    Raises:
        OptionError: no such store can be, or it bounds what it keeps in another way.
        StoreError: it cannot be opened.
    """
    from kvcellar.snapshot.stores import open_store
    from kvcellar.snapshot.stores.opening import folder_of

    _refuse_memory(where)
    if folder_of(where) is None:
        if max_bytes is not None:
            raise OptionError(
                "--cache-bytes is for folders: a server's maxmemory bounds what it keeps"
            )
        return open_store(where, ttl_s=ttl_s)
    if ttl_s is not None:
        raise OptionError(
            "--cache-ttl is for servers: in a folder, kvcellar cache gc --older-than removes "
            "what nobody used for so long"
        )
    return open_store(where, max_bytes=max_bytes)


def shown(where: str) -> str:
    """The name of a store as it may be printed."""
    from kvcellar.snapshot.stores.opening import folder_of
    from kvcellar.snapshot.stores.redis_client import without_secrets

    folder = folder_of(where)
    return without_secrets(where) if folder is None else str(folder)


def find(store: Store, prefix: str) -> Entry:
    """The one entry whose key begins like that; the mark of a missing block, if no block's does.

    Raises:
        OptionError: there is none, or several.
    """
    from kvcellar.snapshot.absence import absent_of

    found = [entry for entry in store.entries() if entry.key.startswith(prefix)]
    if exact := [entry for entry in found if entry.key == prefix]:
        return exact[0]
    # A mark has the key of its block with something behind it, and the block may be there by now.
    found = [entry for entry in found if absent_of(entry.note) is None] or found
    if not found:
        raise OptionError(f"key {prefix!r}: nothing is stored under it; kvcellar cache list tells")
    if len(found) > 1 or len(prefix) < _MIN_PREFIX:
        named = ", ".join(entry.key[:16] for entry in found[:_MOST_NAMED])
        raise OptionError(f"key {prefix!r} is too short: {len(found)} begin with it: {named}")
    return found[0]


def value_of(store: Store, key: str) -> Buffer:
    """The value of an entry that was listed.

    Raises:
        SnapshotFileError: it is damaged, or gone by now.
    """
    if (value := store.get(key)) is None:
        raise SnapshotFileError(f"{key} is damaged, or was removed just now")
    return value


def _refuse_memory(where: str) -> None:
    if where.lower().startswith("memory:"):
        raise OptionError("memory: is a store within one process: name a folder or a URL")
