"""Gemma 3: windows, two kinds of rotation, embeddings of images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.models.blocks import Decoder
from kvcellar.models.hparams import HyperParams
from kvcellar.models.windows import read_windows
from kvcellar.testing.plans import causal_plan
from kvcellar.testing.uncached import UncachedOps, uncached_logits
from kvcellar.types import Float32Array
from tests.models.tiny import load, tensors

TEXT = list(range(12))


class Given(UncachedOps):
    """Embeddings in place of tokens."""

    def __init__(self, embeddings: Float32Array, model: Decoder[Any]) -> None:
        super().__init__(range(len(embeddings)), model.spec.layers)
        self.plan = causal_plan(None, n_kv=len(embeddings), embeddings=embeddings)


def test_five_layers_have_a_window_then_one_has_none() -> None:
    hp = HyperParams({"general.architecture": "m", "m.attention.sliding_window": 512})
    assert read_windows(hp, 8, period=6) == (512,) * 5 + (0,) + (512,) * 2


def test_a_model_without_a_window_has_none_anywhere() -> None:
    layers = load("gemma3", attention__sliding_window=None).spec.attention_layers
    assert [layer.window for layer in layers] == [0, 0]


def test_layers_with_a_window_rotate_by_a_base_of_their_own_and_are_not_stretched() -> None:
    edits: dict[str, Any] = {"rope__freq_base": 1e6, "rope__scaling__factor": 8.0}
    near, far = (layer.rope for layer in load("gemma3", **edits).spec.attention_layers)
    assert near is not None
    assert far is not None
    assert (near.freq_base, near.freq_scale) == (10000.0, 1.0)
    assert (far.freq_base, far.freq_scale) == (1e6, 0.125)


def test_a_file_may_give_that_base() -> None:
    near, far = load("gemma3", rope__freq_base_swa=500.0).spec.attention_layers
    assert near.rope is not None
    assert far.rope is not None
    assert (near.rope.freq_base, far.rope.freq_base) == (500.0, 10000.0)


def test_logits_are_capped_only_if_the_file_says_so() -> None:
    free = uncached_logits(load("gemma3"), TEXT)
    capped = uncached_logits(load("gemma3", final_logit_softcapping=1.5), TEXT)
    np.testing.assert_allclose(capped, 1.5 * np.tanh(free / 1.5), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
def test_embeddings_that_are_given_are_not_multiplied(arch: str) -> None:
    """Those of images have their length already; Gemma 2 multiplies them all the same."""
    model, rows = load(arch), tensors(arch)["token_embd.weight"][TEXT]
    wanted = uncached_logits(model, TEXT)
    factor = np.float32(4.0 if arch == "gemma3" else 1.0)  # the root of 16
    got: Float32Array = model.forward(Given(rows * factor, model))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", [np.array([1, 0, 1]), np.array([[1, 0]]), np.array([0.5, 1.0])])
def test_flags_that_are_not_as_many_as_layers_are_refused(pattern: Any) -> None:
    with pytest.raises(ModelFileError, match="sliding_window_pattern: expected 2 flags"):
        load("gemma3", attention__sliding_window_pattern=pattern)


@pytest.mark.parametrize("key", ["attention__key_length", "attention__value_length"])
def test_other_heads_in_layers_with_a_window_are_refused(key: str) -> None:
    load("gemma3", **{f"{key}_swa": 8})
    with pytest.raises(UnsupportedModel, match="_swa=16: only 8 is supported"):
        load("gemma3", **{f"{key}_swa": 16})


def test_another_rotation_size_in_layers_with_a_window_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="dimension_count_swa=4: only 8 is supported"):
        load("gemma3", rope__dimension_count=8, rope__dimension_count_swa=4)
    with pytest.raises(UnsupportedModel, match="dimension_count_swa=4: only 0 is supported"):
        load("gemma3", rope__dimension_count_swa=4)
