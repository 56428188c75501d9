"""RoPE's settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.models.hparams import HyperParams
from kvcellar.models.rope import read_rope
from kvcellar.types import RopeSpec
from tests.models.helpers import ShapeWeights


def _read(head_dim: int = 64, factors: Any = None, **keys: Any) -> RopeSpec:
    metadata: dict[str, object] = {"general.architecture": "m", "m.context_length": 2048}
    metadata.update({f"m.rope.{key.replace('__', '.')}": value for key, value in keys.items()})
    tensors = {} if factors is None else {"rope_freqs.weight": np.asarray(factors, np.float32)}
    return read_rope(HyperParams(metadata), ShapeWeights(tensors), "neox", head_dim)


def test_nothing_given() -> None:
    assert _read() == RopeSpec("neox", 64, n_ctx_orig=2048)


def test_base_and_dimension() -> None:
    rope = _read(freq_base=5e5, dimension_count=32)
    assert (rope.freq_base, rope.n_rot) == (5e5, 32)


@pytest.mark.parametrize("n_rot", [66, 63, 1, 2**20])
def test_a_dimension_must_be_even_and_fit_the_head(n_rot: int) -> None:
    with pytest.raises(ModelFileError, match=rf"dimension_count={n_rot}: must be even and at most"):
        _read(dimension_count=n_rot)


def test_an_odd_head_cannot_be_rotated_whole() -> None:
    with pytest.raises(ModelFileError, match="must be even"):
        _read(head_dim=7)


@pytest.mark.parametrize(
    "key",
    ["freq_base", "scaling__attn_factor", "scaling__yarn_beta_fast", "scaling__yarn_beta_slow"],
)
@pytest.mark.parametrize("value", [0.0, -10000.0, float("nan"), float("inf"), "x"])
def test_numbers_must_be_above_zero(key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=r"m\.rope\."):
        _read(**{key: value})


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({"scaling__type": "linear", "scaling__factor": 4.0}, 0.25),
        ({"scaling__factor": 4.0}, 0.25),
        ({"scale_linear": 2.0}, 0.5),
        ({"scaling__factor": 0.0}, 1.0),
        ({"scaling__type": "none", "scaling__factor": 4.0}, 1.0),
        ({"scaling__type": "yarn", "scaling__factor": 8.0}, 0.125),
    ],
)
def test_scaling(keys: dict[str, Any], scale: float) -> None:
    assert _read(**keys).freq_scale == scale


def test_a_negative_factor_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"rope\.scaling\.factor=-2\.0"):
        _read(scaling__factor=-2.0)


def test_yarn_extrapolates_unless_the_file_says_otherwise() -> None:
    assert _read(scaling__type="yarn").ext_factor == 1.0
    assert _read(scaling__type="linear").ext_factor == 0.0
    assert _read(scaling__type="yarn", scaling__yarn_ext_factor=0.5).ext_factor == 0.5
    assert _read(scaling__type="yarn", scaling__yarn_ext_factor=-1.0).ext_factor == 1.0


def test_yarn_s_parameters() -> None:
    rope = _read(
        scaling__type="yarn",
        scaling__original_context_length=512,
        scaling__attn_factor=1.5,
        scaling__yarn_beta_fast=16.0,
        scaling__yarn_beta_slow=2.0,
    )
    assert (rope.n_ctx_orig, rope.attn_factor) == (512, 1.5)
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 2.0)


@pytest.mark.parametrize("kind", ["longrope", "", "YARN"])
def test_an_unknown_scaling_is_unsupported(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"known are none, linear, yarn"):
        _read(scaling__type=kind)


def test_factors() -> None:
    assert _read(head_dim=4, factors=[1, 2.5]).factors == (1.0, 2.5)


def test_factors_must_be_as_many_as_pairs() -> None:
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
        _read(head_dim=4, factors=[1, 2, 3])


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_factors_must_divide(bad: float) -> None:
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight: the factors must be finite"):
        _read(head_dim=4, factors=[1, bad])


def test_another_set_of_factors_may_be_named() -> None:
    hp = HyperParams({"general.architecture": "m", "m.context_length": 8})
    weights = ShapeWeights({"long.weight": np.array([3, 4], np.float32)})
    assert read_rope(hp, weights, "neox", 4, "long.weight").factors == (3.0, 4.0)
    assert read_rope(hp, weights, "neox", 4, "short.weight").factors is None


def test_longrope_is_known_where_there_are_several_sets() -> None:
    keys = {"m.context_length": 8, "m.rope.scaling.type": "longrope"}
    hp = HyperParams({"general.architecture": "m", **keys})
    rope = read_rope(hp, ShapeWeights({}), "neox", 4, "long.weight")
    assert (rope.freq_scale, rope.ext_factor) == (1.0, 0.0)
    with pytest.raises(UnsupportedModel, match=r"known are none, linear, yarn$"):
        read_rope(hp, ShapeWeights({}), "neox", 4)


def test_yarn_s_second_factor_is_refused() -> None:
    assert _read(scaling__yarn_attn_factor=1.0).attn_factor == 1.0
    with pytest.raises(UnsupportedModel, match=r"yarn_attn_factor=2\.0"):
        _read(scaling__yarn_attn_factor=2.0)
