"""What sequences hold, taken out of a cache: values that a cache of the same shape can take in.

Sequences are numbered 0, 1, … here, whatever their ids were. A cell that several share is there
once. K rows stand at their positions: no shift is pending. Rows are as a store's ``read_raw`` gives
them, whether V is transposed there or not.

A content whose ``start`` is above 0 is a piece of a text: what stood before is not in it.
:func:`between` cuts a piece out, :func:`join` makes a text of pieces that follow each other. A
cache of prompts keeps a text in pieces, so that texts which begin alike share what they have in
common. Of a window, a piece holds what the next token after it needs, as far as it lies in the
piece; of states, the one at its end. So the pieces together hold what the whole needs: the last
piece's state, and the rows of the windows that are within reach of the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from kvcellar.cellsets import NO_CELLS, Cells, as_cells
from kvcellar.errors import NotSupported, OptionError, SnapshotFileError
from kvcellar.types import ByteArray, Float32Array, Int32Array, Int64Array

NO_TOKENS = np.empty((2, 0), np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceData:
    """What ``n_seqs`` sequences hold in every part of a cache, from position ``start`` on.

    Attributes:
        n_seqs: how many sequences.
        groups: the cells of each group of attention layers.
        states: recurrent states, where there are any.
        start: the position that it begins at.
    """

    n_seqs: int
    groups: tuple[CellData, ...]
    states: StateData | None = None
    start: int = field(default=0)

    def span(self, seq: int) -> tuple[int, int]:
        """The first and the last position of a sequence, evicted ones too; (-1, -1): empty."""
        found = [group.text_of(seq)[0] for group in self.groups]
        if self.states is not None and (held := self.states.held[seq]) is not None:
            found.append(held.positions)
        held_by = [at for at in found if len(at)]
        if not held_by:
            return -1, -1
        return min(int(at[0]) for at in held_by), max(int(at[-1]) for at in held_by)

    def text_of(self, seq: int) -> Int32Array:
        """Positions over ids of a sequence's tokens, from the part that has most of them."""
        if self.groups:
            return self.groups[0].text_of(seq)
        held = None if self.states is None else self.states.held[seq]
        return NO_TOKENS if held is None else np.stack((held.positions, held.tokens))

    @property
    def has_evicted(self) -> bool:
        """Whether tokens have left a window."""
        return any(evicted.shape[1] > 0 for group in self.groups for evicted in group.evicted)

    @property
    def n_bytes(self) -> int:
        """Bytes of K, V and states."""
        states = 0 if self.states is None else self.states.states.nbytes
        return states + sum(group.n_bytes for group in self.groups)


