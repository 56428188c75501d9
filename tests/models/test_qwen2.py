"""Qwen2: biases, an output matrix of its own or not."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.errors import ModelFileError
from kvcellar.testing.uncached import uncached_logits
from tests.models.tiny import KV, N_EMBD, N_VOCAB, Q, load, tensors

TEXT = [3, 1, 4, 1, 5]


def test_halves_of_a_head_are_rotated_and_nothing_is_windowed() -> None:
    (layer,) = load("qwen2").spec.attention_layers
    assert layer.rope is not None
    assert (layer.rope.mode, layer.rope.n_rot, layer.window) == ("neox", 8, 0)
    assert (layer.n_head_kv, layer.head_dim_k, layer.head_dim_v) == (2, 8, 8)


@pytest.mark.parametrize(
    ("name", "n"),
    [("blk.0.attn_q", Q), ("blk.0.attn_k", KV), ("blk.0.attn_v", KV), ("output", N_VOCAB)],
)
def test_a_bias_counts(name: str, n: int) -> None:
    bias = np.linspace(-1, 2, n, dtype=np.float32)
    biased = load("qwen2", {f"{name}.bias": bias})
    assert not np.allclose(uncached_logits(load("qwen2"), TEXT), uncached_logits(biased, TEXT))
    with pytest.raises(ModelFileError, match=rf"{name}\.bias"):
        load("qwen2", {f"{name}.bias": bias[1:]})


def test_an_output_bias_is_added_to_the_logits() -> None:
    bias = np.linspace(-1, 2, N_VOCAB, dtype=np.float32)
    plain, biased = load("qwen2"), load("qwen2", {"output.bias": bias})
    got = uncached_logits(biased, TEXT) - uncached_logits(plain, TEXT)
    np.testing.assert_allclose(got, np.tile(bias, (5, 1)), atol=1e-5)


def test_one_matrix_for_q_k_and_v_is_the_same_as_three() -> None:
    parts = tensors("qwen2")
    names = [f"blk.0.attn_{name}.weight" for name in "qkv"]
    fused = dict.fromkeys(names)
    joined = {**fused, "blk.0.attn_qkv.weight": np.concatenate([parts[name] for name in names])}
    got = uncached_logits(load("qwen2", joined), TEXT)
    np.testing.assert_allclose(got, uncached_logits(load("qwen2"), TEXT), rtol=1e-4, atol=1e-5)


def test_the_embedding_or_a_matrix_of_its_own_gives_logits() -> None:
    own = np.ones((N_VOCAB, N_EMBD), np.float32)
    got = uncached_logits(load("qwen2", {"output.weight": own}), TEXT)
    np.testing.assert_allclose(got, np.repeat(got[:, :1], N_VOCAB, axis=1), rtol=1e-4)


def test_scales_count_in_attention_alone() -> None:
    """As in llama.cpp."""
    two = np.array([2.0], np.float32)
    plain = uncached_logits(load("qwen2"), TEXT)
    scaled = uncached_logits(load("qwen2", {"blk.0.attn_v.scale": two}), TEXT)
    ignored = uncached_logits(load("qwen2", {"blk.0.ffn_up.scale": two}), TEXT)
    assert not np.allclose(plain, scaled)
    np.testing.assert_array_equal(plain, ignored)
