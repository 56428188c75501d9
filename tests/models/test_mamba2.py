"""Mamba 2: what its layers keep, and sizes that contradict each other."""

from __future__ import annotations

import pytest

from kvcellar.errors import ModelFileError
from kvcellar.types import LayerMemory, StateLayer
from tests.models.tiny_recurrent import TINY_MAMBA2, load


def test_b_and_c_are_convolved_too() -> None:
    spec = TINY_MAMBA2.load().spec
    assert spec.layers == (LayerMemory(state=StateLayer(n_conv=3 * 24, n_ssm=16 * 4)),)
    assert spec.attention_layers == ()


def test_each_group_has_its_own_b_and_c() -> None:
    wider = {"ssm_conv1d__weight": (32, 4), "ssm_in__weight": (50, 8), "ssm_norm__weight": (2, 8)}
    tensors = TINY_MAMBA2.tensors(**wider)
    (layer,) = load(TINY_MAMBA2.metadata(ssm__group_count=2), tensors).spec.layers
    assert layer.state == StateLayer(n_conv=3 * 32, n_ssm=16 * 4)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("ssm__time_step_rank", 3, "16 channels, 3 heads (ssm.time_step_rank) and 1 groups"),
        ("ssm__group_count", 4, "16 channels, 2 heads (ssm.time_step_rank) and 4 groups"),
        ("ssm__inner_size", 15, "15 channels, 2 heads (ssm.time_step_rank) and 1 groups"),
    ],
)
def test_sizes_must_be_multiples(key: str, value: int, said: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        TINY_MAMBA2.load(**{key: value})
    assert said in str(caught.value)
