"""Jamba: which layers attend, and its mixtures of experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.models.blocks import Decoder, Dense, Experts
from kvcellar.testing.uncached import uncached_logits
from kvcellar.types import LayerMemory, LayerSpec, StateLayer
from tests.models.tiny_recurrent import TINY_JAMBA, load

N_EXPERT = 3
RECURRENT = LayerMemory(state=StateLayer(n_conv=3 * 16, n_ssm=16 * 4))


def _with_experts(n_used: int = 2) -> Decoder[Any]:
    """The last layer's feed-forward is a mixture of three that are alike."""
    tensors = TINY_JAMBA.random(
        ffn_gate_inp__weight=(N_EXPERT, 8),
        ffn_gate_exps__weight=(N_EXPERT, 6, 8),
        ffn_up_exps__weight=(N_EXPERT, 6, 8),
        ffn_down_exps__weight=(N_EXPERT, 8, 6),
    )
    for kind in ("gate", "up", "down"):
        del tensors[f"blk.1.ffn_{kind}.weight"]
    for name in tensors:
        if "_exps" in name:
            tensors[name][1:] = tensors[name][0]
    keys = {"expert_count": N_EXPERT, "expert_used_count": n_used}
    return load(TINY_JAMBA.metadata(**keys), tensors)


def test_layers_without_heads_of_k_and_v_are_recurrent() -> None:
    spec = TINY_JAMBA.load().spec
    assert spec.layers == (LayerMemory(LayerSpec(1, 4, 4, rope=None)), RECURRENT)


def test_heads_of_q_may_be_given_a_layer_too() -> None:
    spec = TINY_JAMBA.load(attention__head_count=np.array([2, 0], np.int32)).spec
    assert spec.layers == TINY_JAMBA.load().spec.layers


@pytest.mark.parametrize("n_head", [[0, 2], [3, 0]])
def test_heads_must_fit_those_of_k_and_v(n_head: list[int]) -> None:
    counts = {
        "attention__head_count": np.array(n_head, np.int32),
        "attention__head_count_kv": np.array([2, 0], np.int32),
    }
    with pytest.raises(ModelFileError, match=f"layer 0 has {n_head[0]} heads over 2 K/V heads"):
        TINY_JAMBA.load(**counts)


def test_a_layer_with_a_router_is_a_mixture() -> None:
    blocks = _with_experts()._blocks
    assert isinstance(blocks[0].ffn, Dense)
    assert isinstance(blocks[1].ffn, Experts)


def test_shares_of_the_chosen_do_not_sum_to_one() -> None:
    """Of experts that are alike, one gives less than all together."""
    one, all_of_them = (uncached_logits(_with_experts(n), [1, 2, 3]) for n in (1, N_EXPERT))
    assert np.isfinite(one).all()
    assert not np.allclose(one, all_of_them, rtol=1e-2)


def test_more_experts_used_than_there_are_is_refused() -> None:
    with pytest.raises(ModelFileError, match="expert_used_count=4: the file has 3 experts"):
        _with_experts(4)


@pytest.mark.parametrize("key", ["attention__sliding_window", "expert_shared_count"])
def test_what_the_family_lacks_is_refused(key: str) -> None:
    TINY_JAMBA.load(**{key: 0})
    with pytest.raises(UnsupportedModel, match=f"jamba.{key.replace('__', '.')}=2"):
        TINY_JAMBA.load(**{key: 2})
