"""Gemma 2: windows, caps, scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcellar.errors import ModelFileError
from kvcellar.models.blocks import Decoder
from kvcellar.models.gemma2 import Gemma2
from kvcellar.testing.uncached import uncached_logits
from tests.models.tiny import load

TEXT = list(range(12))


def _windows(**edits: Any) -> list[int]:
    return [layer.window for layer in load("gemma2", **edits).spec.attention_layers]


def _logits(**edits: Any) -> Any:
    return uncached_logits(load("gemma2", **edits), TEXT)


def _scale(model: Decoder[Any]) -> float:
    assert isinstance(model, Gemma2)
    return float(model._blocks[0].mixer.scale)  # type: ignore[attr-defined]


def test_every_other_layer_has_a_window() -> None:
    assert _windows() == [5, 0]
    assert _windows(attention__sliding_window=None) == [4096, 0]
    assert _windows(attention__sliding_window=0) == [0, 0]


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (np.array([0, 1], np.int32), [0, 5]),
        (np.array([True, True]), [5, 5]),
        (0, [5, 5]),
        (1, [0, 0]),
        (2, [5, 0]),
        (3, [5, 5]),
    ],
)
def test_a_file_may_say_which(pattern: Any, windows: list[int]) -> None:
    assert _windows(attention__sliding_window_pattern=pattern) == windows


def test_a_window_hides_what_lies_before_it() -> None:
    near, far = (_logits(attention__sliding_window=n) for n in (5, 11))
    np.testing.assert_allclose(near[:5], far[:5], rtol=1e-5)
    assert not np.allclose(near[5], far[5], rtol=1e-4)


def test_logits_stay_within_the_cap() -> None:
    assert np.abs(_logits()).max() <= 30
    assert np.abs(_logits(final_logit_softcapping=2.0)).max() <= 2
    free = _logits(final_logit_softcapping=0.0)
    np.testing.assert_allclose(30 * np.tanh(free / 30), _logits(), rtol=1e-4, atol=1e-4)


def test_scores_are_capped_too() -> None:
    assert not np.allclose(_logits(), _logits(attn_logit_softcapping=0.5), rtol=1e-4)
    np.testing.assert_array_equal(_logits(), _logits(attn_logit_softcapping=50.0))


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), "x"])
def test_a_cap_that_is_none_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=rf"gemma2\.{key}="):
        load("gemma2", **{key: value})


def test_scores_are_scaled_by_the_size_of_a_head() -> None:
    assert _scale(load("gemma2")) == 8**-0.5


def test_layers_with_a_window_may_have_a_base_of_their_own() -> None:
    near, far = load("gemma2", rope__freq_base_swa=500.0).spec.attention_layers
    assert near.rope is not None
    assert far.rope is not None
    assert (near.rope.freq_base, far.rope.freq_base) == (500.0, 10000.0)
