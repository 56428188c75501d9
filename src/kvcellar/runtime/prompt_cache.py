"""Prompts computed once: what sequences hold is stored in blocks and found again by their tokens.

A block is what ``block_size`` tokens left in the cache, named by them, by all tokens before them,
by the model and by a salt (``snapshot/keys.py``). So any text finds the longest beginning that it
has in common with anything stored, by whichever process or machine; and what is shared is stored
once.

States and windows are only known where a sequence stands, so :meth:`PromptCache.append` computes
block by block where the model has any, and stores each when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.base import Cache
from kvcellar.cache.content import CacheContent
from kvcellar.cache.content_checks import check_content
from kvcellar.cache.joining import join
from kvcellar.cache.parts import has_states, parts_of
from kvcellar.cache.porting import is_plain, state_get
from kvcellar.cache.sliding import SlidingCache
from kvcellar.errors import NotSupported, OptionError, SnapshotError
from kvcellar.memory import StateSpec
from kvcellar.runtime.context import Context
from kvcellar.runtime.loading import LoadOptions, put_into
from kvcellar.runtime.options import check_range
from kvcellar.runtime.saving import SaveOptions, as_type, stored, stored_fingerprint
from kvcellar.runtime.sequence import Sequence
from kvcellar.snapshot.absence import Absence, Cause, Wanted, explain, mark, marked, note_of
from kvcellar.snapshot.container import from_bytes, to_bytes
from kvcellar.snapshot.fingerprint import Plain, digest
from kvcellar.snapshot.keys import block_keys, root_key
from kvcellar.snapshot.native import describe, understand
from kvcellar.snapshot.saved import SavedText, Snapshot
from kvcellar.snapshot.stores.base import Store
from kvcellar.types import AnyArray, CacheSpec


@dataclass(frozen=True, slots=True)
class Reuse:
    """How much of a text did not have to be computed.

    Attributes:
        n_tokens: how many tokens it has.
        n_reused: how many of them were restored.
        why: why not more; None: nothing was asked of the store.
    """

    n_tokens: int
    n_reused: int
    why: Absence | None = None

    def __str__(self) -> str:
        reason = "" if self.why is None else f": {self.why}"
        return f"{self.n_reused} of {self.n_tokens} tokens reused{reason}"


class PromptCache:
    """Restores what a store has of a text, and stores what was computed.

    Args:
        store: where blocks are kept.
        block_size: how many tokens a block has. Fewer find more in common; each costs a file or a
            key, and with recurrent layers a state.
        cache_salt: texts stored under another salt are never found: one a user, or a session.
        type_k: store K as another type than the cache's: smaller, and a little less exact.
        type_v: the same for V.
        compress: with zstd; needs ``kvcellar[zstd]``.
    """

    def __init__(
        self,
        store: Store,
        *,
        block_size: int = 128,
        cache_salt: str = "",
        type_k: str | None = None,
        type_v: str | None = None,
        compress: bool = False,
    ) -> None:
        self.block_size = check_range("block_size", block_size, 1, 2**20)
        self.cache_salt = cache_salt
        self._store = store
        self.how = SaveOptions(type_k, type_v, compress, checkpoints=False)

    def append(
        self,
        sequence: Sequence,
        prompt: str | Iterable[int],
        *,
        on_piece: Callable[[int], None] | None = None,
    ) -> Reuse:
        """Add text or tokens to a sequence: restored as far as they are stored, else computed.

        Blocks that were not there are stored. Into a sequence that is not empty all is computed.

        Args:
            sequence: where to.
            prompt: what to add.
            on_piece: told how many tokens were restored, then how many each computed piece had.
                What it raises ends the append; what was restored or computed stays.

        Raises:
            BatchError, CacheFull: as :meth:`Sequence.append`; what was restored or computed before
                stays.
            StoreError: the store cannot be used.
        """
        with sequence.context.exclusive():
            new = sequence.to_ids(prompt)
            reuse = Reuse(len(new), 0) if len(sequence) else self.restore(sequence, new)
            if on_piece is not None:
                on_piece(reuse.n_reused)
            self._compute(sequence, new[reuse.n_reused :], on_piece)
            return reuse

    def restore(self, sequence: Sequence, prompt: str | Iterable[int]) -> Reuse:
        """Let an empty sequence hold the longest stored beginning of a text, but its last token.

        What is left has to be appended; that it is at least one token gives its logits.

        Raises:
            OptionError: the sequence is not empty.
            CacheFull: there is no room; the sequence is empty.
            StoreError: the store cannot be read.
        """
        if len(sequence):
            raise OptionError(f"restore: sequence {sequence.seq_id} is not empty")
        with sequence.context.exclusive():
            text = _Text(self, sequence.context, sequence.to_ids(prompt))
            pieces, why = self._find(text)
            if pieces:
                self._put(sequence, text, pieces)
            return Reuse(len(text.tokens), len(sequence), why)

    def store(self, sequence: Sequence) -> int:
        """Store what a sequence has computed, in whole blocks; returns how many there are now.

        Blocks end where a sequence was edited (:attr:`Sequence.tainted`): what follows is not what
        its tokens would give. States and windows can only be stored where checkpoints are.

        Raises:
            StoreError: the store cannot be written.
        """
        with sequence.context.exclusive():
            sequence.compute_waiting()
            text = _Text(self, sequence.context, _clean(sequence))
            for i in range(len(text.keys)):
                if not self._store_block(sequence, text, i):
                    return i
            return len(text.keys)

    # -- restoring

    def _find(self, text: _Text) -> tuple[list[CacheContent], Absence | None]:
        """The blocks of a text from its start on, and why there are no more."""
        pieces: list[CacheContent] = []
        n_whole = max(0, len(text.tokens) - 1) // self.block_size
        for i, key in enumerate(text.keys[:n_whole]):
            start = i * self.block_size
            value = self._store.get(key)
            if value is None:
                return pieces, explain(self._store, text.wanted(i))
            if (cause := marked(value)) is not None:
                return pieces, Absence(cause, start)
            try:
                pieces.append(self._understood(value, text, start))
            except SnapshotError:
                self._store.delete(key)
                return pieces, Absence("damaged", start)
        return pieces, Absence("no whole block", n_whole * self.block_size)

    def _understood(
        self, value: bytes | bytearray | memoryview, text: _Text, start: int
    ) -> CacheContent:
        content = understand(from_bytes(value)).content
        check_content(content, text.specs)
        tokens = text.tokens[start : start + self.block_size]
        found = _tokens(content)
        if content.start != start or (found is not None and found.tolist() != tokens):
            raise SnapshotError("the block holds another text than its key says")
        return content

    def _put(self, sequence: Sequence, text: _Text, pieces: list[CacheContent]) -> None:
        joined = join(pieces, _windows(sequence.context.cache))
        snapshot = Snapshot(text.fingerprint, joined, (SavedText(),))
        put_into(sequence.context, snapshot, [sequence], LoadOptions(convert=True))

    # -- storing

    def _compute(
        self, sequence: Sequence, rest: list[int], on_piece: Callable[[int], None] | None
    ) -> None:
        n_ubatch = sequence.context.n_ubatch
        if is_plain(sequence.context.cache):
            n = n_ubatch if on_piece is not None else max(1, len(rest))
            for start in range(0, len(rest), n):
                sequence.append(piece := rest[start : start + n])
                if on_piece is not None:
                    on_piece(len(piece))
            self.store(sequence)
            return
        while rest:
            n = self.block_size - len(sequence) % self.block_size
            piece, rest = rest[:n], rest[n:]
            sequence.append(piece)
            if len(sequence) % self.block_size == 0:
                text = _Text(self, sequence.context, _clean(sequence))
                if len(text.tokens) == len(sequence):
                    self._store_block(sequence, text, len(text.keys) - 1)
            if on_piece is not None:
                on_piece(len(piece))

    def _store_block(self, sequence: Sequence, text: _Text, i: int) -> bool:
        """Store a block unless it is there; False if that cannot be."""
        key, start = text.keys[i], i * self.block_size
        if self._store.has(key):
            if (value := self._store.get(key)) is None or marked(value) is None:
                return True
            self._store.delete(key)
        cache, note = sequence.context.cache, note_of(text.wanted(i))
        try:
            ids = [sequence.seq_id]
            content = state_get(cache, ids, start, start + self.block_size, checkpoints=False)
        except NotSupported:
            cause: Cause = "no checkpoint" if has_states(cache) else "window slid"
            self._store.put(key, [mark(cause)], note)
            return False
        snapshot = Snapshot(text.plain, content, (SavedText(),))
        described = describe(stored(sequence.context, snapshot, self.how))
        return self._store.put(key, [to_bytes(described, compress=self.how.compress)], note)


class _Text:
    """The tokens of a text and the keys of its blocks."""

    def __init__(self, cache: PromptCache, context: Context, tokens: list[int]) -> None:
        self.tokens = tokens
        self.plain = context.fingerprint
        memory = context.memory_spec
        groups = [as_type(spec, cache.how) for spec in memory.groups]
        self.specs: list[CacheSpec | StateSpec] = [
            *groups,
            *([] if memory.states is None else [memory.states]),
        ]
        self.fingerprint: Mapping[str, Plain] = stored_fingerprint(context, cache.how)
        size, salt = cache.block_size, cache.cache_salt
        # A window at full size holds more than one that slides: blocks of these cannot fill it.
        windows: list[Plain] = list(_windows(context.cache))
        named = digest({**self.fingerprint, "windows": windows})
        self._root = root_key(named, size, salt)
        self.keys = block_keys(self._root, tokens, size)
        self._texts = block_keys(root_key("", size, salt), tokens, size)
        self._size = size

    def wanted(self, i: int) -> Wanted:
        """A block, to be noted or explained."""
        start = i * self._size
        return Wanted(
            key=self.keys[i],
            parent=self.keys[i - 1] if i else self._root,
            start=start,
            tokens=self.tokens[start : start + self._size],
            text=self._texts[i],
            model=str(self.plain["weights"])[:16],
        )


def _windows(cache: Cache) -> list[int]:
    """Of each group of K and V how many tokens it keeps; 0: all."""
    parts = [part for part in parts_of(cache) if isinstance(part, AttentionCache)]
    return [part.spec.window if isinstance(part, SlidingCache) else 0 for part in parts]


def _clean(sequence: Sequence) -> list[int]:
    """The tokens that have been computed and whose K and V are what their text gives."""
    tokens, at = sequence.tokens, sequence.positions
    n = len(tokens) if sequence.tainted is None else sequence.tainted
    odd = np.flatnonzero(at != np.arange(len(at)))
    unknown = np.flatnonzero(np.array(tokens) < 0)
    return tokens[: min([n, *odd[:1].tolist(), *unknown[:1].tolist()])]


def _tokens(content: CacheContent) -> AnyArray | None:
    """The tokens of a block, by the part that has all of them."""
    if content.groups:
        return content.groups[0].tokens
    held = None if content.states is None else content.states.held[0]
    return None if held is None else held.tokens
