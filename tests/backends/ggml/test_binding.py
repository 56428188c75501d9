"""Views of C memory."""

from __future__ import annotations

import ctypes

import numpy as np

from kvcellar.backends.ggml import binding


def test_a_view_writes_through() -> None:
    raw = (ctypes.c_float * 6)(*range(6))
    view = binding.array_at(ctypes.addressof(raw), np.float32, (2, 3))
    view[1, 2] = 7
    assert raw[5] == 7
    assert view.flags.writeable


def test_an_empty_view() -> None:
    raw = (ctypes.c_float * 1)()
    assert binding.array_at(ctypes.addressof(raw), "f4", (0, 3)).shape == (0, 3)
