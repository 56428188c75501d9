"""What sequences hold, as a snapshot: what ``Sequence.save`` and ``Context.save`` write.

Snapshots put into a context: what ``Context.load`` and ``Sequence.load`` do.

Everything that can be wrong with a snapshot is found before anything is changed, and the cache
takes it in as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvcellar.backends.checks import check_types
from kvcellar.cache.content import SequenceData, between
from kvcellar.cache.content_checks import check_content
from kvcellar.cache.transfer import state_get, state_set
from kvcellar.errors import OptionError, SnapshotFileError, SnapshotMismatch, check_range
from kvcellar.runtime.llama_files import is_llama_file, load_llama_file
from kvcellar.runtime.options import LoadOptions, SaveOptions
from kvcellar.snapshot.container import read_snapshot, write_file
from kvcellar.snapshot.native import to_arrays
from kvcellar.snapshot.snapshot import (
    Plain,
    SavedText,
    Snapshot,
    check_same,
    converted,
    digest,
    with_row_types,
)
from kvcellar.types import MAX_POSITION, CacheSpec, Int32Array

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence as Text


def save_file(
    context: Context, texts: Sequence[Text], path: str | Path, options: SaveOptions
) -> int:
    """Write sequences to a file; returns its bytes."""
    snapshot = take_snapshot(context, texts, options)
    return write_file(Path(path), to_arrays(snapshot), compress=options.compress)


def save_part(text: Text, path: str | Path, start: int, stop: int | None, how: SaveOptions) -> int:
    """Write tokens ``[start, stop)`` of a sequence to a file; returns its bytes."""
    snapshot = take_part(text, start, stop, how)
    return write_file(Path(path), to_arrays(snapshot), compress=how.compress)


def take_snapshot(context: Context, texts: Sequence[Text], options: SaveOptions) -> Snapshot:
    """Whole sequences as a value; those that have waiting tokens compute them first.

    Raises:
        OptionError: a sequence of another context, or one twice.
    """
    if any(text.context is not context for text in texts):
        raise OptionError("sequences: one of them belongs to another context")
    for text in texts:
        text.compute_pending()
    ids = [text.seq_id for text in texts]
    content = state_get(context.cache, ids, checkpoints=options.checkpoints)
    saved = tuple(text.saved_text() for text in texts)
    return stored(context, Snapshot(context.fingerprint, content, saved), options)


def take_part(text: Text, start: int, stop: int | None, options: SaveOptions) -> Snapshot:
    """Tokens ``[start, stop)`` of a sequence as a value.

    Raises:
        OptionError: a range outside the sequence, or one that would part grouped tokens.
        NotSupported: the cache has states or windows, and they do not begin or end there.
    """
    context, size = text.context, len(text)
    stop = size if stop is None else check_range("stop", stop, 0, size)
    start = check_range("start", start, 0, stop)
    if (start, stop) == (0, size):
        return take_snapshot(context, [text], options)
    text.compute_pending()
    p0, p1 = check_cuts(text.positions, start, stop)
    first, last = (p0 if start else 0, p1) if start < stop else (0, 0)
    content = state_get(context.cache, [text.seq_id], first, last, checkpoints=options.checkpoints)
    saved = text.saved_text().part(start, stop, size, p1)
    return stored(context, Snapshot(context.fingerprint, content, (saved,)), options)


def check_cuts(at: Int32Array, start: int, stop: int) -> tuple[int, int]:
    """The positions that tokens ``[start, stop)`` of a text span.

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


def stored(context: Context, snapshot: Snapshot, options: SaveOptions) -> Snapshot:
    """The snapshot with K and V in the types that are asked for."""
    if options.types == (None, None):
        return snapshot
    specs = [as_type(spec, options) for spec in context.memory_spec.groups]
    other = converted(snapshot, specs, context.model.convert_rows)
    if other is snapshot:
        return snapshot
    were = digest(snapshot.fingerprint)
    texts = tuple(replace(text, stored_as=text.stored_as or were) for text in other.texts)
    return replace(other, texts=texts)


def stored_fingerprint(context: Context, options: SaveOptions) -> dict[str, Plain]:
    """The fingerprint that :func:`stored` gives a snapshot."""
    specs = [as_type(spec, options) for spec in context.memory_spec.groups]
    return with_row_types(context.fingerprint, specs)


def as_type(spec: CacheSpec, options: SaveOptions) -> CacheSpec:
    """The shape of a cache that would store rows that way."""
    k, v = options.types
    other = replace(
        spec,
        type_k=k or spec.type_k,
        type_v=v or spec.type_v,
        flash_attn=True,  # which way V lies does not matter in a file
    )
    check_types(other)
    return other


def load_file(context: Context, path: str | Path, options: LoadOptions) -> list[Text]:
    """New sequences with what a file holds; see :func:`put_snapshot`."""
    if is_llama_file(path):
        if options != LoadOptions(convert=options.convert):
            raise OptionError(f"{path} is a file of llama.cpp: load all of it, then edit it")
        return load_llama_file(context, path)
    return put_snapshot(context, read_snapshot(path), options)


def load_one(context: Context, path: str | Path, options: LoadOptions) -> Text:
    """A new sequence with what a file of one sequence holds."""
    if is_llama_file(path):
        loaded = load_file(context, path, options)
        if len(loaded) == 1:
            return loaded[0]
        for text in loaded:
            text.close()
        raise _several(len(loaded))
    snapshot = read_snapshot(path)
    _check_single(snapshot)
    return put_snapshot(context, snapshot, options)[0]


