"""What sequences hold, taken out of a cache as a snapshot and prepared to be put into one.

Everything that can be wrong with a snapshot is found by :func:`prepare`, once and before anything
is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvcellar.backends.checks import check_types
from kvcellar.cache.base import Cache
from kvcellar.cache.content import SequenceData, between
from kvcellar.cache.content_checks import check_content
from kvcellar.cache.transfer import state_get
from kvcellar.errors import CacheFull, OptionError, SnapshotFileError, SnapshotMismatch, check_range
from kvcellar.runtime.options import LoadOptions, SaveOptions
from kvcellar.snapshot.container import read_snapshot
from kvcellar.snapshot.native import Outline
from kvcellar.snapshot.snapshot import (
    Convert,
    Json,
    SavedText,
    Snapshot,
    check_same,
    converted,
    digest,
    with_row_types,
)
from kvcellar.types import MAX_POSITION, CacheSpec, Int32Array, KVType, MemorySpec


@dataclass(frozen=True, slots=True)
class ContextFacts:
    """What saving and loading have to know of a context.

    Attributes:
        cache: where sequences are.
        memory_spec: the shape of its parts.
        fingerprint: what a snapshot has to share with it.
        convert_rows: stores rows of K or V another way.
        n_vocab: token ids are below it.
    """

    cache: Cache
    memory_spec: MemorySpec
    fingerprint: Mapping[str, Json]
    convert_rows: Convert
    n_vocab: int


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """Sound content that fits a cache, and what is known of its texts.

    Attributes:
        content: what the sequences will hold.
        texts: what else is known of each.
        shift: how far positions move.
        n_dropped: how many tokens are to be trimmed from the end again.
    """

    content: SequenceData
    texts: tuple[SavedText, ...]
    shift: int = 0
    n_dropped: int = 0


# -- saving


def take_snapshot(
    facts: ContextFacts, seq_ids: Sequence[int], texts: Sequence[SavedText], options: SaveOptions
) -> Snapshot:
    """Take whole sequences, of which nothing is pending; errors are those of ``state_get``."""
    content = state_get(facts.cache, seq_ids, checkpoints=options.checkpoints)
    return stored(facts, Snapshot(facts.fingerprint, content, tuple(texts)), options)


def take_part(
    facts: ContextFacts,
    seq_id: int,
    text: SavedText,
    at: Int32Array,
    start: int,
    stop: int,
    options: SaveOptions,
) -> Snapshot:
    """Take tokens ``[start, stop)`` of a sequence whose tokens stand ``at`` these positions.

    Raises:
        OptionError: the range would part tokens that share a position.
        NotSupported: the cache has states or windows, and they do not begin or end there.
    """
    p0, p1 = check_cuts(at, start, stop)
    first, last = (p0 if start else 0, p1) if start < stop else (0, 0)
    content = state_get(facts.cache, [seq_id], first, last, checkpoints=options.checkpoints)
    part = text.part(start, stop, len(at), p1)
    return stored(facts, Snapshot(facts.fingerprint, content, (part,)), options)


def check_cuts(at: Int32Array, start: int, stop: int) -> tuple[int, int]:
    """Return the positions that tokens ``[start, stop)`` of a text span.

    Args:
        at: where all its tokens stand, at least one.
        start: the first.
        stop: the first one behind them.

    Raises:
        OptionError: tokens that share a position would be parted.
    """
    for cut in (start, stop):
        if 0 < cut < len(at) and at[cut] == at[cut - 1]:
            raise OptionError(f"tokens {cut - 1} and {cut} share position {at[cut]}: take both")
    ends = [*at.tolist(), int(at[-1]) + 1]
    return ends[start], ends[stop]


def stored(facts: ContextFacts, snapshot: Snapshot, options: SaveOptions) -> Snapshot:
    """Store K and V of a snapshot in the types that are asked for."""
    if options.type_k is None and options.type_v is None:
        return snapshot
    types = options.types  # refused if there is no such type, even where nothing has one
    specs = [as_type(spec, *types) for spec in facts.memory_spec.groups]
    other = converted(snapshot, specs, facts.convert_rows)
    if other is snapshot:
        return snapshot
    were = digest(snapshot.fingerprint)
    texts = tuple(replace(text, stored_as=text.stored_as or were) for text in other.texts)
    return replace(other, texts=texts)


def stored_fingerprint(facts: ContextFacts, options: SaveOptions) -> Mapping[str, Json]:
    """Return the fingerprint that :func:`stored` gives a snapshot."""
    if options.type_k is None and options.type_v is None:
        return facts.fingerprint
    specs = [as_type(spec, *options.types) for spec in facts.memory_spec.groups]
    return with_row_types(facts.fingerprint, specs)


def as_type(spec: CacheSpec, k: KVType | None, v: KVType | None) -> CacheSpec:
    """Return the shape of a cache that stores rows in these types; None: as it is."""
    other = replace(
        spec,
        type_k=k or spec.type_k,
        type_v=v or spec.type_v,
        flash_attn=True,  # whether V is transposed does not matter in a file
    )
    check_types(other)
    return other


# -- loading


def read_wanted(
    facts: Callable[[], ContextFacts], path: str | Path, options: LoadOptions, *, single: bool
) -> Snapshot:
    """Read a snapshot, but none of its arrays unless it suits the context.

    ``facts`` are asked for once the file is known to be sound: they may hash the weights.

    Raises:
        SnapshotFileError: the file is missing, no snapshot, or damaged.
        SnapshotMismatch: it is of another model, stored otherwise, or not of a single sequence.
        CacheFull: it has more cells than the whole cache.
    """

    def admit(found: Outline) -> None:
        if single:
            require_single(found.n_seqs)
        known = facts()
        check_same(found.fingerprint, known.fingerprint, row_types=not options.convert)
        for n in found.n_logits:
            _check_n_logits((n,), known.n_vocab)
        if not options.start and options.stop is None and found.n_cells:
            most, n = known.cache.spec.size, max(found.n_cells)
            if n > most:
                raise CacheFull(n, most, "use a larger n_ctx, or load a range of tokens")

    return read_snapshot(path, admit)


def require_single(n_seqs: int) -> None:
    """Raise SnapshotMismatch unless a file has one sequence."""
    if n_seqs != 1:
        raise SnapshotMismatch("sequences", n_seqs, 1, "load them with Context.load_all")


def prepare(facts: ContextFacts, snapshot: Snapshot, options: LoadOptions) -> Ready:
    """Check a snapshot, with rows as the context stores them; nothing is changed.

    Raises:
        SnapshotMismatch: it is of another model, or stored otherwise; names what differs.
        SnapshotFileError: it contradicts itself.
        OptionError: the range is outside of it.
    """
    check_same(snapshot.fingerprint, facts.fingerprint, row_types=not options.convert)
    content, texts = snapshot.content, snapshot.texts
    if snapshot.fingerprint["groups"] != facts.fingerprint["groups"]:
        were = digest(snapshot.fingerprint)
        content = converted(snapshot, facts.memory_spec.groups, facts.convert_rows).content
        texts = tuple(replace(text, stored_as=were) for text in texts)
    check_content(content, facts.memory_spec.stores)
    _check_tokens(content, facts.n_vocab)
    _check_texts(texts, facts.n_vocab)
    n_dropped = shift = 0
    if options.start or options.stop is not None:
        content, texts, n_dropped = _part(content, texts, options)
    if options.positions is not None:
        where = check_range("positions", options.positions, 0, MAX_POSITION - 1)
        first = min(content.span(seq)[0] for seq in range(content.n_seqs))
        shift = where - max(first, 0)
    if shift:
        texts = tuple(
            replace(
                text,
                logits=None,
                self_extended_end=text.self_extended_end + shift,
                inexact_from=0,
            )
            for text in texts
        )
    return Ready(content, texts, shift, n_dropped)


def _part(
    content: SequenceData, texts: tuple[SavedText, ...], options: LoadOptions
) -> tuple[SequenceData, tuple[SavedText, ...], int]:
    """Return what is to be put in of a range of tokens, and how many go again from its end."""
    if content.n_seqs != 1:
        raise SnapshotMismatch("sequences", content.n_seqs, 1, "a range needs one alone")
    at = content.text_of(0)[0]
    size = len(at)
    stop = size if options.stop is None else check_range("stop", options.stop, 0, size)
    start = check_range("start", options.start, 0, stop)
    if (start, stop) == (0, size):
        return content, texts, 0
    p0, p1 = check_cuts(at, start, stop)
    windows = any(group.checkpoints for group in content.groups)
    if start or (content.states is None and not content.has_evicted and not windows):
        return between(content, p0, p1), (texts[0].part(start, stop, size, p1),), 0
    return content, (replace(texts[0], logits=None),), size - stop


def _check_tokens(content: SequenceData, n_vocab: int) -> None:
    lists = [group.tokens for group in content.groups]
    lists += [one.tokens for group in content.groups for one in group.checkpoints]
    lists += [evicted[1] for group in content.groups for evicted in group.evicted]
    if content.states is not None:
        lists += [held.tokens for held in content.states.held if held is not None]
    for tokens in lists:
        if tokens.size and int(tokens.max()) >= n_vocab:
            raise SnapshotFileError(f"token {tokens.max()} is outside the vocabulary of {n_vocab}")


def _check_n_logits(shape: tuple[int, ...], n_vocab: int) -> None:
    if shape != (n_vocab,):
        raise SnapshotFileError(f"logits of shape {shape} for {n_vocab} tokens")


def _check_texts(texts: Sequence[SavedText], n_vocab: int) -> None:
    """Check that what is said of texts can be used; wrong numbers do no harm within range."""
    for text in texts:
        logits = text.logits
        if logits is not None:
            _check_n_logits(logits.shape if logits.dtype == np.float32 else (), n_vocab)
        if logits is not None and not np.isfinite(logits).all():
            raise SnapshotFileError("logits that are not finite")
        for name, value in (
            ("grouped_end", text.self_extended_end),
            ("tainted", text.inexact_from or 0),
        ):
            if not 0 <= value <= MAX_POSITION:
                raise SnapshotFileError(f"{name} of {value}")
