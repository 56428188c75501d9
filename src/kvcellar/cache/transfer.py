"""Sequences taken out of a cache as values, and put into any cache of that shape.

llama.cpp's ``state_seq_get_data`` and ``state_seq_set_data``, for every kind of cache, for several
sequences at once and for ranges of positions. Pending shifts are applied first. A failed call
changes nothing (invariant 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcellar.cache.base import Cache
from kvcellar.cache.content import SequenceData
from kvcellar.cache.content_checks import check_content
from kvcellar.cache.eviction import within
from kvcellar.cellsets import clamp_range
from kvcellar.errors import (
    NotSupported,
    OptionError,
    PositionError,
    check_bool,
    check_integers,
    check_kind,
    check_range,
)
from kvcellar.types import MAX_POSITION, Int32Array


def state_get(
    cache: Cache, seq_ids: Sequence[int], p0: int = -1, p1: int = -1, *, checkpoints: bool = True
) -> SequenceData:
    """Copy what sequences hold in a range of positions.

    Args:
        cache: where from.
        seq_ids: which; they are numbered 0, 1, … in what is returned.
        p0: where it begins. Above 0 it is a piece, which only caches that keep every token can
            take in by itself.
        p1: where it ends. States and windows cannot be cut, but if they can go back there, what
            they held there is copied.
        checkpoints: whether older states and windows are copied too, unless it is a piece.

    Raises:
        NotSupported: nothing is kept of a state or a window at p1.
        SequenceIdError: no such sequence.
        OptionError: one is named twice.
    """
    check_kind("cache", cache, Cache)
    seq_ids = check_integers("seq_ids", seq_ids)
    checkpoints = check_bool("checkpoints", checkpoints)
    _check_distinct(seq_ids)
    lo, hi = clamp_range(p0, p1)
    for seq in seq_ids:
        cache.seq_pos_max(seq)  # refuses an unknown id before anything happens
    cache.update()
    return cache.changes.run(_copy, cache, seq_ids, lo, hi, checkpoints)


def _copy(
    cache: Cache, seq_ids: Sequence[int], lo: int, hi: int, checkpoints: bool
) -> SequenceData:
    if cache.keeps_every_token or all(cache.seq_pos_max(seq) < hi for seq in seq_ids):
        return cache.export(seq_ids, lo, hi, checkpoints and lo == 0)
    found: list[SequenceData] = []

    def copy() -> bool:
        for seq in seq_ids:
            end, known = min(hi, cache.seq_pos_max(seq) + 1), _positions(cache, seq)
            reached = cache.rewind(seq, end)
            if within(known, reached, end).any():
                raise NotSupported(
                    f"sequence {seq} cannot be taken up to {end}: no state or window is kept "
                    f"there, the last one before it ends at {reached}"
                )
        found.append(cache.export(seq_ids, lo, hi, checkpoints and lo == 0))
        return False  # the cache stays as it was

    cache.changes.attempt(copy)
    return found[0]


def state_set(
    cache: Cache, content: SequenceData, seq_ids: Sequence[int], *, shift: int = 0
) -> None:
    """Put a content into sequences, behind what they hold already.

    It goes into whatever cells are free. Where there are states or windows, a sequence has to be
    empty. As many checkpoints are imported as the budget allows, the latest first; those of windows
    only if positions stay. Sequences that are empty in the content are left alone.

    Args:
        cache: where to; of the same shape but for its size and the number of its sequences.
        content: what :func:`state_get` returned, or a file held; it is checked.
        seq_ids: which sequences get it, one for each in the content.
        shift: how far all positions move. K is rotated when the cache is updated.

    Raises:
        SnapshotMismatch: it comes from a cache of another shape, or of windows that have slid and
            this one keeps everything; the error says what differs.
        SnapshotFileError: it contradicts itself.
        CacheFull: there is no room.
        PositionError: a sequence holds something at or behind where it would begin, or a position
            leaves the range.
        ShiftUnsupported: K rows cannot be rotated.
        NotSupported: it is a piece and the cache has states or windows, or those are to be added
            to a sequence that is not empty.
    """
    check_kind("cache", cache, Cache)
    check_kind("content", content, SequenceData, made="state_get(…)")
    check_content(content, cache.store_specs)
    ids = check_integers("seq_ids", seq_ids)
    shift = check_range("shift", shift, -MAX_POSITION, MAX_POSITION)
    cache.changes.run(put_content, cache, content, ids, shift=shift)


def put_content(
    cache: Cache, content: SequenceData, seq_ids: Sequence[int], *, shift: int = 0
) -> None:
    """Put content into sequences that was checked; the caller takes back what fails half way.

    Arguments and errors are those of :func:`state_set`.
    """
    _check_distinct(seq_ids)
    if len(seq_ids) != content.n_seqs:
        raise OptionError(f"{len(seq_ids)} sequence ids for {content.n_seqs} sequences")
    _check_targets(cache, content, seq_ids, shift)
    cache.import_(content, seq_ids, shift)


def _positions(cache: Cache, seq: int) -> Int32Array:
    """Where all tokens of a sequence stand, evicted ones too."""
    return np.concatenate((cache.seq_evicted_positions(seq), cache.seq_positions(seq)))


def _check_distinct(seq_ids: Sequence[int]) -> None:
    if len(set(seq_ids)) != len(seq_ids):
        raise OptionError(f"sequence ids {list(seq_ids)}: each only once")


def _check_targets(cache: Cache, content: SequenceData, seq_ids: Sequence[int], shift: int) -> None:
    plain = cache.keeps_every_token
    if content.start > 0 and not plain:
        raise NotSupported(
            f"this piece begins at position {content.start}: a state or a window cannot be put in "
            "without what comes before"
        )
    for number, seq in enumerate(seq_ids):
        first, last = content.span(number)
        end = cache.seq_pos_max(seq) + 1
        if first < 0:
            continue
        if not plain and end > 0:
            raise NotSupported(
                f"sequence {seq} is not empty: a state or a window cannot be added to it"
            )
        if first + shift < 0:
            raise PositionError(f"position {first} cannot move by {shift}: it would be below 0")
        if first + shift < end:
            raise PositionError(
                f"sequence {seq} reaches to position {end - 1}, and this would begin at "
                f"{first + shift}: load it behind that, or into another sequence"
            )
        if last + shift >= MAX_POSITION:
            raise PositionError(f"position {last + shift} would pass the largest one")
