"""Which layers of a model see only a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from kvcellar.errors import ModelFileError
from kvcellar.models.attention import Attention
from kvcellar.models.hparams import HyperParams
from kvcellar.models.reader import Reader
from kvcellar.types import RopeSpec

T = TypeVar("T")

_PATTERN = ".attention.sliding_window_pattern"


def read_windows(
    hp: HyperParams, n_layer: int, period: int, default: int | None = None
) -> tuple[int, ...]:
    """The window of each layer, 0 where it sees everything; a file's window of 0 is none.

    Files say which layers have one by a flag a layer, or by a number n: every n-th has none.

    Args:
        hp: the hyper-parameters.
        n_layer: how many layers there are.
        period: that number where the file gives neither.
        default: the window where the file gives none; None: it must.

    Raises:
        ModelFileError: flags that are not as many as layers.
        UnsupportedModel: no window, or layers with one that have other heads than the rest.
    """
    window = hp.count(".attention.sliding_window", default)
    _check_alike(hp)
    pattern = hp.array(_PATTERN)
    if pattern is None:
        n = hp.count(_PATTERN, period)
        flags = [n == 0 or i % n < n - 1 for i in range(n_layer)]
    else:
        if pattern.shape != (n_layer,) or pattern.dtype.kind not in "biu":
            raise ModelFileError(f"{hp.arch}{_PATTERN}: expected {n_layer} flags")
        flags = [bool(flag) for flag in pattern.astype(np.bool_)]
    return tuple(window if flag else 0 for flag in flags)


def windowed(
    file: Reader[T], windows: Sequence[int], rope: RopeSpec, near: RopeSpec
) -> list[Attention[T]]:
    """The attention of every layer, rotated as ``near`` says where the layer has a window."""
    return [file.attention(i, near if window else rope, window) for i, window in enumerate(windows)]


def near_rope(hp: HyperParams, rope: RopeSpec, default: float | None = None) -> RopeSpec:
    """How layers with a window are rotated: by a base of their own, where the file gives one."""
    base = hp.positive(".rope.freq_base_swa", default or rope.freq_base)
    return replace(rope, freq_base=base)


def _check_alike(hp: HyperParams) -> None:
    """Check that layers with a window have the heads and the rotation size of the others."""
    for key in (".attention.key_length", ".attention.value_length", ".rope.dimension_count"):
        if hp.has(key):
            hp.only(f"{key}_swa", hp.count(key))
        else:
            hp.absent(f"{key}_swa")
