"""Typed, checked reading of GGUF metadata for the tokenizer.

The mapping comes from a file that may be damaged or hostile. Every function here either returns a
value of the type it promises or raises :class:`TokenizerError` naming the key and what it found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kvcellar.errors import TokenizerError
from kvcellar.types import Float32Array, Int32Array

Metadata = Mapping[str, object]


def describe(value: object) -> str:
    """A value as shown in an error: short, whatever its size."""
    if isinstance(value, str | int | float):
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    if isinstance(value, Sequence):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype} {value.shape}"
    return type(value).__name__


def read_string(metadata: Metadata, key: str) -> str | None:
    """The string under a key; None where there is no such key."""
    value = metadata.get(key)
    if value is None or isinstance(value, str):
        return value
    raise TokenizerError(f"{key} must be a string, found {describe(value)}")


def read_flag(metadata: Metadata, key: str, default: bool) -> bool:
    """The boolean under a key, or the default."""
    value = metadata.get(key, default)
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TokenizerError(f"{key} must be true or false, found {describe(value)}")


def read_token_id(metadata: Metadata, key: str, n_vocab: int) -> int | None:
    """The token id under a key; None where there is no such key.

    Raises:
        TokenizerError: not an integer, or outside the vocabulary.
    """
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TokenizerError(f"{key} must be a token id, found {describe(value)}")
    if not 0 <= value < n_vocab:
        raise TokenizerError(f"{key} = {value} is outside the vocabulary of {n_vocab} tokens")
    return int(value)


def read_strings(metadata: Metadata, key: str) -> list[str]:
    """The list of strings under a key.

    Raises:
        TokenizerError: absent, or not a list of strings.
    """
    value = metadata.get(key)
    if value is None:
        raise TokenizerError(f"{key} is missing: the file has no vocabulary for this tokenizer")
    # An empty GGUF array has no element type worth keeping, so it may arrive as a NumPy array.
    if isinstance(value, np.ndarray) and value.size == 0:
        return []
    if not isinstance(value, list | tuple):
        raise TokenizerError(f"{key} must be a list of strings, found {describe(value)}")
    if set(map(type, value)) - {str}:
        bad = next(i for i, item in enumerate(value) if type(item) is not str)
        raise TokenizerError(f"{key}[{bad}] must be a string, found {describe(value[bad])}")
    return list(value)


def read_ints(metadata: Metadata, key: str, length: int) -> Int32Array | None:
    """The integers under a key, exactly ``length`` of them; None where there is no such key."""
    array = _read_numbers(metadata, key, length)
    if array is None:
        return None
    if array.dtype.kind not in "iu":
        raise TokenizerError(f"{key} must hold integers, found {describe(array)}")
    info = np.iinfo(np.int32)
    if array.size and (array.min() < info.min or array.max() > info.max):
        raise TokenizerError(f"{key} holds values beyond 32 bits: {array.max()}")
    return array.astype(np.int32)


def read_floats(metadata: Metadata, key: str, length: int) -> Float32Array | None:
    """The numbers under a key, exactly ``length``, none NaN; None where there is no such key."""
    array = _read_numbers(metadata, key, length)
    if array is None:
        return None
    floats = array.astype(np.float32)
    if floats.size and math.isnan(float(floats.max())):
        raise TokenizerError(f"{key} holds NaN at index {int(np.isnan(floats).argmax())}")
    return floats


def _read_numbers(metadata: Metadata, key: str, length: int) -> np.ndarray | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iuf":
        raise TokenizerError(f"{key} must be an array of numbers, found {describe(value)}")
    if len(value) != length:
        raise TokenizerError(f"{key} has {len(value)} entries for a vocabulary of {length} tokens")
    return value
