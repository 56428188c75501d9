"""Finding the library ``gguf``, which reads GGUF files and knows the quantised types.

It is imported when first needed, since only this backend wants it.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from kvcellar.errors import LibraryError
from kvcellar.types import AnyArray, ByteArray, Float32Array, KVType


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


def reader() -> Any:
    """The library's class that reads files.

    Raises:
        LibraryError: it is not installed.
    """
    return _require("gguf.gguf_reader").GGUFReader


def _require(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise LibraryError(
            "the NumPy backend needs the package gguf: pip install 'kvcellar[numpy]'"
        ) from error