def load_into(text: Text, path: str | Path, options: LoadOptions) -> None:
    """Let one sequence go on with what a file holds of one; see :func:`put_into`."""
    if is_llama_file(path):
        raise OptionError(f"{path} is a file of llama.cpp: load it with Context.load")
    snapshot = read_snapshot(path)
    _check_single(snapshot)
    put_into(text.context, snapshot, [text], options)


def put_snapshot(context: Context, snapshot: Snapshot, options: LoadOptions) -> list[Text]:
    """New sequences with what a snapshot holds; if anything fails there are none."""
    with context.new_sequences(snapshot.content.n_seqs) as made:
        put_into(context, snapshot, made, options)
    return made


def put_into(
    context: Context, snapshot: Snapshot, texts: Sequence[Text], options: LoadOptions
) -> None:
    """Let sequences go on with what a snapshot holds.

    Raises:
        SnapshotMismatch: it is of another model, or stored otherwise; names what differs.
        SnapshotFileError: it contradicts itself.
        OptionError: the range is outside of it.
        CacheError: there is no room, or it cannot be put there; see ``state_set``.
    """
    with_row_types = snapshot.fingerprint
    snapshot = _fitting(context, snapshot, options.convert)
    content, saved = snapshot.content, snapshot.texts
    n_dropped = 0
    if options.start or options.stop is not None:
        content, saved, n_dropped = _part(snapshot, options)
    shift = 0
    if options.positions is not None:
        where = check_range("positions", options.positions, 0, MAX_POSITION - 1)
        first = min(content.span(seq)[0] for seq in range(content.n_seqs))
        shift = where - max(first, 0)
    for text in texts:
        text.compute_pending()
    before = {text.seq_id: text.tokens for text in texts}
    with context.cache.transaction():
        state_set(context.cache, content, [text.seq_id for text in texts], shift=shift)
        for text, one in zip(texts, saved, strict=True):
            end = one.self_extended_end + shift
            moved = replace(one, logits=None, self_extended_end=end, inexact_from=0)
            text.adopt(moved if shift else one, before[text.seq_id])
            if n_dropped:
                text.trim(n_dropped)
    is_other = with_row_types["groups"] != context.fingerprint["groups"]
    for text, one in zip(texts, saved, strict=True):
        text.stored_as = digest(with_row_types) if is_other else one.stored_as or text.stored_as


def _fitting(context: Context, snapshot: Snapshot, convert: bool) -> Snapshot:
    """The snapshot with rows as the context stores them; whatever is wrong with it is found."""
    memory = context.memory_spec
    if snapshot.fingerprint != context.fingerprint:
        check_same(snapshot.fingerprint, context.fingerprint, row_types=not convert)
        snapshot = converted(snapshot, memory.groups, context.model.convert_rows)
    states = () if memory.states is None else (memory.states,)
    check_content(snapshot.content, [*memory.groups, *states])
    _check_tokens(snapshot, context.model.spec.n_vocab)
    _check_saved(snapshot)
    return snapshot


def _check_single(snapshot: Snapshot) -> None:
    if (n := snapshot.content.n_seqs) != 1:
        raise _several(n)


def _several(n: int) -> SnapshotMismatch:
    return SnapshotMismatch("sequences", n, 1, "load them with Context.load_all")


def _part(
    snapshot: Snapshot, options: LoadOptions
) -> tuple[SequenceData, tuple[SavedText, ...], int]:
    """What is to be put in of a range of tokens, and how many go again from its end."""
    content = snapshot.content
    if content.n_seqs != 1:
        raise SnapshotMismatch("sequences", content.n_seqs, 1, "a range needs one alone")
    at, text = content.text_of(0)[0], snapshot.texts[0]
    size = len(at)
    stop = size if options.stop is None else check_range("stop", options.stop, 0, size)
    start = check_range("start", options.start, 0, stop)
    if (start, stop) == (0, size):
        return content, snapshot.texts, 0
    p0, p1 = check_cuts(at, start, stop)
    cut = text.part(start, stop, size, p1)
    if start or _can_cut(content):
        return between(content, p0, p1), (cut,), 0
    return content, (replace(text, logits=None),), size - stop


def _can_cut(content: SequenceData) -> bool:
    windows = any(group.checkpoints for group in content.groups)
    return content.states is None and not content.has_evicted and not windows


def _check_tokens(snapshot: Snapshot, n_vocab: int) -> None:
    content = snapshot.content
    lists = [group.tokens for group in content.groups]
    lists += [one.tokens for group in content.groups for one in group.checkpoints]
    lists += [
        evicted[1] for group in content.groups for evicted in group.evicted if evicted.ndim == 2
    ]
    if content.states is not None:
        lists += [held.tokens for held in content.states.held if held is not None]
    for tokens in lists:
        if tokens.size and int(tokens.max()) >= n_vocab:
            raise SnapshotFileError(f"token {tokens.max()} is outside the vocabulary of {n_vocab}")
    for text in snapshot.texts:
        logits = text.logits
        if logits is not None and (logits.shape != (n_vocab,) or logits.dtype != np.float32):
            raise SnapshotFileError(f"logits of shape {logits.shape} for {n_vocab} tokens")
        if logits is not None and not np.isfinite(logits).all():
            raise SnapshotFileError("logits that are not finite")


def _check_saved(snapshot: Snapshot) -> None:
    """See that what is said of the texts can be used; wrong numbers do no harm within range."""
    for text in snapshot.texts:
        for name, value in (
            ("grouped_end", text.self_extended_end),
            ("tainted", text.inexact_from or 0),
        ):
            if not 0 <= value <= MAX_POSITION:
                raise SnapshotFileError(f"{name} of {value}")
