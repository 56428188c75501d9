"""Stores without real K and V bytes, for tests of caches.

:class:`NullStore` keeps nothing. :class:`SignatureStore` keeps, for each cell, which content its
rows hold and how far they have been rotated, so that a test can tell whether each cell's bytes are
the right ones (invariants 6 and 7) without computing any.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import numpy as np

from kvcellar.backends.base import Part
from kvcellar.errors import NotSupported
from kvcellar.types import ByteArray, CacheSpec, Float32Array, Int32Array, Int64Array


class NullStore:
    """A store that accepts everything and keeps nothing."""

    def __init__(self, spec: CacheSpec, *, can_shift: bool = True, can_copy: bool = True) -> None:
        self._spec = spec
        self._can_shift = can_shift
        self._can_copy = can_copy

    @property
    def spec(self) -> CacheSpec:
        """The shape that the store was made for."""
        return self._spec

    @property
    def can_shift(self) -> bool:
        """Whether rotating is allowed."""
        return self._can_shift

    @property
    def can_copy(self) -> bool:
        """Whether copying is allowed."""
        return self._can_copy

    def write(self, layer: int, cells: Int64Array, k: Float32Array, v: Float32Array) -> None:
        """Ignore the rows."""

    def read(self, layer: int, part: Part, cells: Int64Array) -> Float32Array:
        """There are no rows: raises NotSupported."""
        self._refuse(layer, part, cells)

    def read_raw(self, layer: int, part: Part, cells: Int64Array) -> ByteArray:  # noqa: ARG002
        """Rows of no byte."""
        return np.empty((len(cells), 0), np.uint8)

    def write_raw(self, layer: int, part: Part, cells: Int64Array, rows: ByteArray) -> None:
        """Ignore the rows."""

    def copy(self, src: Int64Array, dst: Int64Array) -> None:
        """Nothing to copy."""

    def rotate(self, cells: Int64Array, shifts: Int32Array) -> None:
        """Nothing to rotate."""

    def wipe(self, cells: Int64Array) -> None:
        """Nothing to wipe."""

    def zero(self) -> None:
        """Nothing to zero."""

    def resize(self, size: int, src: Int64Array, dst: Int64Array) -> None:  # noqa: ARG002
        """Nothing to move."""
        self._spec = replace(self._spec, size=size)

    def close(self) -> None:
        """Nothing to free."""

    def _refuse(self, layer: int, part: Part, cells: Int64Array) -> NoReturn:
        raise NotSupported(f"no {part} rows of cells {cells.tolist()} in layer {layer}")


class SignatureStore(NullStore):
    """For each cell, the content its rows hold and the position they are rotated to.

    Tests call :meth:`fill` where a backend would compute a plan.
    """

    def __init__(self, spec: CacheSpec, *, can_shift: bool = True, can_copy: bool = True) -> None:
        super().__init__(spec, can_shift=can_shift, can_copy=can_copy)
        self.content: Int64Array = np.full(spec.size, -1, np.int64)
        self.rotation: Int64Array = np.zeros(spec.size, np.int64)
        self.rotations = 0  # how many calls of rotate there were

    def fill(self, cells: Int64Array, content: Int64Array, positions: Int32Array) -> None:
        """Write fresh rows."""
        self.content[cells] = content
        self.rotation[cells] = positions

    def read_raw(self, layer: int, part: Part, cells: Int64Array) -> ByteArray:  # noqa: ARG002
        """The content of cells, and for K what it is rotated to."""
        arrays = (self.content, self.rotation) if part == "k" else (self.content,)
        return np.stack([array[cells] for array in arrays], axis=1).view(np.uint8)

    def write_raw(
        self,
        layer: int,  # noqa: ARG002
        part: Part,
        cells: Int64Array,
        rows: ByteArray,
    ) -> None:
        """Write rows that were read."""
        values = np.ascontiguousarray(rows).view(np.int64)
        self.content[cells] = values[:, 0]
        if part == "k":
            self.rotation[cells] = values[:, 1]

    def copy(self, src: Int64Array, dst: Int64Array) -> None:
        """Copy what cells hold."""
        if set(src.tolist()) & set(dst.tolist()):
            raise AssertionError("a cell is both source and target of a copy")
        self.content[dst] = self.content[src]
        self.rotation[dst] = self.rotation[src]

    def rotate(self, cells: Int64Array, shifts: Int32Array) -> None:
        """Rotate what cells hold."""
        self.rotations += 1
        self.rotation[cells] += shifts

    def wipe(self, cells: Int64Array) -> None:
        """Forget what cells hold."""
        self.content[cells] = -1
        self.rotation[cells] = 0

    def zero(self) -> None:
        """Forget everything."""
        self.content.fill(-1)
        self.rotation.fill(0)

    def resize(self, size: int, src: Int64Array, dst: Int64Array) -> None:
        """Move what cells hold to new arrays."""
        super().resize(size, src, dst)
        content, rotation = np.full(size, -1, np.int64), np.zeros(size, np.int64)
        content[dst], rotation[dst] = self.content[src], self.rotation[src]
        self.content, self.rotation = content, rotation
