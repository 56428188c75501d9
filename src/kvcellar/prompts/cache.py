"""Compute a prompt once: restore the longest stored beginning of a text, store what is new.

A text is cut into blocks (``blocks.py``), so any text finds what it has in common with anything
stored, by whichever process or machine, and what texts share is stored once.

1. A block is useless without those before it: blocks are read, stored and touched from the last to
   the first, so a store that runs out of room drops the ends of texts. Of a text that is larger
   than the store's budget, the end is not stored at all.
2. States and windows can be exported only where a sequence ends, so :meth:`PromptCache.append`
   computes block by block where the model has any, and exports each block as it ends. Because of
   rule 1 the blocks wait until the last one is there, in memory or in a temporary file.
3. A store that fails costs time alone: :meth:`PromptCache.append` and :meth:`PromptCache.restore`
   go on without it and say so once in the log. They ask it again the next time; one that is slow to
   fail, half a minute later at most.
4. What interrupts an append leaves the sequence as it was, and the store with whole blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from tempfile import SpooledTemporaryFile
from time import monotonic
from typing import Literal, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from kvcellar.batch import Batch
from kvcellar.cache.content import SequenceData
from kvcellar.cache.content_checks import check_content
from kvcellar.errors import (
    BatchError,
    LibraryError,
    NotSupported,
    OptionError,
    SnapshotError,
    StoreError,
    check_callable,
    check_kind,
    check_range,
    check_text,
    not_copied,
)
from kvcellar.prompts.blocks import BlockFormat, Blocks, exact_tokens
from kvcellar.prompts.misses import Miss, explain, mark, note_of
from kvcellar.runtime.context import Context
from kvcellar.runtime.options import SaveOptions
from kvcellar.runtime.saving import Ready
from kvcellar.runtime.sequence import Sequence
from kvcellar.snapshot.container import pack
from kvcellar.snapshot.snapshot import SavedText
from kvcellar.stores.base import Store, check_store
from kvcellar.types import KVType

T = TypeVar("T")
OnPiece: TypeAlias = Callable[[int], None]
Use: TypeAlias = Literal["restore", "store"]

_log = logging.getLogger(__name__)

BLOCK_SIZE = 128
"""Tokens of a block, unless another size is asked for."""

MAX_BLOCK = 4096
"""Tokens of the largest block: they have to fit into a store's notes."""

IN_MEMORY = 64 << 20
"""Bytes of blocks that wait in memory; more go into a file."""

SLOW_S, LONGEST_PAUSE_S = 1.0, 30.0
"""A store that needs more seconds to fail is left alone for nine times as long, but no longer."""


