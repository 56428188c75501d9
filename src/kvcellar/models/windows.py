"""Which layers of a model see only a window."""

from __future__ import annotations

import numpy as np

from kvcellar.errors import ModelFileError
from kvcellar.models.hparams import HyperParams

_PATTERN = ".attention.sliding_window_pattern"


def read_windows(
    hp: HyperParams, n_layer: int, period: int, default: int | None = None
) -> tuple[int, ...]:
    """The window of each layer, 0 where it sees everything.

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


def _check_alike(hp: HyperParams) -> None:
    """See that layers with a window have the heads and the rotation size of the others."""
    for key in (".attention.key_length", ".attention.value_length", ".rope.dimension_count"):
        if hp.has(key):
            hp.only(f"{key}_swa", hp.count(key))
        else:
            hp.absent(f"{key}_swa")
