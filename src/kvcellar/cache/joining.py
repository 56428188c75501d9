"""Pieces of one sequence, each beginning where the last ended, joined into one content.

A cache of prompts keeps a text in pieces, so that texts which begin alike share what they have in
common. Of windows a piece holds what the next token after it needs, as far as it lies in the piece;
of states it holds the one at its end. So what the whole needs is there: the last piece's state, and
of the pieces' windows those rows that are within reach of the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvcellar.cache.content import (
    CacheContent,
    CellContent,
    HeldContent,
    RowBytes,
    StateContent,
)
from kvcellar.cache.slicing import pick
from kvcellar.cache.window_porting import trimmed
from kvcellar.cellsets import NO_CELLS, Cells, as_cells
from kvcellar.errors import OptionError, SnapshotFileError
from kvcellar.types import ByteArray, Int32Array


def join(pieces: Sequence[CacheContent], windows: Sequence[int]) -> CacheContent:
    """The content that a sequence would have had if it had been taken out from the first piece on.

    Args:
        pieces: in their order, each sound by itself (:func:`~kvcellar.cache.porting.state_set`
            checks the whole). Checkpoints are dropped.
        windows: of each group how many tokens a token attends to; 0: keep everything.

    Raises:
        SnapshotFileError: they are not pieces of one sequence that follow each other.
        OptionError: there is no piece, or not a window for each group.
    """
    if not pieces:
        raise OptionError("there are no pieces to be joined: give at least one")
    first = pieces[0]
    if len(windows) != len(first.groups):
        raise OptionError(f"{len(windows)} windows for {len(first.groups)} groups: one for each")
    for piece in pieces:
        _require(piece.n_seqs == 1, f"a piece is of {piece.n_seqs} sequences")
        _require(_shape(piece) == _shape(first), "pieces come from caches of different shapes")
    for one, other in pairwise(pieces):
        end = max(one.span(0)[1] + 1, one.start)
        _require(other.start == end, f"a piece ends at {end}, the next begins at {other.start}")
    groups = [
        _join_cells([piece.groups[i] for piece in pieces], window)
        for i, window in enumerate(windows)
    ]
    states = [piece.states for piece in pieces if piece.states is not None]
    return CacheContent(1, tuple(groups), _join_states(states) if states else None, first.start)


def _join_cells(pieces: Sequence[CellContent], window: int) -> CellContent:
    """All rows that are held without a gap up to the end; what is before them slid out."""
    texts = [piece.text_of(0) for piece in pieces]
    text = np.concatenate(texts, axis=1)
    _require_contiguous(text[0])
    ends = np.cumsum([len(one[0]) for one in texts])
    gaps = [end - len(piece.positions) for end, piece in zip(ends, pieces, strict=True)]
    # What slid out of a piece lies before its rows; behind the last such token all is held.
    slid_in = [i for i, piece in enumerate(pieces) if piece.slid[0].shape[1]]
    n_slid = int(gaps[slid_in[-1]]) if slid_in else 0
    rows = _chain([pick(piece.rows, _in_order(piece)) for piece in pieces])
    n = text.shape[1] - n_slid
    n_rows = sum(len(piece.positions) for piece in pieces)
    whole = CellContent(
        positions=text[0, n_slid:],
        tokens=text[1, n_slid:],
        owners=np.stack((np.arange(n), np.zeros(n, np.int64))),
        rows=pick(rows, slice(n_rows - n, n_rows)),
        slid=(text[:, :n_slid],),
    )
    return trimmed(whole, window) if window else whole


def _join_states(pieces: Sequence[StateContent]) -> StateContent:
    """The last state, and the texts that made it."""
    known = [(piece.states, piece.held[0]) for piece in pieces]
    found = [(states, held) for states, held in known if held is not None]
    if not found:
        return StateContent(pieces[-1].states[:0], (None,))
    states, last = found[-1]
    positions = np.concatenate([held.positions for _, held in found])
    _require_contiguous(positions)
    tokens = np.concatenate([held.tokens for _, held in found])
    state = states[last.state : last.state + 1]
    return StateContent(state, (HeldContent(positions, tokens, 0),))


def _in_order(piece: CellContent) -> Cells:
    """The cells by their positions: a slice, so that no row is copied, if they lie so."""
    cells = piece.cells_of(0)
    return as_cells(cells) if len(cells) else NO_CELLS


def _chain(pieces: Sequence[RowBytes]) -> RowBytes:
    k = zip(*(rows.k for rows in pieces), strict=True)
    v = zip(*(rows.v for rows in pieces), strict=True)
    return RowBytes(tuple(map(np.concatenate, k)), tuple(map(np.concatenate, v)))


def _shape(piece: CacheContent) -> object:
    """What all pieces have to have in common."""
    rows = [tuple(map(_width, (*group.rows.k, *group.rows.v))) for group in piece.groups]
    layers = [(len(group.rows.k), len(group.rows.v)) for group in piece.groups]
    states = None if piece.states is None else piece.states.states.shape[1:]
    return rows, layers, states


def _width(rows: ByteArray) -> tuple[int, ...]:
    return rows.shape[1:]


def _require_contiguous(positions: Int32Array) -> None:
    gaps = np.flatnonzero(np.diff(positions) != 1)
    if len(gaps):
        a, b = positions[gaps[0] : gaps[0] + 2]
        raise SnapshotFileError(f"pieces do not follow each other: position {b} comes after {a}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise SnapshotFileError(f"pieces do not follow each other: {what}")
