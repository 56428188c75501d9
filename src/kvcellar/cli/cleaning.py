"""Removing from a store what nobody needs, or what is too much."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcellar.cli.amounts import human_age
from kvcellar.cli.blocks import Forest
from kvcellar.cli.console import human_bytes
from kvcellar.cli.opened import existing
from kvcellar.errors import OptionError
from kvcellar.snapshot.stores.base import WRITING_S
from kvcellar.snapshot.stores.disk import DiskStore

if TYPE_CHECKING:
    from kvcellar.cli.blocks import Reason
    from kvcellar.snapshot.stores.base import Store

_WHAT: dict[Reason, str] = {
    "unreachable": "that lack a block before them",
    "unused": "that nobody used for so long",
    "over budget": "to get within the size",
}


def clean_folder(
    where: str, max_bytes: int | None, max_age_s: float | None, *, dry_run: bool
) -> Iterator[str]:
    """Remove what has to go; yields lines that say what went, and what is left.

    Raises:
        OptionError: it is a server and something was asked for that only the server does.
        StoreError: there is no such store, or it cannot be changed.
    """
    with existing(where) as store:
        if not isinstance(store, DiskStore):
            if max_bytes is not None or max_age_s is not None:
                raise OptionError(
                    "gc --max-bytes, --older-than: a server bounds what it keeps itself: set its "
                    "maxmemory with maxmemory-policy allkeys-lru, and a time to live"
                )
            yield "nothing to do: the server's maxmemory and the time to live bound what it keeps"
            return
        since = None if max_age_s is None else time.time() - max_age_s
        yield from _clean(store, max_bytes, since, dry_run=dry_run)


def _clean(
    store: DiskStore, max_bytes: int | None, since: float | None, *, dry_run: bool
) -> Iterator[str]:
    verb = "would remove" if dry_run else "removed"
    report = store.gc(dry_run=dry_run)
    n = len(report.strays) + len(report.missing)
    if n or report.bytes_freed:
        freed = human_bytes(report.bytes_freed)
        yield f"{verb} {n} files and entries that lack each other, {freed}"
    n_gone, n_bytes = Counter[str](), Counter[str]()
    forest = Forest(entry for entry in store.entries() if entry.key not in report.missing)
    n_lost = sum(not forest.is_reachable(block) for block in forest.blocks.values())
    for block, reason in forest.leaving(max_bytes, since, time.time() - WRITING_S):
        n_lost -= not forest.is_reachable(block)
        if dry_run or store.delete(block.key):
            n_gone[reason] += 1
            n_bytes[reason] += block.entry.n_bytes
    for reason, what in _WHAT.items():
        if n := n_gone[reason]:
            yield f"{verb} {n} entries {what}, {human_bytes(n_bytes[reason])}"
    if not n_gone:
        yield "no entry has to go"
    if n_lost:
        yield (
            f"{n_lost} entries lack a block before them, which somebody may be storing right now: "
            f"they stay until nobody used them for {human_age(WRITING_S)}"
        )
    n_left = len(forest.blocks) - n_gone.total() if dry_run else _count(store)
    left = sum(block.entry.n_bytes for block in forest.blocks.values()) - n_bytes.total()
    yield f"{n_left} entries, {human_bytes(left if dry_run else store.bytes_used)} are left"


def _count(store: Store) -> int:
    return sum(1 for _ in store.entries())
