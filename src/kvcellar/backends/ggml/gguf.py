"""Reading GGUF files: metadata as plain values, tensors mapped into memory, never copied.

ggml's own reader parses the header. What it does not check (that the tensor data lie within the
file, that arrays are of a sane size) is checked here, since a damaged file must give an error.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvcellar.backends.ggml.binding import TYPE_F32, Ggml, GgufInitParams, Owned, array_at
from kvcellar.backends.ggml.library import Library, load
from kvcellar.backends.memory import check_room
from kvcellar.errors import AllocationError, ClosedError, ModelFileError, UnsupportedModel
from kvcellar.files import FileStamp, open_regular, why
from kvcellar.types import ByteArray

_STRING, _ARRAY = 8, 9
_DTYPES: Mapping[int, type[np.generic]] = MappingProxyType(
    {
        0: np.uint8,
        1: np.int8,
        2: np.uint16,
        3: np.int16,
        4: np.uint32,
        5: np.int32,
        6: np.float32,
        7: np.bool_,
        10: np.uint64,
        11: np.int64,
        12: np.float64,
    }
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file. ``shape`` is the NumPy way: rows first."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    offset: int  # from the start of the file
    n_bytes: int


class GgufFile:
    """An open GGUF file.

    It stays mapped until it is closed or dropped, and as long as there are views of its data.

    Attributes:
        path: the file.
        stamp: its stamp when it was opened.
        metadata: key to int, float, bool, str, list of str, or NumPy array.
        tensors: name to place.
        address: where its first byte is in memory, until it is closed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        data, self.stamp = _map_file(self.path)
        self._data: ByteArray | None = data
        self.address: int = self.data.ctypes.data
        self._parse(load())

    @property
    def data(self) -> ByteArray:
        """Its bytes, ``[n_bytes]``; a view, which keeps them mapped."""
        if self._data is None:
            raise ClosedError(f"{self.path} is closed with its model")
        return self._data

    def close(self) -> None:
        """Unmap the file as soon as nobody has a view of it; closing twice is fine."""
        self._data = None

    def _parse(self, library: Library) -> None:
        api, n_bytes = library.api, len(self.data)
        check_room("the header of a model file", min(n_bytes * _HEADER_FACTOR, _LARGEST_HEADER))
        params = GgufInitParams(no_alloc=True, ctx=None)
        handle = api.make("gguf_init_from_buffer", self.address, n_bytes, params)
        if handle.is_closed:
            reason = library.take_error() or "the header does not parse"
            raise ModelFileError(f"{self.path} is not a usable GGUF file: {reason}")
        self.metadata = MappingProxyType(_read_metadata(api, handle))
        self.tensors = MappingProxyType(_read_tensors(api, handle))
        handle.close()
        self._check_extent(n_bytes)

    def _check_extent(self, n_bytes: int) -> None:
        end = max((t.offset + t.n_bytes for t in self.tensors.values()), default=0)
        if end > n_bytes:
            raise ModelFileError(
                f"{self.path} is truncated: its tensors end at byte {end}, the file at "
                f"{n_bytes}; download it again"
            )


def _map_file(path: Path) -> tuple[ByteArray, FileStamp]:
    """The bytes of a file, mapped as long as there is a view of them, and its stamp."""
    try:
        with open_regular(path) as file:
            stamp = FileStamp.of(file)
            magic = file.read(4)
            if magic != b"GGUF":
                raise ModelFileError(f"{path} is not a GGUF file: it begins with {magic!r}")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            return np.frombuffer(mapped, np.uint8), stamp
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise AllocationError(f"mapping {path}", path.stat().st_size, _FREE_MEMORY) from None
        raise ModelFileError(f"cannot open {path}: {why(error)}") from error
    except ValueError as error:  # it became empty just now
        raise ModelFileError(f"cannot map {path}: {error}") from error


def _read_metadata(api: Ggml, handle: Owned) -> dict[str, object]:
    values: dict[str, object] = {}
    for i in range(api.gguf_get_n_kv(handle)):
        key = api.gguf_get_key(handle, i).decode("utf-8", "replace")
        values[key] = _read_value(api, handle, i)
    return values


def _read_value(api: Ggml, handle: Owned, i: int) -> object:
    kind = api.gguf_get_kv_type(handle, i)
    if kind == _ARRAY:
        return _read_array(api, handle, i)
    if kind == _STRING:
        return api.gguf_get_val_str(handle, i).decode("utf-8", "replace")
    value: object = array_at(api.gguf_get_val_data(handle, i), _DTYPES[kind], (1,))[0].item()
    return value


def _read_array(api: Ggml, handle: Owned, i: int) -> object:
    kind = api.gguf_get_arr_type(handle, i)
    n = api.gguf_get_arr_n(handle, i)
    if kind == _STRING:
        get = api.gguf_get_arr_str
        # Tokens need not be UTF-8; two of them must not become the same text.
        return [get(handle, i, j).decode("utf-8", "surrogateescape") for j in range(n)]
    if kind == _ARRAY:
        raise UnsupportedModel(f"metadata key {i} is an array of arrays")
    if n == 0:
        return np.empty(0, dtype=_DTYPES[kind])
    return array_at(api.gguf_get_arr_data(handle, i), _DTYPES[kind], (n,)).copy()


