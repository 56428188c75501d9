"""``--prompt-cache`` of ``run`` and ``chat``: it speeds a run up, and never makes one fail.

A store that cannot be opened is an error: the option names the wrong place. One that fails later
causes one warning, and the run continues without it until it works again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.cli.console import note, one_line
from kvcellar.cli.units import parse_age, parse_size
from kvcellar.errors import CacheFull, OptionError, StoreError, check_range

if TYPE_CHECKING:
    from kvcellar.prompts.cache import PromptCache
    from kvcellar.runtime.sequence import Sequence as Text

FOLDER_BYTES = 10 * 2**30
"""The default budget of a folder: a disk must not fill up unnoticed."""

_option = partial(typer.Option, rich_help_panel="Prompt cache")


@dataclass(frozen=True, slots=True)
class PromptCacheOptions:
    """Where computed prompts are kept, and how much of them.

    Attributes:
        where: a folder or URL; None: there is no prompt cache.
        salt: texts stored under another salt are never found.
        max_bytes: the budget of a folder, as text; None: ``FOLDER_BYTES``.
        ttl: how long a server keeps unused entries, as text; None: without limit.
        block_size: tokens of a block; None: ``BLOCK_SIZE``.

    Raises:
        OptionError: no such size or age, or an option without the cache it is for.
    """

    where: Annotated[
        str | None,
        _option(
            "--prompt-cache",
            metavar="DIR_OR_URL",
            help="Restore the prompt's K/V data from this cache, and store what is computed.",
        ),
    ] = None
    salt: Annotated[
        str | None,
        _option(
            "--cache-salt", metavar="TEXT", help="Find only entries stored with the same salt."
        ),
    ] = None
    max_bytes: Annotated[
        str | None,
        _option(
            "--cache-bytes",
            metavar="SIZE",
            help="Maximum size of the cache folder; least recently used entries are evicted.",
            show_default="10G",
        ),
    ] = None
    ttl: Annotated[
        str | None,
        _option(
            "--cache-ttl",
            metavar="AGE",
            help="How long a server keeps unused entries.",
            show_default="no limit",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        _option(
            "--block-size",
            metavar="N",
            help="Tokens of an entry: only whole entries are stored and restored. "
            "Entries of another size are not found.",
            show_default="128",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.where == "":  # an unset variable, perhaps; as a path it would be this folder
            raise OptionError("--prompt-cache is empty: name a folder or a URL")
        given = {
            "--block-size": self.block_size,
            "--cache-salt": self.salt,
            "--cache-bytes": self.max_bytes,
            "--cache-ttl": self.ttl,
        }
        for option, value in given.items():
            if value is not None and self.where is None:
                raise OptionError(f"{option} needs --prompt-cache")
        if self.block_size is not None:
            from kvcellar.prompts.cache import MAX_BLOCK

            check_range("--block-size", self.block_size, 1, MAX_BLOCK)
        self._limits()

    @contextmanager
    def open(self) -> Iterator[PromptCache | None]:
        """Yield the prompt cache, if any; close it at the end.

        Raises:
            OptionError: the options do not fit this kind of store.
            StoreError: it cannot be opened.
        """
        if self.where is None:
            yield None
            return
        from kvcellar.cli.store_tools import open_or_make
        from kvcellar.prompts.cache import BLOCK_SIZE, PromptCache
        from kvcellar.stores.opening import folder_of

        size, ttl = self._limits()
        if size is None and folder_of(self.where) is not None:
            size = FOLDER_BYTES
        with closing(open_or_make(self.where, size, ttl)) as store:
            block_size = BLOCK_SIZE if self.block_size is None else self.block_size
            yield PromptCache(store, block_size=block_size, cache_salt=self.salt or "")

    def _limits(self) -> tuple[int | None, float | None]:
        """Bytes and seconds."""
        size = None if self.max_bytes is None else parse_size(self.max_bytes, "--cache-bytes")
        return size, None if self.ttl is None else parse_age(self.ttl, "--cache-ttl")


@contextmanager
def stored_at_end(prompts: PromptCache | None, sequence: Text) -> Iterator[None]:
    """Store a sequence at the end, also after Ctrl-C and when the cache was full."""
    try:
        yield
    except (CacheFull, KeyboardInterrupt):
        _store_computed(prompts, sequence)
        raise
    _store_computed(prompts, sequence)


def _store_computed(prompts: PromptCache | None, sequence: Text) -> None:
    """Drop pending tokens first: there may be no room to compute them."""
    if prompts is None:
        return
    n_pending = len(sequence) - sequence.context.cache.seq_count(sequence.seq_id)
    if n_pending > 0:
        sequence.trim(n_pending)
    is_known = prompts.trouble is not None
    try:
        if len(sequence):
            prompts.store(sequence)
    except StoreError as error:
        if not is_known:
            note(f"warning: the prompt cache does not store this: {one_line(error)}")
