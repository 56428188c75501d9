"""Which backends there are, and opening a model file with one of them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvcellar.backends.base import ModelFile
from kvcellar.errors import OptionError

BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "ggml": "kvcellar.backends.ggml.model_file:GgmlModelFile",
        "numpy": "kvcellar.backends.numpy.model_file:NumpyModelFile",
    }
)
"""Name to ``module:class``; modules are imported when needed."""


def open_model_file(path: str | Path, backend: str, n_threads: int | None) -> ModelFile[Any]:
    """Open a GGUF file with a backend.

    Raises:
        OptionError: there is no such backend.
        ModelFileError: the file is missing, truncated, damaged or not GGUF.
        LibraryError: the backend's library cannot be used.
    """
    if backend not in BACKENDS:
        raise OptionError(f"backend={backend!r}: one of {', '.join(BACKENDS)}")
    module, _, name = BACKENDS[backend].partition(":")
    opened: ModelFile[Any] = getattr(import_module(module), name)(path, n_threads)
    return opened
