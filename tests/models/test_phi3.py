"""Phi-3: gate and up in one matrix, RoPE's factors."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.errors import ModelFileError
from kvcellar.testing.uncached import uncached_logits
from kvcellar.types import RopeSpec
from tests.models.tiny import D, load, tensors

TEXT = [3, 1, 4, 1, 5]


def _rope(model_keys: dict[str, object], **tensors: object) -> RopeSpec:
    named = {f"rope_factors_{name}.weight": tensor for name, tensor in tensors.items()}
    (layer,) = load("phi3", named, **model_keys).spec.attention_layers
    assert layer.rope is not None
    return layer.rope


def test_the_long_factors_are_used() -> None:
    long, short = np.full(D // 2, 3, np.float32), np.full(D // 2, 2, np.float32)
    assert _rope({}, long=long, short=short).factors == (3.0,) * 4


def test_a_model_without_factors_has_none() -> None:
    assert _rope({}, long=None).factors is None


def test_files_may_call_that_longrope() -> None:
    rope = _rope({"rope__scaling__type": "longrope", "rope__scaling__attn_factor": 1.2})
    assert (rope.attn_factor, rope.ext_factor, rope.mode) == (1.2, 0.0, "neox")


def test_only_a_part_of_a_head_may_be_rotated() -> None:
    rope = _rope({"rope__dimension_count": 6}, long=np.ones(3, np.float32))
    assert rope.n_rot == 6


@pytest.mark.parametrize("factors", [[1, 2, 3], [1, 2, 3, 0], [1, 2, 3, np.nan]])
def test_factors_that_do_not_fit_are_named(factors: list[float]) -> None:
    with pytest.raises(ModelFileError, match=r"rope_factors_long\.weight"):
        _rope({}, long=np.array(factors, np.float32))


def test_a_window_is_not_applied() -> None:
    """As in llama.cpp; see the page of the family."""
    (layer,) = load("phi3", attention__sliding_window=2).spec.attention_layers
    assert layer.window == 0


def test_gate_rows_lie_before_up_rows() -> None:
    """Equal to a Qwen2 that has them apart, but for the factors."""
    parts = tensors("qwen2")
    both = np.concatenate([parts["blk.0.ffn_gate.weight"], parts["blk.0.ffn_up.weight"]])
    same = {name: part for name, part in parts.items() if "ffn_gate" not in name}
    fused = load("phi3", {**same, "blk.0.ffn_up.weight": both, "rope_factors_long.weight": None})
    got, wanted = uncached_logits(fused, TEXT), uncached_logits(load("qwen2"), TEXT)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
