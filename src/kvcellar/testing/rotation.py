"""Rotary positions once more, a number at a time: the oracle of what backends do to K rows.

A pair of values is a complex number; moving a key by p positions multiplies it by ``e^(i p f)``.
"""

from __future__ import annotations

import cmath
from math import ceil, floor, log, pi

import numpy as np
import numpy.typing as npt

from kvcellar.types import Float32Array, LayerSpec, RopeSpec


def rotated_rows(
    rows: npt.ArrayLike, positions: npt.ArrayLike, layer: LayerSpec
) -> npt.NDArray[np.float64]:
    """K rows ``[n, n_embd_k]`` of a layer, each turned by its number of positions."""
    out = np.array(rows, np.float64)
    if layer.rope is None:
        return out
    turns = [naive_frequency(layer.rope, i) for i in range(layer.rope.n_rot // 2)]
    for row, position in zip(out, np.asarray(positions).tolist(), strict=True):
        for head in row.reshape(layer.n_head_kv, layer.head_dim_k):
            for i, turn in enumerate(turns):
                a, b = pair(layer.rope, i)
                value = complex(head[a], head[b]) * cmath.exp(1j * position * turn)
                head[a], head[b] = value.real, value.imag
    return out


def pair(rope: RopeSpec, i: int) -> tuple[int, int]:
    """Where the two values of a head's pair i are."""
    return (2 * i, 2 * i + 1) if rope.mode == "normal" else (i, i + rope.n_rot // 2)


def naive_frequency(rope: RopeSpec, i: int) -> float:
    """The angle by which pair i turns a position."""
    own = float(rope.freq_base ** (-2 * i / rope.n_rot))
    if rope.factors is not None:
        own /= rope.factors[i]
    stretched = own * rope.freq_scale
    if rope.ext_factor == 0:
        return stretched
    kept = rope.ext_factor * _kept(rope, i)
    return (1 - kept) * stretched + kept * own


def _kept(rope: RopeSpec, i: int) -> float:
    """1 for pairs that turn more than beta_fast times within the original context, 0 below slow."""

    def pair_with(turns: float) -> float:
        wave = rope.n_ctx_orig / (turns * 2 * pi)
        return rope.n_rot * log(wave) / (2 * log(rope.freq_base))

    first = max(floor(pair_with(rope.beta_fast)), 0)
    last = min(ceil(pair_with(rope.beta_slow)), rope.n_rot - 1)
    return 1 - min(max((i - first) / max(last - first, 0.001), 0), 1)


def random_rows(n: int, width: int, seed: int = 0) -> Float32Array:
    """Rows of numbers in [-2, 2)."""
    rng = np.random.default_rng(seed)
    return np.asarray(rng.uniform(-2, 2, (n, width)), np.float32)
