"""Cut a text into blocks: their keys, and what one of them holds.

The key of a block is a hash of its tokens and of the key before it; the first one follows a hash of
the fingerprint, the block size and the salt. So a key stands for the whole text up to the end of
its block, the same text has the same keys anywhere, and two texts share the keys of exactly the
blocks that they begin with.

A value is a snapshot of one block. It comes from a store that others write to, so it is checked
against its key before it is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from kvcellar.cache.content import SequenceData, join, n_kept
from kvcellar.cache.content_checks import check_content, check_finite
from kvcellar.cache.transfer import state_get
from kvcellar.errors import KVCellarError, SnapshotError, SnapshotFileError
from kvcellar.prompts.misses import BlockRef
from kvcellar.runtime.options import SaveOptions
from kvcellar.runtime.saving import as_type, stored, stored_fingerprint
from kvcellar.snapshot.container import snapshot_from, to_bytes
from kvcellar.snapshot.native import Outline, to_arrays
from kvcellar.snapshot.snapshot import Json, SavedText, Snapshot, converted, digest, row_types
from kvcellar.stores.base import BytesLike, Note
from kvcellar.types import CacheSpec, Int32Array, StateSpec

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence as Text

VERSION = b"kvcellar-prompt-1"

SPELLED = 64
"""Tokens of a block that are spelled for its note, and characters that are kept of them."""


class Blocks:
    """The whole blocks of a text, for one context.

    Attributes:
        tokens: the text.
        keys: one for each whole block.
        stored_as: see :class:`BlockFormat`.
    """

    def __init__(self, context: Context, form: BlockFormat, tokens: list[int]) -> None:
        self.tokens = tokens
        self.keys = block_keys(form.root, tokens, form.size)
        self.stored_as = form.stored_as
        self._context, self._form = context, form

    def block(self, i: int) -> BlockRef:
        """Describe a block, for its note or to explain why it is missing."""
        form = self._form
        return BlockRef(
            key=self.keys[i],
            parent=self.keys[i - 1] if i else form.root,
            start=i * form.size,
            tokens=self._tokens_of(i),
            text=self._texts[i],
            model=str(form.fingerprint["weights"])[:16],
        )

    def beginning(self, i: int) -> str:
        """How the text of a block begins, control tokens spelled; "" without a tokenizer."""
        try:
            tokenizer = self._context.model.tokenizer
            if not tokenizer.has_text:
                return ""
            stream = tokenizer.detokenizer(skip_special=False, continuing=i > 0)
            return "".join(map(stream.push, self._tokens_of(i)[:SPELLED]))[:SPELLED]
        except KVCellarError:  # the model computes, but its vocabulary is unknown or too short
            return ""

    def export(self, sequence: Text, i: int) -> bytes | None:
        """Return a block of a sequence that holds the text, as a value to be stored.

        None if a value is too large for the type in which K and V are stored.

        Raises:
            NotSupported: the cache has states or windows, and none where the block ends.
        """
        context, start, how = self._context, i * self._form.size, self._form.how
        ids, stop = [sequence.seq_id], start + self._form.size
        content = state_get(context.cache, ids, start, stop, checkpoints=False)
        snapshot = Snapshot(context.fingerprint, content, (SavedText(),))
        try:
            snapshot = stored(context.facts, snapshot, how)
        except SnapshotError:
            return None
        return to_bytes(to_arrays(snapshot), compress=how.compress)

    def read(self, i: int, value: BytesLike) -> SequenceData:
        """Read what :meth:`export` returned; K and V stay in the types they were stored in.

        Raises:
            SnapshotError: the value is damaged, or another block.
        """
        content = snapshot_from(value, partial(_admit, self._form.size)).content
        expected = self._tokens_of(i)
        check_content(content, self._form.specs)
        is_same = tokens_of(content) in (None, expected) and np.isin(_tokens(content), expected)
        if content.n_seqs != 1 or content.start != i * self._form.size or not np.all(is_same):
            raise SnapshotFileError("the block holds another text than its key says")
        if content.has_evicted and self._form.is_complete:
            raise SnapshotFileError("the block lacks rows that it should have")
        return content

    def joined(self, pieces: Sequence[SequenceData]) -> SequenceData:
        """Join blocks from the first one on, in the types of the context."""
        context, form = self._context, self._form
        joined = join(pieces, form.windows)
        if not form.stored_as:
            return joined
        snapshot, specs = Snapshot(form.fingerprint, joined, ()), context.memory_spec.groups
        return converted(snapshot, specs, context.model.convert_rows).content

    def _tokens_of(self, i: int) -> list[int]:
        return self.tokens[i * self._form.size : (i + 1) * self._form.size]

    @cached_property
    def _texts(self) -> list[str]:
        return block_keys(self._form.text_root, self.tokens, self._form.size)


class BlockFormat:
    """How the blocks of a context are named, stored and checked, whatever text they are of.

    Attributes:
        size: tokens of a block.
        how: the types in which K and V are stored, and whether they are compressed.
        fingerprint: that of the context, with these types.
        stored_as: a digest of the fingerprint, "" if the context itself has these types.
        specs: the shapes of a block's parts.
        windows: how many tokens a token attends to in each group of K and V; 0: all.
        is_complete: whether a block has all its rows.
        root: the key before the first block.
        text_root: the same for keys that do not depend on the model.
    """

    def __init__(self, context: Context, size: int, cache_salt: str, how: SaveOptions) -> None:
        memory = context.memory_spec
        groups = [as_type(spec, *how.types) for spec in memory.groups]
        self.size, self.how = size, how
        self.specs: list[CacheSpec | StateSpec] = [
            *groups,
            *([] if memory.states is None else [memory.states]),
        ]
        self.fingerprint = stored_fingerprint(context.facts, how)
        named = digest(self.fingerprint)
        self.stored_as = "" if named == digest(context.fingerprint) else named
        parts = [part for part in context.cache.parts if not part.has_states]
        self.windows = [0 if part.keeps_every_token else part.spec.window for part in parts]
        # A cache that slides lacks rows of a block longer than its window, and one that keeps
        # everything needs them. Shorter blocks are the same wherever they come from.
        missing: list[Json] = [
            window if window and n_kept(window) < size else 0 for window in self.windows
        ]
        self.is_complete = not any(missing)
        named = digest({**self.fingerprint, "windows": missing})
        self.root = root_key(named, size, cache_salt)
        self.text_root = root_key("", size, cache_salt)


def root_key(fingerprint_digest: str, block_size: int, cache_salt: str) -> str:
    """The key before the first block.

    Args:
        fingerprint_digest: of the context, and of how its blocks are stored.
        block_size: tokens of a block.
        cache_salt: texts under another salt have other keys.
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