class PromptCache:
    """Restore what a store has of a text, and store what was computed.

    ::

        prompts = PromptCache(open_store("~/.cache/prompts", max_bytes=20 * 2**30))
        hit = prompts.append(context.sequence(), "A long prompt …")

    Safe for several threads and several contexts.

    Args:
        store: where blocks go.
        block_size: tokens of a block. Smaller blocks find more in common; each costs a file or a
            key, and with recurrent layers a state.
        cache_salt: texts stored under another salt are never found: give each user a salt.
        type_k: store K as another type than the cache's: smaller, and a little less exact.
        type_v: the same for V.
        compress: with zstd; needs ``kvcellar[zstd]``.

    Raises:
        OptionError: there is no such type, or a block size outside its range.
        LibraryError: compression needs a library that is not installed.
    """

    __reduce_ex__ = not_copied("a PromptCache", "make another over a store that is opened again")

    def __init__(
        self,
        store: Store,
        *,
        block_size: int = BLOCK_SIZE,
        cache_salt: str = "",
        type_k: str | KVType | None = None,
        type_v: str | KVType | None = None,
        compress: bool = False,
    ) -> None:
        self.block_size = check_range("block_size", block_size, 1, MAX_BLOCK)
        self.cache_salt = check_text("cache_salt", cache_salt)
        check_store(store)
        self._store = store
        self._how = SaveOptions(type_k, type_v, compress, checkpoints=False)
        if self._how.compress:
            pack(np.empty(0, np.uint8))  # fail now rather than after computing a text
        self._forms = WeakKeyDictionary[Context, BlockFormat]()
        self._troubles: dict[Use, StoreError] = {}
        self._asked_again: dict[Use, float] = {}

    @property
    def trouble(self) -> StoreError | None:
        """What the store failed with, since it last worked; None: it works."""
        return next(iter(list(self._troubles.values())), None)

    def append(
        self, sequence: Sequence, prompt: str | Iterable[int], *, on_piece: OnPiece | None = None
    ) -> CacheHit:
        """Append text or tokens: restore what is stored, compute and store the rest.

        Everything is computed if the sequence is not empty. ``on_piece`` is called with the number
        of restored tokens, then with that of each computed piece; what it raises ends the append
        as any error does. If the store fails, the text is computed all the same;
        :attr:`trouble` tells.

        Raises:
            BatchError, CacheFull: as :meth:`Sequence.append`; the sequence is as it was. Blocks
                computed by then are stored.
        """
        check_kind("sequence", sequence, Sequence)
        if on_piece is not None:
            check_callable("on_piece", on_piece)
        with sequence.context.exclusive(), Spool() as exported:
            context, new, n_before = sequence.context, _ids(sequence, prompt), len(sequence)
            hit, text, is_computed = CacheHit(len(new), 0), self._blocks(context, []), False
            try:
                if n_before:
                    text = self._exact_blocks(sequence, new)
                else:
                    text = self._blocks(context, new)
                    hit = self._restore_if_possible(sequence, text)
                most = context.n_ubatch if on_piece else max(1, len(new))
                pieces = self._compute(sequence, new[hit.n_reused :], text, exported, most)
                for n_done in chain((hit.n_reused,), pieces):
                    if on_piece is not None:
                        on_piece(n_done)
                is_computed = True
                n_held = len(text.keys) * self.block_size
                if hit.n_reused < n_held and not hit.has_failed:  # reading counted as a use
                    self._store_if_possible(sequence, text, len(text.keys), exported)
            except BaseException:
                try:
                    if not is_computed and not hit.has_failed:
                        n_held = context.cache.seq_count(sequence.seq_id)
                        n = min(n_held // self.block_size, len(text.keys))
                        self._store_if_possible(sequence, text, n, exported)
                finally:
                    _trim_to(sequence, n_before)
                raise
            return hit

    def restore(self, sequence: Sequence, prompt: str | Iterable[int]) -> CacheHit:
        """Restore the longest stored beginning of a text into an empty sequence.

        Append the rest yourself; at least one token is left, because its logits are needed. If the
        store fails, nothing is restored; :attr:`trouble` tells.

        Raises:
            OptionError: the sequence is not empty.
            CacheFull: there is no room; the sequence is empty.
        """
        check_kind("sequence", sequence, Sequence)
        with sequence.context.exclusive():
            if len(sequence):
                raise OptionError(f"restore: sequence {sequence.seq_id} is not empty")
            text = self._blocks(sequence.context, _ids(sequence, prompt))
            try:
                return self._restore_if_possible(sequence, text)
            except BaseException:
                _trim_to(sequence, 0)
                raise

    def store(self, sequence: Sequence) -> int:
        """Store what a sequence has computed; return how many of its first blocks are stored now.

        Nothing is stored from :attr:`Sequence.inexact_from` on. States and windows can be stored
        only where the cache has checkpoints.

        Raises:
            StoreError: the store cannot be written.
        """
        check_kind("sequence", sequence, Sequence)
        with sequence.context.exclusive(), Spool() as exported:
            sequence.compute_pending()
            text = self._exact_blocks(sequence, [])
            n = len(text.keys)
            if not sequence.context.cache.keeps_every_token:
                n = self._export_missing(sequence, text, exported)
            self._store_missing(text, n, self._exporter(sequence, text, exported))
            exported.check()
            return self._n_stored(text.keys[:n])

    # -- a store that may fail

    def _restore_if_possible(self, sequence: Sequence, text: Blocks) -> CacheHit:
        n, failed = len(text.tokens), Miss("store failed", 0)
        return self._try("restore", lambda: self._restore(sequence, text), CacheHit(n, 0, failed))

    def _store_if_possible(self, sequence: Sequence, text: Blocks, n: int, exported: Spool) -> None:
        def work() -> int | None:
            n_put = self._store_missing(text, n, self._exporter(sequence, text, exported))
            exported.check()
            return n_put or None  # a store that need not write may be full

        self._try("store", work, None)

    def _try(self, use: Use, work: Callable[[], T], otherwise: T) -> T:
        """Use the store; if it fails, say so once and go on without it.

        What is not None proves that it works again.
        """
        if (start := monotonic()) < self._asked_again.get(use, 0.0):
            return otherwise
        try:
            result = work()
        except StoreError as error:
            lost_s = monotonic() - start
            pause_s = min(9 * lost_s, LONGEST_PAUSE_S) if lost_s > SLOW_S else 0.0
            self._asked_again[use] = monotonic() + pause_s
            if use not in self._troubles:
                _log.warning("continuing without the prompt cache: %s", error)
            self._troubles[use] = error
            return otherwise
        if result is not None and self._troubles.pop(use, None) is not None:
            _log.info("the prompt cache works again")
        return result

    # -- restoring

    def _restore(self, sequence: Sequence, text: Blocks) -> CacheHit:
        sequence.stored_as = ""
        pieces, why = self._find(text)
        if pieces:
            try:
                content = text.joined(pieces)
                check_content(content, sequence.context.cache.store_specs)
            except SnapshotError:  # each is sound by itself, but not all together, or as converted
                self._drop(text.keys[: len(pieces)])
                return CacheHit(len(text.tokens), 0, Miss("damaged", 0))
            saved = SavedText(stored_as=text.stored_as)
            sequence.context.put(Ready(content, (saved,)), [sequence])
        return CacheHit(len(text.tokens), len(sequence), why)

    def _find(self, text: Blocks) -> tuple[list[SequenceData], Miss]:
        """Read the stored blocks of a text from its start on; say why there are no more."""
        n_whole = max(0, len(text.tokens) - 1) // self.block_size
        n = self._n_stored(text.keys[:n_whole])
        why = explain(self._store, text.block(n)) if n < n_whole else self._at_end(len(text.tokens))
        pieces: list[SequenceData] = []
        sizes: list[int] = []
        for i in reversed(range(n)):
            piece = self._read(text, i, sizes)
            if isinstance(piece, Miss):
                pieces.clear()
                why = piece
            else:
                pieces.append(piece)
        if why.cause == "nothing stored" and sizes and self._n_fitting(max(sizes), n + 1) <= n:
            why = Miss("over budget", why.token)
        return pieces[::-1], why

    def _at_end(self, n_tokens: int) -> Miss:
        """Why the end of a text cannot be reused, or all of one that fills no block."""
        if n_tokens < self.block_size:
            return Miss("shorter than a block", 0, self.block_size)
        n_whole = (n_tokens - 1) // self.block_size
        return Miss("no whole block", n_whole * self.block_size)

    def _read(self, text: Blocks, i: int, sizes: list[int]) -> SequenceData | Miss:
        """Read a block that was there a moment ago, or say why it is not any more."""
        key = text.keys[i]
        damaged = Miss("damaged", i * self.block_size)
        if (value := self._store.get(key)) is None:
            gone = self._store.why_absent(key)
            return damaged if gone == "never stored" else Miss(gone, damaged.token)
        sizes.append(len(value))
        try:
            return text.read(i, value)
        except LibraryError:
            return Miss("compressed", i * self.block_size)
        except SnapshotError:
            self._drop([key])
            return damaged

    def _drop(self, keys: list[str]) -> None:
        """Delete blocks that cannot be used, so that they are stored again."""
        with suppress(StoreError):  # it may be read-only
            for key in keys:
                self._store.delete(key)

    def _n_stored(self, keys: list[str]) -> int:
        """Count the blocks before the first that is not stored."""
        return next((i for i, key in enumerate(keys) if not self._store.has(key)), len(keys))

    # -- storing

    def _compute(
        self, sequence: Sequence, rest: list[int], text: Blocks, exported: Spool, most: int
    ) -> Iterator[int]:
        """Compute tokens piece by piece; export blocks of states and windows as they end."""
        size, plain = self.block_size, sequence.context.cache.keeps_every_token
        while True:
            n = most if plain else size - len(sequence) % size
            sequence.append(piece := rest[:n])
            i = len(sequence) // size - 1
            if not plain and len(sequence) % size == 0 and i < len(text.keys):
                exported.add(i, text.export(sequence, i))
            yield len(piece)
            if not (rest := rest[n:]):
                return

    def _export_missing(self, sequence: Sequence, text: Blocks, exported: Spool) -> int:
        """Export the blocks that the store lacks; return how many blocks it can have then."""
        for i, key in enumerate(text.keys):
            if not self._store.has(key):
                try:
                    exported.add(i, text.export(sequence, i))
                except NotSupported:
                    states = sequence.context.cache.has_states
                    mark(self._store, text.block(i), "no checkpoint" if states else "window slid")
                    return i
        return len(text.keys)

    def _exporter(
        self, sequence: Sequence, text: Blocks, exported: Spool
    ) -> Callable[[int], bytes | None]:
        """Return what exports a block: the cache, where it can at any time."""
        if sequence.context.cache.keeps_every_token:
            return lambda i: text.export(sequence, i)
        return exported.get

    def _store_missing(self, text: Blocks, n: int, export: Callable[[int], bytes | None]) -> int:
        """Store those of the first n blocks that the store lacks; return how many.

        The others are touched before, so that they do not make room for these, and after, so that
        they leave last.
        """
        keys, n_put, n_fitting = text.keys[n - 1 :: -1] if n else [], 0, n
        held = self._store.touch_all(keys)
        for i, key in zip(reversed(range(n)), keys, strict=True):
            if key in held or i >= n_fitting or (value := export(i)) is None:
                continue
            n_fitting = self._n_fitting(len(value), n_fitting)
            note = note_of(text.block(i), text.beginning(i))
            if i < n_fitting and self._store.put(key, [value], note):
                n_put += 1
        if n_put and held:
            self._store.touch_all([key for key in keys if key in held])
        return n_put

    def _n_fitting(self, n_bytes: int, most: int) -> int:
        """How many blocks of that size the store can hold at once, as far as it knows."""
        budget = self._store.max_bytes
        return most if budget is None or not n_bytes else min(most, budget // n_bytes)

    def _exact_blocks(self, sequence: Sequence, new: list[int]) -> Blocks:
        """The blocks of a sequence that may be stored, once new tokens are appended."""
        exact = exact_tokens(sequence)
        whole = [*exact, *new] if len(exact) == len(sequence) else exact
        text = self._blocks(sequence.context, whole)
        may_store = sequence.stored_as in ("", text.stored_as)
        return text if may_store else self._blocks(sequence.context, [])

    def _blocks(self, context: Context, tokens: list[int]) -> Blocks:
        form = self._forms.get(context)
        if form is None:
            form = BlockFormat(context, self.block_size, self.cache_salt, self._how)
            self._forms[context] = form
        return Blocks(context, form, tokens)


@dataclass(frozen=True, slots=True)
class CacheHit:
    """How much of a text was restored.

    Attributes:
        n_tokens: tokens of the text.
        n_reused: how many of them were restored.
        why: why not more; None: the store was not asked.
    """

    n_tokens: int
    n_reused: int
    why: Miss | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the store could not be asked."""
        return self.why is not None and self.why.cause == "store failed"

    def __str__(self) -> str:
        reason = "" if self.why is None else f": {self.why}"
        return f"{self.n_reused} of {self.n_tokens} tokens reused{reason}"


class Spool:
    """Exported blocks that wait to be stored, by number; use it in a ``with`` block."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._file = SpooledTemporaryFile(max_size=in_memory)  # noqa: SIM115  (closed with it)
        self._places: dict[int, tuple[int, int]] = {}
        self._end = 0
        self._failed: OSError | None = None

    def add(self, i: int, data: bytes | None) -> None:
        """Add a block, if there is one.

        One that does not fit on the disk is dropped; :meth:`check` tells.
        """
        if data is None:
            return
        try:
            self._file.seek(self._end)
            self._file.write(data)
        except OSError as error:
            self._failed = error
            return
        self._places[i] = self._end, len(data)
        self._end += len(data)

    def get(self, i: int) -> bytes | None:
        """The block, None if it was never added or was dropped."""
        if (place := self._places.get(i)) is None:
            return None
        start, size = place
        self._file.seek(start)
        data = self._file.read(size)
        return data if len(data) == size else None

    def check(self) -> None:
        """Raise StoreError if a block was dropped."""
        if self._failed is not None:
            raise StoreError(
                f"blocks could not wait to be stored: {self._failed}; make room in the folder for "
                "temporary files, or name another with TMPDIR"
            ) from self._failed

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _trim_to(sequence: Sequence, n_tokens: int) -> None:
    """Trim a sequence, also if an exception from outside comes meanwhile."""
    try:
        sequence.trim(len(sequence) - n_tokens)
    except BaseException:
        sequence.trim(len(sequence) - n_tokens)
        raise


def _ids(sequence: Sequence, prompt: str | Iterable[int]) -> list[int]:
    """The token ids of a prompt; refuse what a decode would refuse."""
    ids = sequence.to_ids(prompt)
    Batch.of(ids).check_model(sequence.context.model.spec.n_vocab)
    if ids and min(ids) < 0:
        raise BatchError(f"token {min(ids)}: ids are not negative")
    return ids
