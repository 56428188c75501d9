"""The tensors of a GGUF file as f32 arrays."""

from __future__ import annotations

from kvcellar.backends.numpy.gguf import GgufTensors
from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.types import Float32Array


class NumpyWeights:
    """Model tensors by name. Implements ``Weights[Float32Array]``.

    Quantised ones are widened when first asked for, and kept so: four bytes a weight.
    """

    def __init__(self, file: GgufTensors) -> None:
        self._file = file
        self._arrays: dict[str, Float32Array] = {}

    def has(self, name: str) -> bool:
        """Whether the file has that tensor."""
        return self._file.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that the file must have."""
        return self._file.shape(name)

    def matrix(self, name: str, *shape: int) -> Float32Array:
        """A weight of any type that the library can read; see ``Weights.matrix``."""
        self._check(name, shape)
        if name not in self._arrays:
            self._arrays[name] = self._file.numbers(name)
        return self._arrays[name].reshape(shape)

    def vector(self, name: str, *shape: int) -> Float32Array:
        """A norm, bias or the like, of f32 values; see ``Weights.vector``."""
        self._check(name, shape)
        kind = self._file.type_name(name)
        if kind != "f32":
            raise UnsupportedModel(f"tensor {name} has type {kind}, expected f32")
        return self.matrix(name, *shape)

    def values(self, name: str, n: int) -> tuple[float, ...]:
        """The numbers of a small f32 tensor; see ``Weights.values``."""
        return tuple(float(x) for x in self.vector(name, n))

    def close(self) -> None:
        """Let go of the arrays and the file; closing twice is fine."""
        self._arrays.clear()
        self._file.close()

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self._file.shape(name)
        if (1,) * (len(shape) - len(stored)) + stored != shape or 0 in shape:
            raise ModelFileError(f"tensor {name} has shape {stored}, expected {shape}")