@dataclass(frozen=True, slots=True, eq=False)
class CellData:
    """Cells of K and V.

    Attributes:
        positions: where each stands, ``[n]``; the cells of a sequence ascend.
        tokens: their ids, -1 where an embedding was decoded, ``[n]``.
        owners: pairs of a cell (an index into these) and a sequence, ``[2, n_pairs]``.
        rows: their K and V.
        evicted: for each sequence, positions over ids of tokens that left its window, ``[2, n]``.
        checkpoints: windows to go back to, the oldest first.
    """

    positions: Int32Array
    tokens: Int32Array
    owners: Int64Array
    rows: RowBytes
    evicted: tuple[Int32Array, ...]
    checkpoints: tuple[WindowData, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows.n_bytes + sum(one.rows.n_bytes for one in self.checkpoints)

    def cells_of(self, seq: int) -> Int64Array:
        """The cells of a sequence, in the order of their positions."""
        cells: Int64Array = self.owners[0][self.owners[1] == seq]
        return cells[np.argsort(self.positions[cells], kind="stable")]

    def text_of(self, seq: int) -> Int32Array:
        """Positions over ids of a sequence's tokens, evicted ones first."""
        cells = self.cells_of(seq)
        held = np.stack((self.positions[cells], self.tokens[cells]))
        return np.concatenate((self.evicted[seq], held), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class WindowData:
    """A checkpoint of a window: the end of a text, and the sequences that can go back to it.

    ``evicted`` are positions over ids of the tokens before ``positions``, ``[2, n]``.
    """

    positions: Int32Array
    tokens: Int32Array
    rows: RowBytes
    evicted: Int32Array
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RowBytes:
    """K and V of n cells in each layer, ``[n, row_bytes]``; no V where it is part of K."""

    k: tuple[ByteArray, ...]
    v: tuple[ByteArray, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(rows.nbytes for rows in (*self.k, *self.v))


@dataclass(frozen=True, slots=True, eq=False)
class StateData:
    """States ``[n, n_values]``, shared ones once; and what each sequence holds."""

    states: Float32Array
    held: tuple[SequenceStateData | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceStateData:
    """A sequence's state: the text that made it, and where it lies among the states.

    ``checkpoints`` are pairs of a number of tokens and the state after them, ascending.
    """

    positions: Int32Array
    tokens: Int32Array
    state: int
    checkpoints: tuple[tuple[int, int], ...] = ()


def between(content: SequenceData, lo: int, hi: int) -> SequenceData:
    """Cut out positions from lo to before hi; the same object if that is all.

    Raises:
        NotSupported: there are states, or tokens that left a window: they cannot be cut.
    """
    if all(_is_between(group, lo, hi) for group in content.groups) and content.groups:
        return content
    if content.states is not None or content.has_evicted:
        raise NotSupported(
            "a range of a snapshot with states or windows: they cannot be cut; load all of it"
        )
    groups = tuple(_between(group, lo, hi) for group in content.groups)
    return replace(content, groups=groups, start=max(content.start, lo))


def _is_between(group: CellData, lo: int, hi: int) -> bool:
    held = [group.positions, *(evicted[0] for evicted in group.evicted)]
    return all(int(at.min()) >= lo and int(at.max()) < hi for at in held if len(at))


def _between(group: CellData, lo: int, hi: int) -> CellData:
    cells = np.flatnonzero((group.positions >= lo) & (group.positions < hi))
    numbers = np.full(len(group.positions), -1, np.int64)
    numbers[cells] = np.arange(len(cells))
    pairs = group.owners[:, numbers[group.owners[0]] >= 0]
    return CellData(
        positions=group.positions[cells],
        tokens=group.tokens[cells],
        owners=np.stack((numbers[pairs[0]], pairs[1])),
        rows=pick(group.rows, cells),
        evicted=group.evicted,
    )


def join(pieces: Sequence[SequenceData], windows: Sequence[int]) -> SequenceData:
    """Join pieces of one sequence, each of which begins where the last ended.

    Args:
        pieces: in their order, each sound by itself (:func:`~kvcellar.cache.transfer.state_set`
            checks the whole). Checkpoints are dropped.
        windows: for each group, how many tokens a token attends to; 0: keep everything.

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
    return SequenceData(1, tuple(groups), _join_states(states) if states else None, first.start)


def _join_cells(pieces: Sequence[CellData], window: int) -> CellData:
    """All rows that are held without a gap up to the end; what is before them was evicted."""
    texts = [piece.text_of(0) for piece in pieces]
    text = np.concatenate(texts, axis=1)
    _require_contiguous(text[0])
    ends = np.cumsum([len(one[0]) for one in texts])
    gaps = [end - len(piece.positions) for end, piece in zip(ends, pieces, strict=True)]
    # Evicted tokens of a piece lie before its rows; behind the last of them all is held.
    slid_in = [i for i, piece in enumerate(pieces) if piece.evicted[0].shape[1]]
    n_slid = int(gaps[slid_in[-1]]) if slid_in else 0
    rows = _chain([pick(piece.rows, _in_order(piece)) for piece in pieces])
    n = text.shape[1] - n_slid
    n_rows = sum(len(piece.positions) for piece in pieces)
    whole = CellData(
        positions=text[0, n_slid:],
        tokens=text[1, n_slid:],
        owners=np.stack((np.arange(n), np.zeros(n, np.int64))),
        rows=rows if n == n_rows else pick(rows, slice(n_rows - n, n_rows)),
        evicted=(text[:, :n_slid],),
    )
    return trimmed(whole, window) if window else whole


def _join_states(pieces: Sequence[StateData]) -> StateData:
    """The last state, and the texts that made it."""
    known = [(piece.states, piece.held[0]) for piece in pieces]
    found = [(states, held) for states, held in known if held is not None]
    if not found:
        return StateData(pieces[-1].states[:0], (None,))
    states, last = found[-1]
    positions = np.concatenate([held.positions for _, held in found])
    _require_contiguous(positions)
    tokens = np.concatenate([held.tokens for _, held in found])
    state = states[last.state : last.state + 1]
    return StateData(state, (SequenceStateData(positions, tokens, 0),))


def _in_order(piece: CellData) -> Cells:
    """The cells by their positions: a slice, so that no row is copied, if they lie so."""
    cells = piece.cells_of(0)
    return as_cells(cells) if len(cells) else NO_CELLS


def _chain(pieces: Sequence[RowBytes]) -> RowBytes:
    k = zip(*[rows.k for rows in pieces], strict=True)
    v = zip(*[rows.v for rows in pieces], strict=True)
    return RowBytes(tuple(map(np.concatenate, k)), tuple(map(np.concatenate, v)))


def _shape(piece: SequenceData) -> object:
    """What all pieces have to have in common."""
    rows = [
        ([k.shape[1:] for k in group.rows.k], [v.shape[1:] for v in group.rows.v])
        for group in piece.groups
    ]
    return rows, None if piece.states is None else piece.states.states.shape[1:]


def _require_contiguous(positions: Int32Array) -> None:
    gaps = np.flatnonzero(np.diff(positions) != 1)
    if len(gaps):
        a, b = positions[gaps[0] : gaps[0] + 2]
        raise SnapshotFileError(f"pieces do not follow each other: position {b} comes after {a}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise SnapshotFileError(f"pieces do not follow each other: {what}")


def n_kept(window: int) -> int:
    """How many of its last tokens a sequence keeps: a window, and two for one to be taken back."""
    return max(window, 2)


def trimmed(content: CellData, window: int) -> CellData:
    """The same with no more cells than a window keeps; the others count as evicted."""
    gone = np.zeros(content.owners.shape[1], np.bool_)
    evicted = list(content.evicted)
    for number in range(len(evicted)):
        cells = content.cells_of(number)
        at = content.positions[cells]
        n_older = int(np.count_nonzero(at <= int(at[-1]) - n_kept(window))) if len(at) else 0
        if n_older:
            older = cells[:n_older]
            gone |= (content.owners[1] == number) & np.isin(content.owners[0], older)
            pairs = np.stack((content.positions[older], content.tokens[older]))
            evicted[number] = np.concatenate((evicted[number], pairs), axis=1)
    if not gone.any():
        return content
    owners = content.owners[:, ~gone]
    left, numbers = np.unique(owners[0], return_inverse=True)
    return replace(
        content,
        positions=content.positions[left],
        tokens=content.tokens[left],
        owners=np.stack((numbers, owners[1])),
        rows=pick(content.rows, left),
        evicted=tuple(evicted),
    )


def pick(rows: RowBytes, cells: Cells) -> RowBytes:
    """The rows of some of the cells; those of neighbours are views."""
    if not isinstance(cells, slice) and len(cells):
        cells = as_cells(cells)
    return RowBytes(tuple([k[cells] for k in rows.k]), tuple([v[cells] for v in rows.v]))