def _read_tensors(api: Ggml, handle: Owned) -> dict[str, TensorInfo]:
    start = api.gguf_get_data_offset(handle)
    infos: dict[str, TensorInfo] = {}
    for i in range(api.gguf_get_n_tensors(handle)):
        name = api.gguf_get_tensor_name(handle, i).decode("utf-8", "replace")
        ne = api.gguf_get_tensor_ne(handle, i)
        kind = api.gguf_get_tensor_type(handle, i)
        shape = tuple(int(ne[d]) for d in reversed(range(4)))
        infos[name] = TensorInfo(
            name=name,
            shape=stored_shape(shape),
            ggml_type=kind,
            type_name=api.ggml_type_name(kind).decode(),
            offset=start + api.gguf_get_tensor_offset(handle, i),
            n_bytes=prod(shape) // api.ggml_blck_size(kind) * api.ggml_type_size(kind),
        )  # ggml's own size may have wrapped around
    return infos


def stored_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape as files give it: they do not tell ``(1, n)`` from ``(n,)``."""
    first = next((i for i, n in enumerate(shape[:-1]) if n != 1), len(shape) - 1)
    return shape[first:]


_ALIGNMENT = 32  # what ggml's CPU buffers ask for
_HEADER_FACTOR, _LARGEST_HEADER = 8, 2**28
"""A header takes at most eight times its bytes when it is read: a string of a few bytes becomes an
object of 32, and a list is copied while it grows. Vocabularies of 10 MiB are large already."""
_FREE_MEMORY = "close other models, or raise the limit of this process"
_UNUSABLE = frozenset({"f64", "i8", "i16", "i32", "i64", "q8_1", "q8_K"})  # no product exists


class _Weight(NamedTuple):
    """A tensor, and the ggml context it is in: it is known as a whole or not at all."""

    tensor: int
    context: Owned


class GgmlWeights:
    """Model tensors by name; a tensor is its C address. Implements ``Weights[int]``.

    The file stays mapped until :meth:`close`; pages are read when first used.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._api = load().api
        self._tensors: dict[str, _Weight] = {}
        self._check_alignment()
        self._buffer = self._api.make(
            "ggml_backend_cpu_buffer_from_ptr", file.address, len(file.data)
        )

    def names(self) -> Iterable[str]:
        """The names of all tensors that the file has."""
        return self._file.tensors.keys()

    def has(self, name: str) -> bool:
        """Whether the file has that tensor."""
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that the file must have."""
        return self._require(name).shape

    def matrix(self, name: str, *shape: int) -> int:
        """A weight of any type that products take; see ``Weights.matrix``."""
        info = self._info(name, shape)
        if info.type_name in _UNUSABLE:
            raise UnsupportedModel(f"tensor {name} has type {info.type_name}, which has no product")
        return self._tensor(info)

    def vector(self, name: str, *shape: int) -> int:
        """A norm, bias or the like, of f32 values; see ``Weights.vector``."""
        return self._tensor(self._f32(name, *shape))

    def values(self, name: str, n: int) -> tuple[float, ...]:
        """The numbers of a small f32 tensor; see ``Weights.values``."""
        info = self._f32(name, n)
        data = self._file.data[info.offset : info.offset + info.n_bytes].view("f4")
        return tuple(float(x) for x in data)

    def close(self) -> None:
        """Free the tensors and unmap the file; closing twice is fine."""
        self._tensors = {}
        self._buffer.close()
        self._file.close()

    def _check_alignment(self) -> None:
        for info in self._file.tensors.values():
            if (self._file.address + info.offset) % _ALIGNMENT:
                raise UnsupportedModel(
                    f"tensor {info.name} begins at byte {info.offset}, which is not a multiple of "
                    f"{_ALIGNMENT}: convert the file with general.alignment = 32"
                )

    def _require(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(name)
        if info is None:
            raise UnsupportedModel(f"{self._file.path} has no tensor {name}")
        return info

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._require(name)
        if info.shape != stored_shape(shape) or 0 in shape:
            raise ModelFileError(f"tensor {name} has shape {info.shape}, expected {shape}")
        return info

    def _f32(self, name: str, *shape: int) -> TensorInfo:
        info = self._info(name, shape)
        if info.ggml_type != TYPE_F32:
            raise UnsupportedModel(f"tensor {name} has type {info.type_name}, expected f32")
        return info

    def _tensor(self, info: TensorInfo) -> int:
        if info.name not in self._tensors:
            self._tensors[info.name] = self._make(info)
        return self._tensors[info.name].tensor

    def _make(self, info: TensorInfo) -> _Weight:
        api, buffer = self._api, self._buffer.address
        context = api.context(f"tensor {info.name}", 2 * api.ggml_tensor_overhead())
        ne = [*reversed(info.shape), 1, 1, 1][:4]
        tensor: int = api.ggml_new_tensor_4d(context, info.ggml_type, *ne)
        api.ggml_set_name(tensor, info.name.encode()[:63])
        api.ggml_backend_tensor_alloc(buffer, tensor, self._file.address + info.offset)
        return _Weight(tensor, context)
