"""DeepSeek 2: latent attention, dense layers first, shared experts, YaRN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.models.attention import LatentAttention
from kvcellar.models.deepseek2 import Deepseek2
from kvcellar.testing.uncached import uncached_logits
from kvcellar.types import LayerSpec
from tests.models.tiny import N_EMBD, N_HEAD, load

TEXT = list(range(10))
YARN: dict[str, Any] = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 40.0,
    "rope__scaling__original_context_length": 8,
}
STRETCH = float(np.log(40.0))


def _attention(**edits: Any) -> LatentAttention[Any]:
    model = load("deepseek2", **edits)
    assert isinstance(model, Deepseek2)
    mixer = model._blocks[0].mixer
    assert isinstance(mixer, LatentAttention)
    return mixer


def test_a_cell_holds_what_is_rotated_and_then_a_compressed_row_that_is_v_too() -> None:
    layers = load("deepseek2").spec.attention_layers
    rope = layers[0].rope
    assert rope is not None
    assert (rope.mode, rope.n_rot) == ("normal", 4)
    assert layers == (LayerSpec(1, 14, 10, rope, v_offset=4),) * 2
    assert (layers[0].n_embd_k, layers[0].n_embd_v) == (14, 0)


def test_a_file_with_k_and_v_s_matrices_in_one_is_refused_by_name() -> None:
    old = {f"blk.{i}.attn_{name}.weight": None for i in (0, 1) for name in ("k_b", "v_b")}
    joined = {"blk.0.attn_kv_b.weight": np.ones((44, 10), np.float32)}
    with pytest.raises(UnsupportedModel, match=r"attn_kv_b where attn_k_b and attn_v_b .* again"):
        load("deepseek2", {**old, **joined}, attention__head_count_kv=4)


def test_queries_may_have_one_matrix() -> None:
    parts = ("q_a.weight", "q_a_norm.weight", "q_b.weight")
    less = {f"blk.{i}.attn_{name}": None for i in (0, 1) for name in parts}
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q\.weight"):
        load("deepseek2", less, attention__q_lora_rank=0)
    one = {f"blk.{i}.attn_q.weight": np.ones((N_HEAD * 10, N_EMBD), np.float32) for i in (0, 1)}
    model = load("deepseek2", {**less, **one}, attention__q_lora_rank=0)
    assert np.isfinite(uncached_logits(model, TEXT)).all()


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"attention__key_length": 15}, "heads of 15 and 10 values, expected 14 and 10"),
        ({"attention__value_length": 9}, "heads of 14 and 9 values, expected 14 and 10"),
        ({"attention__kv_lora_rank": 11}, "heads of 14 and 10 values, expected 15 and 11"),
        ({"attention__key_length_mla": 4}, "key_length_mla=4: must be above the 4 values"),
        ({"rope__dimension_count": 5}, "dimension_count=5: must be even"),
        ({"attention__value_length_mla": 6}, "attn_v_b"),
        ({"expert_count": 0}, "expert_count=0"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(edits: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        load("deepseek2", **edits)


@pytest.mark.parametrize("gating", [3, 4, 77])
def test_another_way_to_choose_experts_is_refused(gating: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"expert_gating_func={gating}"):
        load("deepseek2", expert_gating_func=gating)


@pytest.mark.parametrize(
    ("key", "value"),
    [("expert_group_count", 8), ("attention__head_count_kv", 4), ("nextn_predict_layers", 1)],
)
def test_what_we_lack_is_refused(key: str, value: int) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{key.replace('__', '.')}={value}"):
        load("deepseek2", **{key: value})


def test_experts_are_chosen_and_weighted_as_the_file_says() -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"expert_gating_func": 1},
        {"expert_weights_norm": False},
        {"expert_weights_scale": 1.0},
    ]
    logits = [uncached_logits(load("deepseek2", **way), TEXT) for way in ways]
    for i, one in enumerate(logits):
        assert not any(np.allclose(one, other, rtol=1e-3) for other in logits[:i])


def test_the_first_layers_are_dense() -> None:
    with pytest.raises(UnsupportedModel, match=r"blk\.1\.ffn_gate\.weight"):
        load("deepseek2", leading_dense_block_count=2)
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_gate_shexp\.weight"):
        load("deepseek2", leading_dense_block_count=0)


def test_scores_are_scaled_by_the_size_of_a_whole_head() -> None:
    assert _attention().scale == pytest.approx(10**-0.5)


def test_yarn_without_a_multiplier_sharpens_scores_and_rotated_parts() -> None:
    attention, sharper = _attention(**YARN), 1 + 0.1 * STRETCH
    assert attention.scale == pytest.approx(sharper**2 * 10**-0.5)
    assert attention.rope.attn_factor == 1.0


@pytest.mark.parametrize("multiplier", [0.1, 0.0707])
def test_yarn_with_one_sharpens_scores_alone(multiplier: float) -> None:
    attention = _attention(**YARN, rope__scaling__yarn_log_multiplier=multiplier)
    assert attention.scale == pytest.approx((1 + multiplier * STRETCH) ** 2 * 10**-0.5)
    assert attention.rope.attn_factor == pytest.approx(1 / (1 + 0.1 * STRETCH))


@pytest.mark.parametrize("factor", [1e-30, 4.5399929e-05, 0.5, 3e38])
def test_absurd_stretching_is_no_division_by_zero(factor: float) -> None:
    keys = {**YARN, "rope__scaling__factor": factor, "rope__scaling__yarn_log_multiplier": 0.1}
    assert _attention(**keys).scale > 0
