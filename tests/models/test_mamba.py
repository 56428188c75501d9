"""Mamba: what its layers keep, and what its files may say."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.errors import UnsupportedModel
from kvcellar.types import LayerMemory, StateLayer
from tests.models.tiny_recurrent import TINY_MAMBA, load


def test_a_layer_keeps_three_inputs_and_a_state_a_channel() -> None:
    spec = TINY_MAMBA.load().spec
    assert spec.layers == (LayerMemory(state=StateLayer(n_conv=3 * 16, n_ssm=16 * 4)),)
    assert spec.attention_layers == ()


def test_a_shorter_convolution_keeps_less() -> None:
    tensors = TINY_MAMBA.tensors(ssm_conv1d__weight=(16, 1))
    (layer,) = load(TINY_MAMBA.metadata(ssm__conv_kernel=1), tensors).spec.layers
    assert layer.state == StateLayer(n_conv=0, n_ssm=64)


def test_files_may_say_that_they_have_no_heads() -> None:
    none = {"attention__head_count": 0, "attention__head_count_kv": 0, "feed_forward_length": 0}
    assert TINY_MAMBA.load(**none).spec.layers == TINY_MAMBA.load().spec.layers
    TINY_MAMBA.load(attention__head_count=np.array([0], np.int32))


def test_norms_without_weights_are_refused() -> None:
    TINY_MAMBA.load(ssm__dt_b_c_rms=False)
    with pytest.raises(UnsupportedModel, match=r"mamba\.ssm\.dt_b_c_rms=True"):
        TINY_MAMBA.load(ssm__dt_b_c_rms=True)
