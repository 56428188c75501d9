"""What a cache of a window adds to cells taken out and put in: what slid out, and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvcellar.cache.cell_porting import PortsCells
from kvcellar.cache.content import CellContent, RowBytes, WindowContent
from kvcellar.cache.room import Room, n_kept
from kvcellar.cache.slicing import pick
from kvcellar.cache.slid import Slid, is_whole
from kvcellar.cache.window_checkpoints import WindowCheckpoints
from kvcellar.errors import SnapshotFileError
from kvcellar.types import ByteArray, Int32Array, Int64Array


class PortsWindows(PortsCells):
    """What a cache of a window needs for :mod:`kvcellar.cache.porting`."""

    _room: Room
    _checkpoints: WindowCheckpoints
    _window: int

    def port_out(self, seq_ids: Sequence[int], lo: int, hi: int, checkpoints: bool) -> CellContent:
        """What sequences hold and held in a range of positions; nothing may be pending."""
        content = super().port_out(seq_ids, lo, hi, checkpoints)
        slid = tuple(_pairs(self._room.slid[seq].inside(lo, hi)) for seq in seq_ids)
        kept = self._port_checkpoints(seq_ids) if checkpoints else ()
        return replace(content, slid=slid, checkpoints=kept)

    def port_in(self, content: CellContent, seq_ids: Sequence[int], shift: int) -> None:
        """Put sound content into cells of empty sequences, and remember what slid out.

        Raises:
            SnapshotFileError: a sequence or a checkpoint lacks a part of its window.
        """
        fitting = trimmed(content, self._window)
        for number in range(len(seq_ids)):
            held = fitting.positions[fitting.cells_of(number)]
            if not is_whole(fitting.slid[number][0], held, self._window):
                raise SnapshotFileError(f"a part of the window of sequence {number} is missing")
        self._fill(fitting, seq_ids, shift)
        for number, seq in enumerate(seq_ids):
            if len(fitting.cells_of(number)):
                at, tokens = fitting.slid[number]
                self._room.slid[seq] = Slid.of(at + np.int32(shift), tokens)
        if shift == 0:  # rows of checkpoints stand at their positions
            for one in fitting.checkpoints:
                self._port_in_checkpoint(one, [seq_ids[number] for number in one.owners])

    def _cells_for(self, n: int) -> Int64Array:
        """Cells for n tokens, those that slid out of every window included."""
        return self._room.take(n, self._room.kept_rows())

    def _port_checkpoints(self, seq_ids: Sequence[int]) -> tuple[WindowContent, ...]:
        owners: dict[int, list[int]] = {}
        known = {}
        for number, seq in enumerate(seq_ids):
            for one in self._checkpoints.of(seq):
                known[one.serial] = one
                owners.setdefault(one.serial, []).append(number)
        return tuple(
            WindowContent(
                one.positions.copy(),
                one.tokens.copy(),
                self._by_layer([rows.copy() for rows in one.rows]),
                _pairs(one.slid),
                tuple(owners[serial]),
            )
            for serial, one in sorted(known.items())
        )

    def _port_in_checkpoint(self, one: WindowContent, seqs: Sequence[int]) -> None:
        if not is_whole(one.slid[0], one.positions, self._window):
            raise SnapshotFileError(f"a part of the checkpoint at {one.positions[-1]} is missing")
        pieces = {"k": one.rows.k, "v": one.rows.v}
        # Copies: whoever made the content may change it, or the file that it lies in.
        rows = tuple(pieces[part][layer].copy() for layer, part in self._room.parts)
        slid = Slid.of(*one.slid)
        self._checkpoints.add(seqs[0], one.positions.copy(), one.tokens.copy(), rows, slid)
        self._checkpoints.lend(seqs[0], seqs[1:], int(one.positions[-1]) + 1)

    def _by_layer(self, rows: Sequence[ByteArray]) -> RowBytes:
        by = dict(zip(self._room.parts, rows, strict=True))
        layers = range(len(self.store.spec.layers))
        none = np.empty((len(rows[0]), 0), np.uint8)
        return RowBytes(
            tuple(by[i, "k"] for i in layers), tuple(by.get((i, "v"), none) for i in layers)
        )


def trimmed(content: CellContent, window: int) -> CellContent:
    """The same with no more cells than a window keeps: the others slid out."""
    gone = np.zeros(content.owners.shape[1], np.bool_)
    slid = list(content.slid)
    for number in range(len(slid)):
        cells = content.cells_of(number)
        at = content.positions[cells]
        n_older = int(np.count_nonzero(at <= int(at[-1]) - n_kept(window))) if len(at) else 0
        if n_older:
            older = cells[:n_older]
            gone |= (content.owners[1] == number) & np.isin(content.owners[0], older)
            pairs = np.stack((content.positions[older], content.tokens[older]))
            slid[number] = np.concatenate((slid[number], pairs), axis=1)
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
        slid=tuple(slid),
    )


def _pairs(slid: Slid) -> Int32Array:
    return np.stack((slid.positions, slid.tokens))
