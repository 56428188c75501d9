"""Prompts computed once: what sequences hold is stored in blocks and found again by their tokens.

A block is what ``block_size`` tokens left in the cache, named by them, by all tokens before them,
by the model and by a salt (``snapshot/keys.py``). So any text finds the longest beginning that it
has in common with anything stored, by whichever process or machine; and what is shared is stored
once.

States and windows are only known where a sequence stands, so :meth:`PromptCache.append` computes
block by block where the model has any, and takes each out when it ends.

A block is of no use without those before it. So blocks are read, stored and counted as used from
the last one to the first: a store that runs out of room drops the ends of texts.

Blocks that were taken out of a cache and wait until they may be stored.

They are stored from the last to the first, so all of them wait for the last. A state a block may
be megabytes, and a text hundreds of blocks: beyond some size they wait in a file.

What a cache of prompts says of a text: how much was reused, and why not more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from tempfile import SpooledTemporaryFile
from typing import TypeAlias

import numpy as np

from kvcellar.batch import Batch
from kvcellar.cache.content import SequenceData
from kvcellar.errors import (
    BatchError,
    LibraryError,
    NotSupported,
    OptionError,
    SnapshotError,
    StoreError,
)
from kvcellar.prompts.blocks import Blocks, clean_tokens
from kvcellar.prompts.misses import Miss, explain, mark, note_of
from kvcellar.runtime.context import Context
from kvcellar.runtime.options import LoadOptions, SaveOptions, check_range
from kvcellar.runtime.saving import put_into
from kvcellar.runtime.sequence import Sequence
from kvcellar.snapshot.container import pack
from kvcellar.stores.base import Store
from kvcellar.types import KVType

IN_MEMORY = 64 << 20
"""How many bytes wait in memory."""


class Spool:
    """Bytes by number. Gives its file back at the end of a ``with`` block."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._file = SpooledTemporaryFile(max_size=in_memory)  # noqa: SIM115  (closed with it)
        self._places: dict[int, tuple[int, int]] = {}
        self._end = 0
        self._failed: OSError | None = None

    def add(self, i: int, data: bytes) -> None:
        """Keep them. What does not fit on the disk is dropped; :meth:`check` tells."""
        try:
            self._file.seek(self._end)
            self._file.write(data)
        except OSError as error:
            self._failed = error
            return
        self._places[i] = self._end, len(data)
        self._end += len(data)

    def get(self, i: int) -> bytes | None:
        """What was kept; None if nothing was."""
        if (place := self._places.get(i)) is None:
            return None
        start, size = place
        self._file.seek(start)
        data = self._file.read(size)
        return data if len(data) == size else None

    def check(self) -> None:
        """Raise StoreError if something was dropped."""
        if self._failed is not None:
            raise StoreError(
                f"blocks could not wait to be stored: {self._failed}; make room in the folder for "
                "temporary files, or name another with TMPDIR"
            ) from self._failed

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class CacheHit:
    """How much of a text did not have to be computed.

    Attributes:
        n_tokens: how many tokens it has.
        n_reused: how many of them were restored.
        why: why not more; None: nothing was asked of the store.
    """

    n_tokens: int
    n_reused: int
    why: Miss | None = None

    def __str__(self) -> str:
        reason = "" if self.why is None else f": {self.why}"
        return f"{self.n_reused} of {self.n_tokens} tokens reused{reason}"


OnPiece: TypeAlias = Callable[[int], None]
MAX_BLOCK = 4096
"""Tokens of a block; they have to fit into a store's notes."""


