"""Hyper-parameters of a GGUF file, read by key with a clear error for what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any

import numpy as np

from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.types import AnyArray

_MAX_COUNT = 2**31 - 1  # ggml takes sizes as C ints
_MAX_FLOAT = float(np.finfo(np.float32).max)  # and numbers as C floats


class HyperParams:
    """Typed access to a file's metadata; ``{arch}.`` is put before keys that begin with a dot."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.arch = self.text("general.architecture")

    def has(self, key: str) -> bool:
        """Whether the file has that key."""
        return self._full(key) in self._metadata

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number that is not negative and below 2**31."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refused(key, value, "a count")
        if not 0 <= value <= _MAX_COUNT:
            raise self._refused(key, value, f"a count in [0, {_MAX_COUNT}]")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A count above zero."""
        value = self.count(key, default)
        if value == 0:
            raise self._refused(key, value, "a count above zero")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number that is finite as an f32."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refused(key, value, "a number")
        if not abs(value) <= _MAX_FLOAT:
            raise self._refused(key, value, "a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.number(key, default)
        if value <= 0.0:
            raise self._refused(key, value, "a number above zero")
        return value

    def cap(self, key: str, default: float | None = None) -> float:
        """A finite number that is not negative; 0 is none."""
        value = self.number(key, default)
        if value < 0.0:
            raise self._refused(key, value, "a number that is not negative")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._refused(key, value, "a string")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or False."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._refused(key, value, "true or false")
        return value

    def array(self, key: str) -> AnyArray | None:
        """An array of numbers; None where the key is absent or has one value."""
        value = self._metadata.get(self._full(key))
        return value if isinstance(value, np.ndarray) else None

    def only(self, key: str, *values: object) -> None:
        """Raise UnsupportedModel unless the key is absent or has one of these values.

        Of an array, each element must be one of them.
        """
        value = self._metadata.get(self._full(key))
        given = value.ravel().tolist() if isinstance(value, np.ndarray) else [value]
        if value is not None and not all(item in values for item in given):
            known = " or ".join(map(str, values))
            raise UnsupportedModel(
                f"{self._full(key)}={shortened(value)}: only {known} is supported"
            )

    def absent(self, *keys: str) -> None:
        """Raise UnsupportedModel if one of these is there with another value than 0."""
        for key in keys:
            self.only(key, 0)

    def per_layer(
        self, key: str, n_layer: int, default: int | None = None, least: int = 1
    ) -> tuple[int, ...]:
        """A count of at least 1 (or 0) a layer; files give one number for all or an array."""
        value = self._get(key, default)
        if not isinstance(value, np.ndarray):
            one = self.size(key, default) if least else self.count(key, default)
            return (one,) * n_layer
        if value.shape != (n_layer,) or not np.issubdtype(value.dtype, np.integer):
            raise self._refused(key, value, f"{n_layer} counts")
        sizes = tuple(int(x) for x in value)
        if not all(least <= x <= _MAX_COUNT for x in sizes):
            raise self._refused(key, value, "counts above zero" if least else "counts")
        return sizes

    def _refused(self, key: str, value: object, expected: str) -> ModelFileError:
        return ModelFileError(f"{self._full(key)}={shortened(value)}: expected {expected}")

    def _full(self, key: str) -> str:
        return f"{self.arch}{key}" if key.startswith(".") else key

    def _get(self, key: str, default: Any) -> object:
        value = self._metadata.get(self._full(key), default)
        if value is None:
            raise UnsupportedModel(f"the file lacks the hyper-parameter {self._full(key)}")
        return value
