"""Models as dictionaries: weights that are only their shapes and types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvcellar.errors import ModelFileError, UnsupportedModel


class ShapeWeights:
    """``Weights`` over NumPy arrays; a tensor is its array."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = dict(tensors)

    def names(self) -> Iterable[str]:
        """The names of all arrays."""
        return self.tensors.keys()

    def has(self, name: str) -> bool:
        """Whether there is such an array."""
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        shape: tuple[int, ...] = self._get(name).shape
        return shape

    def matrix(self, name: str, *shape: int) -> np.ndarray[Any, Any]:
        """The array, if it has that shape."""
        if self.shape(name) != shape:
            raise ModelFileError(f"tensor {name} has shape {self.shape(name)}, expected {shape}")
        return self._get(name)

    def vector(self, name: str, *shape: int) -> np.ndarray[Any, Any]:
        """The array, if it has that shape."""
        return self.matrix(name, *shape)

    def values(self, name: str, n: int) -> tuple[float, ...]:
        """Its numbers."""
        return tuple(float(x) for x in self.vector(name, n))

    def _get(self, name: str) -> np.ndarray[Any, Any]:
        if name not in self.tensors:
            raise UnsupportedModel(f"there is no tensor {name}")
        array: np.ndarray[Any, Any] = self.tensors[name]
        return array
