"""Snapshots in safetensors files, and in the values of stores.

safetensors says where arrays are and checks that they are within the file. Beyond that each array
has a hash in the description, and the description has one itself; nothing is used whose hash
differs. Hashes find damage, not forgery. So a snapshot is read only if its arrays are those that
the description needs, and as large: a small file cannot unfold into more than it is needed for.

Arrays may be compressed with zstd, an optional extra. The bytes of numbers are sorted by
significance first: exponents are alike, mantissas are not.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import xxhash
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save, save_file

from kvcellar._version import __version__
from kvcellar.errors import LibraryError, SnapshotFileError
from kvcellar.files import open_regular, why
from kvcellar.snapshot.atomic import replacing
from kvcellar.snapshot.native import (
    VERSION,
    Admit,
    Arrays,
    Declared,
    SnapshotArrays,
    from_arrays,
    outline,
    to_arrays,
)
from kvcellar.snapshot.snapshot import Snapshot
from kvcellar.types import AnyArray

FORMAT = "kvcellar-snapshot"

_DTYPES: Mapping[str, type[np.generic]] = {
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
}

_OS_ERROR = re.compile(r"\(os error ([0-9]{1,9})\)")
"""How safetensors quotes the number of an error of the system."""

Check: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Declared]], None]
"""Raises unless arrays are what a description needs."""

LEVEL = 3
MAX_RATIO = 1000
"""The largest ratio of compression: arrays that would become smaller are stored as they are."""


def read_snapshot(path: str | Path, admit: Admit | None = None) -> Snapshot:
    """Read the snapshot in a file.

    Args:
        path: the file.
        admit: called before any array is read; what it raises is raised.

    Raises:
        SnapshotFileError: the file is missing, no snapshot, of a later version, or damaged.
        LibraryError: it is compressed by a library that is not installed.
    """
    return from_arrays(read_file(Path(path), _check(admit)))


def write_snapshot(path: str | Path, snapshot: Snapshot, *, compress: bool) -> int:
    """Write a snapshot to a file; return its bytes. Raises as :func:`write_file` does."""
    return write_file(Path(path), to_arrays(snapshot), compress=compress)


def snapshot_from(value: bytes | bytearray | memoryview, admit: Admit | None = None) -> Snapshot:
    """Read the snapshot in a value of a store; see :func:`read_snapshot`."""
    return from_arrays(from_bytes(value, _check(admit)))


def _check(admit: Admit | None) -> Check:
    def check(about: Mapping[str, Any], declared: Mapping[str, Declared]) -> None:
        found = outline(about, declared)
        if admit is not None:
            admit(found)

    return check


def write_file(path: Path, packed: SnapshotArrays, *, compress: bool) -> int:
    """Write a file, whole or not at all; return its bytes.

    Raises:
        SnapshotFileError: it cannot be written; what was there is unchanged.
        LibraryError: compression needs a library that is not installed.
    """
    arrays, metadata = _finish(packed, compress)
    with replacing(path) as beside:
        try:
            save_file(arrays, beside, metadata)
        except SafetensorError as error:
            if (number := _OS_ERROR.search(str(error))) is not None:
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
            raise SnapshotFileError(f"cannot write {path}: {error}") from error
        return beside.stat().st_size


def read_file(path: Path, check: Check | None = None) -> SnapshotArrays:
    """Read a file.

    Args:
        path: the file.
        check: called with the description and what is said of the arrays, before these are read.

    Raises:
        SnapshotFileError: it is missing, no snapshot, of a later version, or damaged.
        LibraryError: it is compressed by a library that is not installed.
    """
    with _opened(path) as file:

        def declared(name: str) -> Declared:
            part = file.get_slice(name)
            return _declared(name, part.get_dtype(), part.get_shape())

        stored = {name: declared(name) for name in file.keys()}  # noqa: SIM118
        return _verified(file.metadata(), stored, file.get_tensor, check)


def read_description(path: Path) -> dict[str, Any]:
    """Read the description alone; its ``"arrays"`` lists the arrays, which are not read.

    ``"version"`` and ``"kvcellar"`` say what wrote it.

    Raises:
        SnapshotFileError: as for :func:`read_file`.
    """
    with _opened(path) as file:
        metadata = file.metadata()
        about = _description(metadata)
        return {**about, **{name: metadata.get(name) for name in ("version", "kvcellar")}}


def to_bytes(packed: SnapshotArrays, *, compress: bool) -> bytes:
    """Return what a file would hold."""
    arrays, metadata = _finish(packed, compress)
    return bytes(save(arrays, metadata))


def from_bytes(data: bytes | bytearray | memoryview, check: Check | None = None) -> SnapshotArrays:
    """Read what :func:`to_bytes` returned; see :func:`read_file`."""
    whole = bytes(data)
    try:
        found = dict(_deserialize(whole))
    except SafetensorError as error:
        raise SnapshotFileError(f"this is no snapshot: {error}") from error
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])

    def get(name: str) -> AnyArray:
        about = found[name]
        array: AnyArray = np.frombuffer(about["data"], stored[name].dtype).reshape(about["shape"])
        return array

    stored = {name: _declared(name, one["dtype"], one["shape"]) for name, one in found.items()}
    return _verified(header.get("__metadata__"), stored, get, check)


_deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = deserialize


def _finish(packed: SnapshotArrays, compress: bool) -> tuple[Arrays, dict[str, str]]:
    stored, about = Arrays(), dict[str, Any]()
    for name, array in packed.arrays.items():
        # A row of no bytes has nothing to hash; safetensors keeps its shape.
        plain = np.ascontiguousarray(array)
        kept, codec = pack(plain) if compress else (plain, None)
        stored[name] = kept
        about[name] = {"hash": _hash(kept), **({} if codec is None else codec)}
    body = json.dumps({**packed.description, "arrays": about}, separators=(",", ":"))
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "kvcellar": __version__,
        "description": body,
        "hash": _hash(body.encode()),
    }
    return stored, metadata


def _description(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    if metadata is None or metadata.get("format") != FORMAT:
        raise SnapshotFileError("this is no snapshot of kvcellar")
    version = metadata.get("version")
    if version != str(VERSION):
        made = metadata.get("kvcellar", "unknown")
        raise SnapshotFileError(
            f"format version {version}, written by kvcellar {made}; this one reads {VERSION}"
        )
    body = metadata.get("description", "")
    if _hash(body.encode("utf-8", "surrogatepass")) != metadata.get("hash"):
        raise SnapshotFileError("the description is damaged")
    try:
        about = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SnapshotFileError(f"the description is damaged: {error}") from error
    listed = about.get("arrays") if isinstance(about, dict) else None
    if not isinstance(listed, dict) or not set(map(type, listed.values())) <= {dict}:
        raise SnapshotFileError("the description is damaged: it lists no arrays")
    return dict(about)


def _verified(
    metadata: Mapping[str, str] | None,
    stored: Mapping[str, Declared],
    get: Callable[[str], AnyArray],
    check: Check | None,
) -> SnapshotArrays:
    about = _description(metadata)
    listed = about.pop("arrays")
    if set(listed) != set(stored):
        odd = sorted(set(listed) ^ set(stored))
        raise SnapshotFileError(f"arrays are missing or were added: {', '.join(odd[:3])}")
    if check is not None:
        packed = {name: _unpacked(one) for name, one in listed.items() if "codec" in one}
        check(about, {**stored, **packed})
    arrays = Arrays()
    for name, wanted in listed.items():
        try:
            array = get(name)
        except (ValueError, OverflowError) as error:  # a shape that NumPy cannot have
            raise SnapshotFileError(f"the array {name} is damaged: {error}") from error
        if _hash(array) != wanted.get("hash"):
            raise SnapshotFileError(f"the array {name} is damaged")
        arrays[name] = unpack(array, wanted) if "codec" in wanted else array
    return SnapshotArrays(arrays, about)


def _hash(data: AnyArray | bytes) -> str:
    """Hash bytes, or an array with its type and shape."""
    if isinstance(data, bytes):
        return xxhash.xxh3_128_hexdigest(data)
    state = xxhash.xxh3_128(f"{data.dtype.str}{data.shape}".encode())
    state.update(data.reshape(-1).view(np.uint8).data if data.size else b"")
    return state.hexdigest()


def _declared(name: str, dtype: str, shape: Sequence[int]) -> Declared:
    """Return what the header says of an array, if it is of a type that snapshots have."""
    if dtype not in _DTYPES:
        raise SnapshotFileError(f"the array {name} is damaged: it has type {dtype}")
    return Declared(np.dtype(_DTYPES[dtype]).str, tuple(shape))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file for reading; errors name it."""
    try:
        with open_regular(path) as checked, safe_open(_again(checked, path), "numpy") as file:
            yield file
    except SnapshotFileError as error:
        raise SnapshotFileError(f"{path}: {error}") from error
    except OSError as error:
        raise SnapshotFileError(f"cannot read {path}: {why(error)}") from error
    except SafetensorError as error:
        raise SnapshotFileError(f"cannot read {path}: {error}") from error


