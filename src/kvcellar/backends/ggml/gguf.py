"""Reading GGUF files: metadata as plain values, tensors mapped into memory, never copied.

ggml's own reader parses the header. What it does not check (that the tensor data lie within the
file, that arrays are of a sane size) is checked here, since a damaged file must give an error.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np

from kvcellar.backends.ggml.binding import TYPE_F32, Ggml, GgufInitParams, InitParams, array_at
from kvcellar.backends.ggml.library import Library, load
from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.files import FileStamp, open_regular, why

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

    Attributes:
        path: the file.
        stamp: its stamp when it was opened.
        metadata: key to int, float, bool, str, list of str, or NumPy array.
        tensors: name to place.
        address: where its first byte is in memory; valid as long as this object lives.
        data: its bytes, ``[n_bytes]``; valid as long.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._map, self.stamp = _map_file(self.path)
        self.address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)
        self.data = array_at(self.address, np.uint8, (len(self._map),))
        try:
            self._parse(load())
        except BaseException:
            self._map.close()
            raise

    def _parse(self, library: Library) -> None:
        api = library.api
        params = GgufInitParams(no_alloc=True, ctx=None)
        handle = api.gguf_init_from_buffer(self.address, len(self._map), params)
        if not handle:
            reason = library.take_error() or "the header does not parse"
            raise ModelFileError(f"{self.path} is not a usable GGUF file: {reason}")
        try:
            self.metadata = MappingProxyType(_read_metadata(api, handle))
            self.tensors = MappingProxyType(_read_tensors(api, handle))
        finally:
            api.gguf_free(handle)
        self._check_extent()

    def _check_extent(self) -> None:
        end = max((t.offset + t.n_bytes for t in self.tensors.values()), default=0)
        if end > len(self._map):
            raise ModelFileError(
                f"{self.path} is truncated: its tensors end at byte {end}, the file at "
                f"{len(self._map)}; download it again"
            )


def _map_file(path: Path) -> tuple[mmap.mmap, FileStamp]:
    try:
        with open_regular(path) as file:
            stamp = FileStamp.of(file)
            magic = file.read(4)
            if magic != b"GGUF":
                raise ModelFileError(f"{path} is not a GGUF file: it begins with {magic!r}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), stamp
    except OSError as error:
        raise ModelFileError(f"cannot open {path}: {why(error)}") from error
    except ValueError as error:  # it became empty just now
        raise ModelFileError(f"cannot map {path}: {error}") from error


def _read_metadata(api: Ggml, handle: int) -> dict[str, object]:
    values: dict[str, object] = {}
    for i in range(api.gguf_get_n_kv(handle)):
        key = api.gguf_get_key(handle, i).decode("utf-8", "replace")
        values[key] = _read_value(api, handle, i)
    return values


def _read_value(api: Ggml, handle: int, i: int) -> object:
    kind = api.gguf_get_kv_type(handle, i)
    if kind == _ARRAY:
        return _read_array(api, handle, i)
    if kind == _STRING:
        return api.gguf_get_val_str(handle, i).decode("utf-8", "replace")
    value: object = array_at(api.gguf_get_val_data(handle, i), _DTYPES[kind], (1,))[0].item()
    return value


def _read_array(api: Ggml, handle: int, i: int) -> object:
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


def _read_tensors(api: Ggml, handle: int) -> dict[str, TensorInfo]:
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
_UNUSABLE = frozenset({"f64", "i8", "i16", "i32", "i64", "q8_1", "q8_K"})  # no product exists


class GgmlWeights:
    """Model tensors by name; a tensor is its C address. Implements ``Weights[int]``.

    The file stays mapped until :meth:`close`; pages are read when first used.
    """

    _context: int | None = None

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._api = load().api
        self._tensors: dict[str, int] = {}
        self._check_alignment()
        n = len(file.tensors)
        size = (n + 1) * self._api.ggml_tensor_overhead()
        self._context = self._api.ggml_init(InitParams(size, None, True))
        self._buffer: int | None = self._api.ggml_backend_cpu_buffer_from_ptr(
            file.address, len(file.data)
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
        data = array_at(self._file.address + info.offset, "f4", (n,))
        return tuple(float(x) for x in data)

    def close(self) -> None:
        """Free the tensors and unmap the file; closing twice is fine."""
        if self._context is None:
            return
        self._api.ggml_free(self._context)
        self._api.ggml_backend_buffer_free(self._buffer)
        self._context = self._buffer = None
        self._tensors.clear()

    def __del__(self) -> None:
        self.close()

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
            ne = [*reversed(info.shape), 1, 1, 1][:4]
            tensor = self._api.ggml_new_tensor_4d(self._context, info.ggml_type, *ne)
            self._api.ggml_set_name(tensor, info.name.encode()[:63])
            address = self._file.address + info.offset
            self._api.ggml_backend_tensor_alloc(self._buffer, tensor, address)
            self._tensors[info.name] = tensor
        return self._tensors[info.name]
