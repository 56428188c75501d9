"""RoPE's settings as GGUF files give them."""

from __future__ import annotations

from math import isfinite
from typing import Literal

from kvcellar.backends.operations import Weights
from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.models.hparams import HyperParams
from kvcellar.types import RopeSpec

_SCALINGS = ("none", "linear", "yarn")
FACTORS = "rope_freqs.weight"
"""The tensor of frequency factors, in files that have one set of them."""


def read_rope(
    hp: HyperParams,
    weights: Weights[object],
    mode: Literal["normal", "neox"],
    head_dim: int,
    factors: str = FACTORS,
) -> RopeSpec:
    """The settings of ``{arch}.rope.*`` and of the tensor of frequency factors, if there is one.

    Files with several sets of factors, of which one is named here, may call that "longrope".

    Raises:
        ModelFileError: a rotary dimension that does not fit the head, or a number out of range.
        UnsupportedModel: a scaling type other than none, linear and yarn; or another parameter of
            YaRN than those of :class:`RopeSpec`.
    """
    n_rot = hp.size(".rope.dimension_count", head_dim)
    if n_rot > head_dim or n_rot % 2:
        raise ModelFileError(f"rope.dimension_count={n_rot}: must be even and at most {head_dim}")
    scaling = hp.text(".rope.scaling.type", "linear")
    known = _SCALINGS if factors == FACTORS else (*_SCALINGS, "longrope")
    if scaling not in known:
        raise UnsupportedModel(f"rope.scaling.type={scaling!r}: known are {', '.join(known)}")
    hp.only(".rope.scaling.yarn_attn_factor", 1.0)
    return RopeSpec(
        mode=mode,
        n_rot=n_rot,
        freq_base=hp.positive(".rope.freq_base", 10000.0),
        freq_scale=_freq_scale(hp, scaling),
        ext_factor=_ext_factor(hp, scaling),
        attn_factor=hp.positive(".rope.scaling.attn_factor", 1.0),
        beta_fast=hp.positive(".rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=hp.positive(".rope.scaling.yarn_beta_slow", 1.0),
        n_ctx_orig=_original_context(hp),
        factors=_factors(weights, factors, n_rot),
    )


def _freq_scale(hp: HyperParams, scaling: str) -> float:
    """One over the factor that positions are stretched by; a factor of 0 means "not given"."""
    factor = hp.number(".rope.scaling.factor", 0.0) or hp.number(".rope.scale_linear", 0.0)
    if factor < 0.0:
        raise ModelFileError(f"rope.scaling.factor={factor}: must not be negative")
    return 1.0 if scaling == "none" or factor == 0.0 else 1.0 / factor


def _ext_factor(hp: HyperParams, scaling: str) -> float:
    """How much of YaRN's extrapolation is mixed in; negative means "by the type"."""
    given = hp.number(".rope.scaling.yarn_ext_factor", -1.0)
    by_type = 1.0 if scaling == "yarn" else 0.0
    return by_type if given < 0.0 else given


def _original_context(hp: HyperParams) -> int:
    given = hp.count(".rope.scaling.original_context_length", 0)
    return given or hp.size(".context_length")


def _factors(weights: Weights[object], name: str, n_rot: int) -> tuple[float, ...] | None:
    if not weights.has(name):
        return None
    factors = weights.values(name, n_rot // 2)
    if not all(x != 0.0 and isfinite(x) for x in factors):
        raise ModelFileError(f"{name}: the factors must be finite and not zero")
    return factors