def check_block(key: str, note: Note, value: BytesLike) -> None:
    """Check that a value is the block of that key: its tokens, in the text that the key stands for.

    K, V and states have to be finite; whether they are those of the tokens cannot be checked.

    Raises:
        SnapshotFileError: the value is another block, or damaged.
        LibraryError: the value is compressed by a library that is not installed.
    """
    tokens = _tokens_of(key, note)
    snapshot = snapshot_from(value, partial(_admit, len(tokens)))
    content = snapshot.content
    check_finite(content, row_types(snapshot.fingerprint))
    if content.start != note.get("start") or tokens_of(content) != tokens:
        raise SnapshotFileError("the value holds another text than its key says")


def _admit(n_tokens: int, found: Outline) -> None:
    """Refuse what holds more than a block of so many tokens, before it is read."""
    n_cells = max(found.n_cells, default=0)
    if n_cells > n_tokens or found.n_states > 1 or any(found.n_kept) or any(found.n_logits):
        raise SnapshotFileError(f"the value holds more than a block of {n_tokens} tokens")


def tokens_of(content: SequenceData) -> list[int] | None:
    """The tokens of a block, from the part that has all of them; the content may be unsound."""
    if content.groups:
        tokens: list[int] = content.groups[0].tokens.tolist()
        return tokens
    held = content.states.held if content.states is not None else ()
    return held[0].tokens.tolist() if held and held[0] else None


def _tokens(content: SequenceData) -> Int32Array:
    """The tokens in any part of a block."""
    found = [group.tokens for group in content.groups]
    found += [evicted[1] for group in content.groups for evicted in group.evicted]
    if content.states is not None:
        found += [held.tokens for held in content.states.held if held is not None]
    return np.concatenate(found)


def _tokens_of(key: str, note: Note) -> list[int]:
    """The tokens in a note, if its key is theirs."""
    try:
        tokens = [int(word) for word in str(note["tokens"]).split()]
        expected = block_key(str(note["parent"]), tokens)
    except (KeyError, ValueError, OverflowError) as error:
        raise SnapshotFileError(f"the note says nothing of a block: {error!r:.200}") from error
    if expected != key:
        raise SnapshotFileError("the note is about another block than the key")
    return tokens


def exact_tokens(sequence: Text) -> list[int]:
    """The tokens before the first whose K and V differ from a fresh decode of the text."""
    tokens, at = sequence.tokens, sequence.positions
    n = len(tokens) if sequence.inexact_from is None else sequence.inexact_from
    odd = np.flatnonzero(at != np.arange(len(at)))
    unknown = np.flatnonzero(np.array(tokens) < 0)  # embeddings
    return tokens[: min([n, *odd[:1].tolist(), *unknown[:1].tolist()])]
