"""The cells of a part of a file, those of all its streams together, in the order of positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcellar.cache.content import NO_TOKENS, CellContent, RowBytes
from kvcellar.snapshot.llama.layout import latent_last
from kvcellar.snapshot.llama.naming import Naming
from kvcellar.snapshot.llama.value import Block, Stream
from kvcellar.types import ByteArray, CacheSpec, Int32Array


class Merged:
    """A part's cells, their owners numbered.

    Attributes:
        positions: where they stand, ascending.
        owners: pairs of a cell and the number of a sequence.
    """

    def __init__(self, streams: Sequence[Stream], naming: Naming) -> None:
        self._streams = streams
        owners = [naming.owners(stream.cells) for stream in streams]
        n_before = np.cumsum([0, *(len(stream.cells) for stream in streams)])
        cells = np.concatenate([own[0] + n for own, n in zip(owners, n_before, strict=False)])
        at = np.concatenate([stream.cells.positions for stream in streams])
        self._order = np.argsort(at, kind="stable")
        rank = np.empty_like(self._order)
        rank[self._order] = np.arange(len(rank))
        self.positions: Int32Array = at[self._order]
        self.owners = np.stack((rank[cells], np.concatenate([own[1] for own in owners])))

    def of(self, seq: int) -> Int32Array:
        """Where the cells of a sequence stand, ascending."""
        at: Int32Array = np.sort(self.positions[self.owners[0][self.owners[1] == seq]])
        return at

    def content(
        self, layers: Sequence[int], spec: CacheSpec, tokens: Int32Array, n_seqs: int
    ) -> CellContent:
        """These with K and V of a group, given which of the part's layers are the group's."""
        rows: tuple[list[ByteArray], list[ByteArray]] = ([], [])
        for i, layer in zip(layers, spec.layers, strict=True):
            k = [stream.k[i] for stream in self._streams if stream.k]
            v = [stream.v[i] for stream in self._streams if stream.v]
            all_k = self._rows(k, spec.type_k.row_bytes(layer.n_embd_k))
            rows[0].append(latent_last(all_k, spec.type_k, layer))
            rows[1].append(self._rows(v, spec.type_v.row_bytes(layer.n_embd_v)))
        slid = (NO_TOKENS,) * n_seqs
        return CellContent(
            self.positions, tokens, self.owners, RowBytes(tuple(rows[0]), tuple(rows[1])), slid
        )

    def _rows(self, blocks: Sequence[Block], row_bytes: int) -> ByteArray:
        if not blocks:  # there are no cells, or no bytes in rows
            return np.empty((len(self.positions), row_bytes), np.uint8)
        rows: ByteArray = np.concatenate([block.rows for block in blocks])[self._order]
        return rows
