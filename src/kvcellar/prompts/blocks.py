"""A text in blocks, as a cache of prompts keeps it: their keys, and what one of them holds.

Names for what is computed from tokens: the same text, model and salt have the same key anywhere.

A text is cut into blocks of equally many tokens. The key of a block is a hash of its tokens and of
the key of the block before it; the first one follows a hash of the fingerprint and the salt. So a
key stands for the whole text up to the end of its block, and two texts share the keys of exactly
the blocks that they begin with.

Whether a value is the block of a text that its key and its note say it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcellar.cache.base import Cache
from kvcellar.cache.content import SequenceData, join, n_kept
from kvcellar.cache.content_checks import check_content
from kvcellar.cache.transfer import state_get
from kvcellar.errors import SnapshotFileError
from kvcellar.prompts.misses import BlockRef
from kvcellar.runtime.options import SaveOptions
from kvcellar.runtime.saving import as_type, stored, stored_fingerprint
from kvcellar.snapshot.container import snapshot_from, to_bytes
from kvcellar.snapshot.native import to_arrays
from kvcellar.snapshot.snapshot import Plain, SavedText, Snapshot, converted, digest
from kvcellar.stores.base import Buffer, Note
from kvcellar.types import CacheSpec, StateSpec

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence as Text

VERSION = b"kvcellar-prompt-1"


def root_key(fingerprint_digest: str, block_size: int, cache_salt: str) -> str:
    """The key before the first block.

    Args:
        fingerprint_digest: of the context and of how its blocks are stored.
        block_size: how many tokens a block has.
        cache_salt: texts under another one are never found, whatever they are.
    """
    whole = hashlib.sha256(VERSION)
    for part in (fingerprint_digest, str(block_size), cache_salt):
        data = part.encode("utf-8", "surrogatepass")
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()


def block_key(parent: str, tokens: Sequence[int]) -> str:
    """The key of a block that follows another one."""
    ids = np.asarray(tokens, "<i4")
    return hashlib.sha256(bytes.fromhex(parent) + ids.tobytes()).hexdigest()


def block_keys(root: str, tokens: Sequence[int], block_size: int) -> list[str]:
    """The keys of all whole blocks of a text."""
    keys: list[str] = []
    for end in range(block_size, len(tokens) + 1, block_size):
        keys.append(block_key(keys[-1] if keys else root, tokens[end - block_size : end]))
    return keys


def check_block(key: str, note: Note, value: Buffer) -> None:
    """See that a value is the block of that key: its tokens, in the text that the key stands for.

    That K and V are those of the tokens nobody can see.

    Raises:
        SnapshotFileError: it is not.
        LibraryError: it is compressed by a library that is not installed.
    """
    tokens = _tokens_of(key, note)
    content = snapshot_from(value).content
    if content.start != note.get("start") or tokens_of(content) != tokens:
        raise SnapshotFileError("the value holds another text than its key says")


def tokens_of(content: SequenceData) -> list[int] | None:
    """The tokens of a block, by the part that has all of them; nothing is believed to be sound."""
    if content.groups:
        tokens: list[int] = content.groups[0].tokens.tolist()
        return tokens
    held = content.states.held if content.states is not None else ()
    return held[0].tokens.tolist() if held and held[0] else None


def _tokens_of(key: str, note: Note) -> list[int]:
    """The tokens in a note that its key agrees with."""
    try:
        tokens = [int(word) for word in str(note["tokens"]).split()]
        expected = block_key(str(note["parent"]), tokens)
    except (KeyError, ValueError, OverflowError) as error:
        raise SnapshotFileError(f"the note says nothing of a block: {error!r:.200}") from error
    if expected != key:
        raise SnapshotFileError("the note is about another block than the key")
    return tokens


class Blocks:
    """The whole blocks of a text that a context computes, or could.

    Attributes:
        tokens: the text.
        keys: of each whole block its key; the one after the last is not there yet.
        rounded: names the types in which K and V are stored, if the context's are others; else "".
    """

    def __init__(
        self, context: Context, tokens: list[int], size: int, cache_salt: str, how: SaveOptions
    ) -> None:
        self.tokens = tokens
        self._context, self._size, self._how = context, size, how
        self._fingerprint = stored_fingerprint(context, how)
        stored_as = digest(self._fingerprint)
        self.stored_as = "" if stored_as == digest(context.fingerprint) else stored_as
        # Of a block longer than its window, a cache that slides has not all rows; one that keeps
        # everything cannot be filled by it. Shorter ones are the same wherever they come from.
        missing: list[Plain] = [
            window if window and n_kept(window) < size else 0 for window in _windows(context.cache)
        ]
        self._is_complete = not any(missing)
        named = digest({**self._fingerprint, "windows": missing})
        self._root = root_key(named, size, cache_salt)
        self.keys = block_keys(self._root, tokens, size)
        self._texts = block_keys(root_key("", size, cache_salt), tokens, size)

    def block(self, i: int) -> BlockRef:
        """A block, to be noted or explained."""
        return BlockRef(
            key=self.keys[i],
            parent=self.keys[i - 1] if i else self._root,
            start=i * self._size,
            tokens=self._tokens_of(i),
            text=self._texts[i],
            model=str(self._fingerprint["weights"])[:16],
        )

    def take(self, sequence: Text, i: int) -> bytes:
        """What a sequence that holds the text has of a block.

        Raises:
            NotSupported: the cache has states or windows, and kept none where the block ends.
        """
        context, start = self._context, i * self._size
        ids = [sequence.seq_id]
        content = state_get(context.cache, ids, start, start + self._size, checkpoints=False)
        snapshot = Snapshot(context.fingerprint, content, (SavedText(),))
        packed = to_arrays(stored(context, snapshot, self._how))
        return to_bytes(packed, compress=self._how.compress)

    def read(self, i: int, value: Buffer) -> SequenceData:
        """What :meth:`take` returned, in the types that it was stored in.

        Raises:
            SnapshotError: it is damaged, or not that block.
        """
        content = snapshot_from(value).content
        check_content(content, self._specs())
        same = tokens_of(content) in (None, self._tokens_of(i))
        if content.n_seqs != 1 or content.start != i * self._size or not same:
            raise SnapshotFileError("the block holds another text than its key says")
        if content.has_evicted and self._is_complete:
            raise SnapshotFileError("the block lacks rows that it should have")
        return content

    def whole(self, pieces: Sequence[SequenceData]) -> Snapshot:
        """What blocks from the first one on make up, in the types of the context."""
        context = self._context
        joined = join(pieces, _windows(context.cache))
        snapshot = Snapshot(self._fingerprint, joined, (SavedText(),))
        return converted(snapshot, context.memory_spec.groups, context.model.convert_rows)

    def _tokens_of(self, i: int) -> list[int]:
        return self.tokens[i * self._size : (i + 1) * self._size]

    def _specs(self) -> list[CacheSpec | StateSpec]:
        memory = self._context.memory_spec
        groups = [as_type(spec, self._how) for spec in memory.groups]
        return [*groups, *([] if memory.states is None else [memory.states])]


def clean_tokens(sequence: Text) -> list[int]:
    """The tokens up to the first whose K and V are not what its text gives."""
    tokens, at = sequence.tokens, sequence.positions
    n = len(tokens) if sequence.inexact_from is None else sequence.inexact_from
    odd = np.flatnonzero(at != np.arange(len(at)))
    unknown = np.flatnonzero(np.array(tokens) < 0)  # embeddings
    return tokens[: min([n, *odd[:1].tolist(), *unknown[:1].tolist()])]


def _windows(cache: Cache) -> list[int]:
    """Of each group of K and V how many tokens it keeps; 0: all."""
    groups = [part for part in cache.parts if not part.has_states]
    return [0 if group.keeps_every_token else group.spec.window for group in groups]
