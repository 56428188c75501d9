"""Views of C memory as NumPy arrays."""

from __future__ import annotations

import ctypes as c
from typing import Any

import numpy as np
import numpy.typing as npt


def array_at(address: int, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A writable view of C memory; the caller keeps the memory alive."""
    wanted = np.dtype(dtype)
    n_bytes = wanted.itemsize * int(np.prod(shape, dtype=np.int64))
    raw = (c.c_uint8 * n_bytes).from_address(address)
    view: npt.NDArray[Any] = np.frombuffer(memoryview(raw), dtype=wanted).reshape(shape)
    return view
