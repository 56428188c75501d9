"""A small writer of GGUF files (version 3), for tests that need a model of their own making.

It writes what it is told, sound or not: models with a tensor too few, or of a wrong shape or
type, are what it is for.

1. Tensors begin at multiples of ``alignment`` from the start of the data, in the order given.
2. Python numbers become u32 (u64, i64 where they do not fit) and f32; NumPy scalars and arrays
   keep their type.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Value: TypeAlias = "bool | int | float | str | list[str] | np.generic | npt.NDArray[Any]"

_KINDS = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "uint32": 4,
    "int32": 5,
    "float32": 6,
    "bool": 7,
    "uint64": 10,
    "int64": 11,
    "float64": 12,
}
_STRING, _ARRAY = 8, 9
_TENSOR_KINDS = {"float32": 0, "float16": 1, "int8": 24, "int16": 25, "int32": 26, "float64": 28}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor given as bytes, for types that NumPy lacks. The shape is the NumPy way."""

    ggml_type: int
    shape: tuple[int, ...]
    data: bytes


Tensor: TypeAlias = "npt.NDArray[Any] | RawTensor"


def gguf_bytes(
    metadata: Mapping[str, Value], tensors: Mapping[str, Tensor], alignment: int = 32
) -> bytes:
    """A GGUF file as bytes; NumPy tensors may be f16, f32, f64, i8, i16 or i32."""
    raw = {name: _raw(tensor) for name, tensor in tensors.items()}
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(raw), len(metadata))]
    parts += [_string(key) + _typed(value) for key, value in metadata.items()]
    offset = 0
    for name, tensor in raw.items():
        parts.append(_tensor_info(name, tensor, offset))
        offset += len(_padded(tensor.data, alignment))
    header = _padded(b"".join(parts), alignment)
    return header + b"".join(_padded(tensor.data, alignment) for tensor in raw.values())


def write_gguf(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, Tensor],
) -> Path:
    """Write a GGUF file; returns its path."""
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def _raw(tensor: Tensor) -> RawTensor:
    if isinstance(tensor, RawTensor):
        return tensor
    kind = _TENSOR_KINDS[tensor.dtype.name]
    return RawTensor(kind, tensor.shape, np.ascontiguousarray(tensor).tobytes())


def _tensor_info(name: str, tensor: RawTensor, offset: int) -> bytes:
    n_dims = len(tensor.shape)
    dims = struct.pack(f"<I{n_dims}Q", n_dims, *reversed(tensor.shape))
    return _string(name) + dims + struct.pack("<IQ", tensor.ggml_type, offset)


def _typed(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, list):
        items = b"".join(_string(item) for item in value)
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + items
    if isinstance(value, np.ndarray):
        kind = _KINDS[value.dtype.name]
        return struct.pack("<IIQ", _ARRAY, kind, value.size) + value.tobytes()
    scalar = _scalar(value)
    return struct.pack("<I", _KINDS[scalar.dtype.name]) + scalar.tobytes()


def _scalar(value: bool | int | float | np.generic) -> np.generic:
    if isinstance(value, np.generic):
        return value
    scalar: np.generic = np.dtype(_scalar_kind(value)).type(value)
    return scalar


def _scalar_kind(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, float):
        return "float32"
    if value < 0:
        return "int64"
    return "uint32" if value < 2**32 else "uint64"


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)
