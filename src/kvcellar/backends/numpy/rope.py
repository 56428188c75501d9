"""Rotary positions as the formula says: pairs of values turned by an angle each, in f64.

Pair i of a head turns by ``position * frequency[i]``. With YaRN a pair's frequency lies between
the stretched one and the original; pairs that turn often within the original context keep theirs.
"""

from __future__ import annotations

from math import log, pi

import numpy as np
import numpy.typing as npt

from kvcellar.types import Float32Array, Int32Array, RopeSpec

Float64Array = npt.NDArray[np.float64]


def rotated(
    x: Float32Array, positions: Int32Array, rope: RopeSpec, scale: float = 1.0
) -> Float32Array:
    """Heads ``[n, n_head, d]`` turned by n positions and scaled; the rest behind n_rot is kept."""
    angles = positions[:, np.newaxis] * frequencies(rope)  # [n, n_rot / 2]
    cos = scale * np.cos(angles)[:, np.newaxis]
    sin = scale * np.sin(angles)[:, np.newaxis]
    first, second = _pairs(rope)
    a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
    out: Float32Array = np.array(x, np.float32)
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def frequencies(rope: RopeSpec) -> Float64Array:
    """The angle by which each pair turns a position, ``[n_rot / 2]``."""
    pairs = np.arange(rope.n_rot // 2)
    original = np.power(float(rope.freq_base), -2.0 * pairs / rope.n_rot)
    if rope.factors is not None:
        original = original / np.asarray(rope.factors, np.float64)
    kept = _kept(rope)
    blended: Float64Array = original * (rope.freq_scale * (1.0 - kept) + kept)
    return blended


def magnitude(rope: RopeSpec) -> float:
    """What YaRN and the model scale rotated heads by when they are computed."""
    if rope.ext_factor == 0.0:
        return rope.attn_factor
    return rope.attn_factor * (1.0 + 0.1 * log(1.0 / rope.freq_scale))


def _kept(rope: RopeSpec) -> Float64Array:
    """How much of each pair's original frequency YaRN keeps."""
    pairs = np.arange(rope.n_rot // 2)
    if rope.ext_factor == 0.0:
        return np.zeros(len(pairs))
    with np.errstate(all="ignore"):  # absurd settings give NaN, and that shows in the logits
        low = np.maximum(0, np.floor(_pair_of(rope.beta_fast, rope)))
        high = np.minimum(rope.n_rot - 1, np.ceil(_pair_of(rope.beta_slow, rope)))
        ramp = np.clip((pairs - low) / np.maximum(0.001, high - low), 0.0, 1.0)
        kept: Float64Array = rope.ext_factor * (1.0 - ramp)
    return kept


def _pair_of(turns: float, rope: RopeSpec) -> np.float64:
    """Which pair, not a whole number, turns so often within the original context."""
    wave = np.float64(rope.n_ctx_orig) / (turns * 2.0 * pi)
    pair: np.float64 = rope.n_rot * np.log(wave) / (2.0 * np.log(np.float64(rope.freq_base)))
    return pair


def _pairs(rope: RopeSpec) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the first and the second value of each pair are."""
    half = np.arange(rope.n_rot // 2)
    return (2 * half, 2 * half + 1) if rope.mode == "normal" else (half, half + rope.n_rot // 2)
