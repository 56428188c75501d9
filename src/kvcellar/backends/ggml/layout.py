"""Where a cell's row lies in a buffer: side by side (a row a cell) or across (a row a channel).

Both give the same bytes for the same cells; only V without flash attention lies across, so that
weights × V is a plain product.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvcellar.backends.ggml.memory import array_at
from kvcellar.backends.ggml.weights import tensor_at
from kvcellar.types import AnyArray, ByteArray, Int64Array


class CellRows(Protocol):
    """Rows by cell, as raw bytes ``[n, row_bytes]``."""

    def get(self, cells: Int64Array) -> ByteArray:
        """A copy of the rows of cells."""

    def put(self, cells: Int64Array, rows: ByteArray) -> None:
        """Overwrite the rows of cells."""

    def wipe(self, cells: Int64Array) -> None:
        """Zero the rows of cells."""


class NoRows:
    """What a layer has whose V is part of its K: rows of no bytes."""

    def get(self, cells: Int64Array) -> ByteArray:
        """Rows of no bytes."""
        return np.empty((len(cells), 0), np.uint8)

    def put(self, cells: Int64Array, rows: ByteArray) -> None:
        """Nothing to do."""

    def wipe(self, cells: Int64Array) -> None:
        """Nothing to do."""


class RowMajor:
    """A tensor ``[size, width]``: a row a cell."""

    def __init__(self, tensor: int) -> None:
        struct = tensor_at(tensor)
        self._bytes: ByteArray = array_at(struct.data, np.uint8, (struct.ne[1], struct.nb[1]))

    def get(self, cells: Int64Array) -> ByteArray:
        """A copy of the rows of cells."""
        return self._bytes[cells]

    def put(self, cells: Int64Array, rows: ByteArray) -> None:
        """Overwrite the rows of cells."""
        self._bytes[cells] = rows

    def wipe(self, cells: Int64Array) -> None:
        """Zero the rows of cells."""
        self._bytes[cells] = 0


class ChannelMajor:
    """A tensor ``[width, size]``: a row a channel, a column a cell; unquantised types only."""

    def __init__(self, tensor: int) -> None:
        struct = tensor_at(tensor)
        self._dtype = np.dtype(f"u{struct.nb[0]}")
        self._values: AnyArray = array_at(struct.data, self._dtype, (struct.ne[1], struct.ne[0]))

    def get(self, cells: Int64Array) -> ByteArray:
        """A copy of the rows of cells."""
        return np.ascontiguousarray(self._values[:, cells].T).view(np.uint8)

    def put(self, cells: Int64Array, rows: ByteArray) -> None:
        """Overwrite the rows of cells."""
        self._values[:, cells] = np.ascontiguousarray(rows).view(self._dtype).T

    def wipe(self, cells: Int64Array) -> None:
        """Zero the rows of cells."""
        self._values[:, cells] = 0
