"""GGUF files for the NumPy backend: metadata as plain values, tensors as f32 arrays.

The library ``gguf`` reads files and converts quantised types; it is imported at the first use,
since only this backend needs it. Values are what :mod:`kvcellar.backends.ggml.gguf` gives, so
models and tokenizers cannot tell. The library looks at each string on its own: a vocabulary of
50,000 takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from kvcellar.backends.base import TensorBytes
from kvcellar.errors import LibraryError, ModelFileError, UnsupportedModel
from kvcellar.files import FileStamp, open_regular, why
from kvcellar.types import AnyArray, ByteArray, Float32Array, KVType

_OF_THE_LIBRARY = "GGUF."  # keys that it adds, for example GGUF.version
_DAMAGE = (
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    MemoryError,
    RecursionError,
)


class GgufTensors:
    """An open GGUF file.

    Attributes:
        path: the file.
        stamp: its stamp when it was opened.
        metadata: key to int, float, bool, str, list of str, or NumPy array.

    Raises:
        ModelFileError: the file is missing, truncated, damaged or not GGUF.
        LibraryError: the library is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        file, self.stamp = _open(self.path)
        self.metadata: Mapping[str, object] = MappingProxyType(
            {
                key: _value(key, field)
                for key, field in file.fields.items()
                if not key.startswith(_OF_THE_LIBRARY)
            }
        )
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in file.tensors}

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.n_bytes for tensor in self._tensors.values())

    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._tensors.keys()

    def has(self, name: str) -> bool:
        """Whether the file has that tensor."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that the file must have, without leading ones."""
        return _stored_shape(tuple(int(n) for n in reversed(self._require(name).shape)))

    def type_name(self, name: str) -> str:
        """The GGUF name of a tensor's type."""
        return str(self._require(name).tensor_type.name).lower()

    def numbers(self, name: str) -> Float32Array:
        """A tensor as f32; a view of the file if it is that already.

        Raises:
            UnsupportedModel: no such tensor, or of a type that the library cannot read.
        """
        tensor = self._require(name)
        try:
            return quants().values(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = self.type_name(name)
            raise UnsupportedModel(f"tensor {name} has type {kind}, which has no product") from None

    def tensors(self) -> Iterator[TensorBytes]:
        """All tensors as they are stored, by their names."""
        for name, tensor in sorted(self._tensors.items()):
            data = np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)
            yield TensorBytes(name, self.type_name(name), self.shape(name), data)

    def close(self) -> None:
        """Unmap the file once nobody has a view of it."""
        self._tensors.clear()

    def _require(self, name: str) -> Any:
        if name not in self._tensors:
            raise UnsupportedModel(f"{self.path} has no tensor {name}")
        return self._tensors[name]


def _open(path: Path) -> tuple[Any, FileStamp]:
    base: Any = _require("gguf.gguf_reader").GGUFReader

    class BoundedReader(base):  # type: ignore[misc]
        """Refuses to read past the end, where the library would return nothing."""

        def _get(self, offset: Any, dtype: Any, count: Any = 1, *args: Any, **kwargs: Any) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if not 0 <= int(offset) <= end <= len(self.data):
                raise ModelFileError(f"{path} is truncated or damaged: it ends before byte {end}")
            return super()._get(offset, dtype, count, *args, **kwargs)

    try:
        with open_regular(path) as opened, np.errstate(all="ignore"):
            stamp = FileStamp.of(opened)
            file = BoundedReader(opened)  # NumPy maps what is open as it maps a path
    except OSError as error:
        raise ModelFileError(f"cannot open {path}: {why(error)}") from error
    except _DAMAGE as error:
        raise ModelFileError(f"{path} is not a usable GGUF file: {error}") from error
    if file.byte_order != "I":
        raise UnsupportedModel(f"{path} was written for machines of the other byte order")
    return file, stamp


def _value(key: str, field: Any) -> object:
    kinds = [kind.name for kind in field.types]
    parts: list[AnyArray] = [field.parts[i] for i in field.data]
    if kinds[-1] == "STRING":
        texts = [part.tobytes().decode("utf-8", "replace") for part in parts]
        return texts if kinds[0] == "ARRAY" else texts[0]
    if kinds[0] != "ARRAY":
        return parts[0][0].item()
    if kinds[1:2] == ["ARRAY"]:
        raise UnsupportedModel(f"metadata key {key} is an array of arrays")
    return np.concatenate(parts) if parts else []


def _stored_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


class NumpyWeights:
    """Model tensors by name. Implements ``Weights[Float32Array]``.

    Quantised ones are widened at the first use and kept so: four bytes a weight.
    """

    def __init__(self, file: GgufTensors) -> None:
        self._file = file
        self._arrays: dict[str, Float32Array] = {}

    def names(self) -> Iterable[str]:
        """The names of all tensors that the file has."""
        return self._file.names()

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
        """Free the arrays and unmap the file; closing twice is fine."""
        self._arrays.clear()
        self._file.close()

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self._file.shape(name)
        if (1,) * (len(shape) - len(stored)) + stored != shape or 0 in shape:
            raise ModelFileError(f"tensor {name} has shape {stored}, expected {shape}")


class Quants:
    """Blocks of quantised values, made and read by ``gguf.quants``."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library

    def quantize(self, rows: Float32Array, kind: KVType) -> ByteArray:
        """Rows of f32 as rows of blocks."""
        blocks: ByteArray = self._library.quantize(rows, self._type(kind.ggml_id))
        return blocks

    def dequantize(self, rows: ByteArray, kind: KVType) -> Float32Array:
        """Rows of blocks as rows of f32."""
        return self.values(rows, self._type(kind.ggml_id))

    def values(self, data: AnyArray, ggml_type: Any) -> Float32Array:
        """The numbers of a tensor as the library's reader gives it, ``[..., row]``.

        Raises:
            NotImplementedError: the library cannot read that type.
        """
        with np.errstate(all="ignore"):
            numbers: Float32Array = self._library.dequantize(data, ggml_type)
        return numbers

    def _type(self, ggml_id: int) -> Any:
        return self._library.GGMLQuantizationType(ggml_id)


@lru_cache(maxsize=1)
def quants() -> Quants:
    """The library's conversions.

    Raises:
        LibraryError: it is not installed.
    """
    return Quants(_require("gguf.quants"))


def _require(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise LibraryError(
            "the NumPy backend needs the package gguf: pip install 'kvcellar[numpy]'"
        ) from error
