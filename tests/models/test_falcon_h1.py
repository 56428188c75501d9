"""Falcon-H1: layers that keep both kinds, and tensors that not every size has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcellar.errors import UnsupportedModel
from kvcellar.models.falcon_h1 import SideBySide
from kvcellar.testing.uncached import uncached_logits
from kvcellar.types import Float32Array, LayerMemory, LayerSpec, RopeSpec, StateLayer
from tests.models.tiny_recurrent import TINY_FALCON, load


def _logits(tensors: dict[str, Any]) -> Float32Array:
    return uncached_logits(load(TINY_FALCON.metadata(), tensors), [1, 2, 3, 4])


def test_a_layer_keeps_both_kinds() -> None:
    rope = RopeSpec("neox", 4, n_ctx_orig=64)
    state = StateLayer(n_conv=3 * 24, n_ssm=16 * 4)
    assert TINY_FALCON.load().spec.layers == (LayerMemory(LayerSpec(1, 4, 4, rope), state),)


def test_the_norm_of_the_feed_forward_has_two_names() -> None:
    tensors = TINY_FALCON.random()
    other = dict(tensors)
    other["blk.0.ffn_norm"] = other.pop("blk.0.ffn_norm.weight")
    np.testing.assert_array_equal(_logits(other), _logits(tensors))


def test_the_norm_of_the_mixer_is_used_where_there_is_one() -> None:
    tensors = TINY_FALCON.random(ssm_norm__weight=(1, 16))
    without = dict(tensors)
    del without["blk.0.ssm_norm.weight"]
    has_none = []
    for given in (tensors, without):
        mixer = load(TINY_FALCON.metadata(), given)._blocks[0].mixer
        assert isinstance(mixer, SideBySide)
        has_none.append(mixer.mamba.norm is None)
    assert has_none == [False, True]
    assert not np.allclose(_logits(tensors), _logits(without))


@pytest.mark.parametrize("name", ["blk.0.attn_output.bias", "rope_freqs.weight"])
def test_what_llama_cpp_leaves_out_is_left_out(name: str) -> None:
    tensors = TINY_FALCON.random()
    more = {name: np.full(2 if name.startswith("rope") else 8, 3, np.float32)}
    np.testing.assert_array_equal(_logits(tensors | more), _logits(tensors))


def test_other_biases_count() -> None:
    tensors = TINY_FALCON.random()
    for name, n in (("attn_q", 8), ("ffn_gate", 6), ("ssm_conv1d", 24)):
        more = {f"blk.0.{name}.bias": np.linspace(-1, 1, n, dtype=np.float32)}
        assert not np.allclose(_logits(tensors | more), _logits(tensors), rtol=1e-3), name


@pytest.mark.parametrize("key", ["attention__sliding_window", "expert_count"])
def test_what_the_family_lacks_is_refused(key: str) -> None:
    TINY_FALCON.load(**{key: 0})
    with pytest.raises(UnsupportedModel, match=f"falcon-h1.{key.replace('__', '.')}=2"):
        TINY_FALCON.load(**{key: 2})