def _again(file: BinaryIO, path: Path) -> Path:
    """Return a path of an open file, for a library that opens files itself.

    Where the system has such paths, it is that very file, whatever is at its path by now.
    """
    link = Path(f"/proc/self/fd/{file.fileno()}")
    return link if os.access(link, os.R_OK) else path


# -- compression


def pack(array: AnyArray) -> tuple[AnyArray, dict[str, Any] | None]:
    """Compress an array; return bytes and how to unpack them, or itself and None if that is larger.

    Raises:
        LibraryError: the library is not installed.
    """
    library = _library()
    planes = array.reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T if array.size else array
    packed = library.ZstdCompressor(level=LEVEL).compress(planes.tobytes())
    if not array.nbytes // MAX_RATIO < len(packed) < array.nbytes:
        return array, None
    how = {"codec": "zstd", "dtype": array.dtype.str, "shape": list(array.shape)}
    return np.frombuffer(packed, np.uint8), how


def unpack(packed: AnyArray, how: Mapping[str, Any]) -> AnyArray:
    """Unpack an array, of at most ``MAX_RATIO`` times the bytes given.

    Raises:
        LibraryError: the library is not installed.
        SnapshotFileError: this was not packed here.
    """
    library = _library()
    try:
        dtype, shape = np.dtype(str(how["dtype"])), tuple(int(n) for n in how["shape"])
        n_bytes = dtype.itemsize * prod(shape)
        if how["codec"] != "zstd" or dtype.kind not in "uif" or min(shape, default=0) < 0:
            raise ValueError(f"codec {how['codec']!r}, {dtype}, {shape}")
        frame = packed.tobytes()
        if n_bytes > MAX_RATIO * len(frame):
            raise ValueError(f"{len(frame)} bytes would become {n_bytes}")
        if library.frame_content_size(frame) != n_bytes:
            raise ValueError(f"{library.frame_content_size(frame)} bytes for {n_bytes}")
        data = library.ZstdDecompressor().decompress(frame)
        planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
        array: AnyArray = np.ascontiguousarray(planes.T).reshape(-1).view(dtype).reshape(shape)
    except (ArithmeticError, LookupError, TypeError, ValueError, library.ZstdError) as error:
        raise SnapshotFileError(f"a compressed array is damaged: {error}") from error
    except MemoryError as error:
        raise SnapshotFileError("there is no memory for a compressed array") from error
    return array


def _unpacked(how: Mapping[str, Any]) -> Declared:
    """Return what :func:`unpack` would give."""
    try:
        dtype, shape = np.dtype(str(how["dtype"])), tuple(int(n) for n in how["shape"])
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise SnapshotFileError(f"a compressed array is damaged: {error}") from error
    return Declared(dtype.str, shape)


def _library() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise LibraryError(
            'compressed snapshots need zstandard: pip install "kvcellar[zstd]"'
        ) from error
    return zstandard
