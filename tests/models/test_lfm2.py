"""LFM2: which layers attend, and how far."""

from __future__ import annotations

import pytest

from kvcellar.errors import UnsupportedModel
from kvcellar.types import LayerMemory, LayerSpec, RopeSpec, StateLayer
from tests.models.tiny_recurrent import TINY_LFM2, load

ROPE = RopeSpec("neox", 4, n_ctx_orig=64)


def test_layers_without_heads_of_k_and_v_keep_two_inputs() -> None:
    attention = LayerMemory(LayerSpec(1, 4, 4, ROPE))
    assert TINY_LFM2.load().spec.layers == (attention, LayerMemory(state=StateLayer(2 * 8)))


def test_a_longer_convolution_keeps_more() -> None:
    tensors = TINY_LFM2.tensors(shortconv__conv__weight=(8, 5))
    layers = load(TINY_LFM2.metadata(shortconv__l_cache=5), tensors).spec.layers
    assert layers[1].state == StateLayer(n_conv=4 * 8, n_ssm=0)


@pytest.mark.parametrize("window", [0, 32])
def test_a_window_is_that_of_every_layer_that_attends(window: int) -> None:
    spec = TINY_LFM2.load(attention__sliding_window=window).spec
    assert [layer.window for layer in spec.attention_layers] == [window]


def test_experts_are_refused() -> None:
    TINY_LFM2.load(expert_count=0)
    with pytest.raises(UnsupportedModel, match=r"lfm2\.expert_count=2"):
        TINY_LFM2.load(expert_count=2)