class PromptCache:
    """Restores what a store has of a text, and stores what was computed.

    ::

        prompts = PromptCache(open_store("~/.cache/prompts", max_bytes=20 * 2**30))
        reuse = prompts.append(context.sequence(), "A long prompt …")

    May be used by several threads and with several contexts.

    Args:
        store: where blocks are kept.
        block_size: how many tokens a block has. Fewer find more in common; each costs a file or a
            key, and with recurrent layers a state.
        cache_salt: texts stored under another salt are never found: one a user, or a session.
        type_k: store K as another type than the cache's: smaller, and a little less exact.
        type_v: the same for V.
        compress: with zstd; needs ``kvcellar[zstd]``.

    Raises:
        OptionError: there is no such type, or a block size outside its range.
        LibraryError: compression needs a library that is not installed.
    """

    def __init__(
        self,
        store: Store,
        *,
        block_size: int = 128,
        cache_salt: str = "",
        type_k: str | KVType | None = None,
        type_v: str | KVType | None = None,
        compress: bool = False,
    ) -> None:
        self.block_size = check_range("block_size", block_size, 1, MAX_BLOCK)
        self.cache_salt = cache_salt
        if isinstance(store, (str, PathLike)) or store is None:
            raise OptionError(f"PromptCache({store!r}): open it first: PromptCache(open_store(…))")
        self._store = store
        for kind in (type_k, type_v):
            if kind is not None:
                KVType.parse(kind)
        if compress:
            pack(np.empty(0, np.uint8))  # fails now rather than after a text was computed
        self._how = SaveOptions(type_k, type_v, compress, checkpoints=False)

    def append(
        self, sequence: Sequence, prompt: str | Iterable[int], *, on_piece: OnPiece | None = None
    ) -> CacheHit:
        """Add text or tokens to a sequence: restored as far as they are stored, else computed.

        Blocks that were not there are stored. Into a sequence that is not empty all is computed.
        ``on_piece`` is told how many tokens were restored, then how many each computed piece had;
        what it raises ends the append as any error does.

        Raises:
            BatchError, CacheFull: as :meth:`Sequence.append`; the text is as it was. What had been
                computed by then is stored nevertheless.
            StoreError: the store cannot be read or written; the text was added nevertheless.
        """
        with sequence.context.exclusive(), Spool() as taken:
            new, n_before, failed = _ids(sequence, prompt), len(sequence), None
            hit = CacheHit(len(new), 0)
            if n_before:
                text = self._known(sequence, new)
            else:
                text = self._blocks(sequence.context, new)
                try:
                    hit = self._restore(sequence, text)
                except StoreError as error:
                    failed = error
            try:
                most = sequence.context.n_ubatch if on_piece else max(1, len(new))
                pieces = self._compute(sequence, new[hit.n_reused :], text, taken, most)
                for n_done in chain((hit.n_reused,), pieces):
                    if on_piece is not None:
                        on_piece(n_done)
            except BaseException:
                n_held = sequence.context.cache.seq_count(sequence.seq_id)
                n = min(n_held // self.block_size, len(text.keys))
                with suppress(StoreError):
                    self._put_all(text, n, self._taker(sequence, text, taken))
                sequence.trim(len(sequence) - n_before)
                raise
            if failed is not None:
                raise failed
            self._put_all(text, len(text.keys), self._taker(sequence, text, taken))
            taken.check()
            return hit

    def restore(self, sequence: Sequence, prompt: str | Iterable[int]) -> CacheHit:
        """Let an empty sequence hold the longest stored beginning of a text, but its last token.

        What is left has to be appended; that it is at least one token gives its logits.

        Raises:
            OptionError: the sequence is not empty.
            CacheFull: there is no room; the sequence is empty.
            StoreError: the store cannot be read; the sequence is empty.
        """
        with sequence.context.exclusive():
            if len(sequence):
                raise OptionError(f"restore: sequence {sequence.seq_id} is not empty")
            return self._restore(sequence, self._blocks(sequence.context, _ids(sequence, prompt)))

    def store(self, sequence: Sequence) -> int:
        """Store what a sequence has computed; returns how many blocks from its start there are now.

        Blocks end where a sequence was edited (:attr:`Sequence.inexact_from`): what follows is not
        what its tokens would give. States and windows can only be stored where checkpoints are.

        Raises:
            StoreError: the store cannot be written.
        """
        with sequence.context.exclusive(), Spool() as taken:
            sequence.compute_pending()
            text = self._known(sequence, [])
            n = len(text.keys)
            if not sequence.context.cache.keeps_every_token:
                n = self._take_all(sequence, text, taken)
            self._put_all(text, n, self._taker(sequence, text, taken))
            taken.check()
            return self._n_there(text.keys[:n])

    # -- restoring

    def _restore(self, sequence: Sequence, text: Blocks) -> CacheHit:
        sequence.stored_as = ""
        pieces, why = self._find(text)
        if pieces:
            put_into(sequence.context, text.whole(pieces), [sequence], LoadOptions())
            sequence.stored_as = text.stored_as
        return CacheHit(len(text.tokens), len(sequence), why)

    def _find(self, text: Blocks) -> tuple[list[SequenceData], Miss]:
        """The blocks of a text from its start on, and why there are no more."""
        n_whole = max(0, len(text.tokens) - 1) // self.block_size
        n = self._n_there(text.keys[:n_whole])
        why = (
            explain(self._store, text.block(n))
            if n < n_whole
            else Miss("no whole block", n * self.block_size)
        )
        pieces: list[SequenceData] = []
        for i in reversed(range(n)):
            piece = self._read(text, i)
            if isinstance(piece, Miss):
                pieces.clear()
                why = piece
            else:
                pieces.append(piece)
        return pieces[::-1], why

    def _read(self, text: Blocks, i: int) -> SequenceData | Miss:
        """A block that was there a moment ago, or why it is not any more."""
        key = text.keys[i]
        damaged = Miss("damaged", i * self.block_size)
        if (value := self._store.get(key)) is None:
            gone = self._store.why_absent(key)
            return damaged if gone == "never stored" else Miss(gone, damaged.token)
        try:
            return text.read(i, value)
        except LibraryError:
            return Miss("compressed", i * self.block_size)
        except SnapshotError:
            with suppress(StoreError):  # it may be read-only
                self._store.delete(key)
            return damaged

    def _n_there(self, keys: list[str]) -> int:
        """How many blocks there are before the first that is not."""
        return next((i for i, key in enumerate(keys) if not self._store.has(key)), len(keys))

    # -- storing

    def _compute(
        self, sequence: Sequence, rest: list[int], text: Blocks, taken: Spool, most: int
    ) -> Iterator[int]:
        """Compute tokens, tell of each piece; take out blocks of states and windows as they end."""
        size, plain = self.block_size, sequence.context.cache.keeps_every_token
        while True:
            n = most if plain else size - len(sequence) % size
            sequence.append(piece := rest[:n])
            i = len(sequence) // size - 1
            if not plain and len(sequence) % size == 0 and i < len(text.keys):
                taken.add(i, text.take(sequence, i))
            yield len(piece)
            if not (rest := rest[n:]):
                return

    def _take_all(self, sequence: Sequence, text: Blocks, taken: Spool) -> int:
        """Take out what the store lacks of states and windows; how many blocks that may be."""
        for i, key in enumerate(text.keys):
            if not self._store.has(key):
                try:
                    taken.add(i, text.take(sequence, i))
                except NotSupported:
                    states = sequence.context.cache.has_states
                    mark(self._store, text.block(i), "no checkpoint" if states else "window slid")
                    return i
        return len(text.keys)

    def _taker(
        self, sequence: Sequence, text: Blocks, taken: Spool
    ) -> Callable[[int], bytes | None]:
        """What gives a block to be stored: the cache where it can at any time."""
        if sequence.context.cache.keeps_every_token:
            return lambda i: text.take(sequence, i)
        return taken.get

    def _put_all(self, text: Blocks, n: int, take: Callable[[int], bytes | None]) -> None:
        """Store those of the first n blocks that are not there; all of them count as used."""
        for i in reversed(range(n)):
            if not self._store.touch(text.keys[i]) and (value := take(i)) is not None:
                self._store.put(text.keys[i], [value], note_of(text.block(i)))

    def _known(self, sequence: Sequence, new: list[int]) -> Blocks:
        """What may be stored of a sequence, once it goes on with new tokens."""
        known = clean_tokens(sequence)
        whole = [*known, *new] if len(known) == len(sequence) else known
        text = self._blocks(sequence.context, whole)
        may_store = sequence.stored_as in ("", text.stored_as)
        return text if may_store else self._blocks(sequence.context, [])

    def _blocks(self, context: Context, tokens: list[int]) -> Blocks:
        return Blocks(context, tokens, self.block_size, self.cache_salt, self._how)


def _ids(sequence: Sequence, prompt: str | Iterable[int]) -> list[int]:
    """The token ids of a prompt, refused as a decode of them would be."""
    ids = sequence.to_ids(prompt)
    Batch.of(ids).check_model(sequence.context.model.spec.n_vocab)
    if ids and min(ids) < 0:
        raise BatchError(f"token {min(ids)}: ids are not negative")
    return ids
