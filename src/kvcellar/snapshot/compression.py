"""Arrays compressed with zstd, an optional extra.

The bytes of numbers are sorted by significance first: exponents are alike, mantissas are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from kvcellar.errors import LibraryError, SnapshotFileError
from kvcellar.types import AnyArray

LEVEL = 3
MAX_RATIO = 1000
"""Arrays that would become smaller than that are stored as they are: none unfolds to more."""


def pack(array: AnyArray) -> tuple[AnyArray, dict[str, Any] | None]:
    """Compressed bytes and how to undo it; the array itself and None if that gains nothing.

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
    """The array that was packed; never more than ``MAX_RATIO`` times the bytes given.

    Raises:
        LibraryError: the library is not installed.
        SnapshotFileError: this is not how we pack.
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


def _library() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise LibraryError(
            'compressed snapshots need zstandard: pip install "kvcellar[zstd]"'
        ) from error
    return zstandard
