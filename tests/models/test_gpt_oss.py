"""gpt-oss: sinks, windows, experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.testing.uncached import uncached_logits
from tests.models.tiny import N_HEAD, load

TEXT = list(range(10))
NO_SINKS = {f"blk.{i}.attn_sinks.weight": np.full(N_HEAD, -1e9, np.float32) for i in (0, 1)}


def test_every_other_layer_has_a_window() -> None:
    assert [layer.window for layer in load("gpt-oss").spec.attention_layers] == [5, 0]


def test_a_file_must_say_how_wide_it_is() -> None:
    with pytest.raises(UnsupportedModel, match=r"gpt-oss\.attention\.sliding_window"):
        load("gpt-oss", attention__sliding_window=None)


def test_a_sink_takes_attention_away() -> None:
    with_sinks, without = (load("gpt-oss", more) for more in ({}, NO_SINKS))
    assert not np.allclose(uncached_logits(with_sinks, TEXT), uncached_logits(without, TEXT))


def test_layers_may_be_stretched_by_yarn() -> None:
    keys: dict[str, Any] = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 32.0,
        "rope__scaling__original_context_length": 8,
    }
    for layer in load("gpt-oss", **keys).spec.attention_layers:
        assert layer.rope is not None
        assert (layer.rope.freq_scale, layer.rope.ext_factor) == (1 / 32, 1.0)


@pytest.mark.parametrize(("key", "value"), [("expert_gating_func", 2), ("expert_shared_count", 1)])
def test_other_mixtures_are_refused(key: str, value: int) -> None:
    with pytest.raises(UnsupportedModel, match=rf"gpt-oss\.{key}={value}"):
        load("gpt-oss", **{key: value})


def test_no_experts_are_refused() -> None:
    with pytest.raises(ModelFileError, match=r"gpt-oss\.expert_count=0"):
        load("gpt-oss", expert_count=0)


def test_more_experts_used_than_there_are_is_refused() -> None:
    with pytest.raises(ModelFileError, match="expert_used_count=4: the file has 3 experts"):
        load("gpt-oss", expert_used_count=4)
