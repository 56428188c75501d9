"""Qwen3: heads of q and k are normalised."""

from __future__ import annotations

import numpy as np

from kvcellar.testing.uncached import uncached_logits
from tests.models.tiny import load, tensors

TEXT = [3, 1, 4, 1, 5]


def test_halves_of_a_head_are_rotated() -> None:
    (layer,) = load("qwen3").spec.attention_layers
    assert layer.rope is not None
    assert layer.rope.mode == "neox"


def test_the_length_of_queries_and_keys_does_not_matter() -> None:
    """They are normalised before they are compared."""
    parts = tensors("qwen3")
    longer = {name: 3 * parts[name] for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight")}
    a, b = uncached_logits(load("qwen3"), TEXT), uncached_logits(load("qwen3", longer), TEXT)
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_what_ranks_texts_is_not_needed_for_logits() -> None:
    ranks = {"cls.output.weight": np.ones((1, 16), np.float32)}
    a, b = uncached_logits(load("qwen3"), TEXT), uncached_logits(load("qwen3", ranks), TEXT)
    np.testing.assert_array_equal(a, b)


def test_scales_count_in_the_feed_forward_too() -> None:
    two = {"blk.0.ffn_up.scale": np.array([2.0], np.float32)}
    a, b = uncached_logits(load("qwen3"), TEXT), uncached_logits(load("qwen3", two), TEXT)
    assert not np.allclose(a, b)
