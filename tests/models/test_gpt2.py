"""GPT-2: learned positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvcellar.errors import ModelFileError, PositionError
from kvcellar.runtime.model import Model
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.uncached import uncached_logits
from tests.models.tiny import N_EMBD, load, metadata, tensors

TEXT = [3, 1, 4, 1, 5]


def test_nothing_is_rotated_and_positions_end() -> None:
    spec = load("gpt2").spec
    assert spec.n_positions == spec.n_ctx_train == 40
    assert [layer.rope for layer in spec.attention_layers] == [None]


def test_other_families_know_no_last_position() -> None:
    assert load("llama").spec.n_positions is None


def test_a_position_that_was_not_learned_is_refused() -> None:
    model = load("gpt2")
    assert len(uncached_logits(model, [1] * 40)) == 40
    with pytest.raises(PositionError, match="position 40: the model has learned 40 positions"):
        uncached_logits(model, [1] * 41)


@pytest.mark.parametrize("backend", ["ggml", "numpy"])
def test_a_text_cannot_outgrow_the_positions(tmp_path: Path, backend: str) -> None:
    """Neither token by token nor in the last microbatch of a prompt; what there was goes on."""
    path = write_gguf(tmp_path / "tiny.gguf", metadata("gpt2"), tensors("gpt2"))
    with (
        Model.from_gguf(path, n_threads=1, backend=backend) as model,
        model.context(n_ctx=96, n_ubatch=16) as context,
    ):
        short = context.sequence([7] * 39)
        with pytest.raises(PositionError, match=r"position 40: .* learned 40 positions"):
            short.append([1, 2])
        with pytest.raises(PositionError, match="start a new sequence"):
            context.sequence([1] * 41)
        assert (len(short), context.cache.used) == (39, 39)
        short.append([1])
        expected = uncached_logits(load("gpt2"), [7] * 39 + [1])[-1]
        np.testing.assert_allclose(short.logits, expected, rtol=2e-2, atol=2e-2)
        with pytest.raises(PositionError, match="position 40"):
            short.append([2])


def test_a_position_is_added_to_its_token() -> None:
    """Without positions a token gives the same wherever it stands."""
    none = {"position_embd.weight": np.zeros((40, N_EMBD), np.float32)}
    first = uncached_logits(load("gpt2", none), [7] * 5)
    np.testing.assert_allclose(first, np.tile(first[:1], (5, 1)), rtol=1e-4, atol=1e-5)
    placed = uncached_logits(load("gpt2"), [7] * 5)
    assert not np.allclose(placed[1], placed[2], rtol=1e-2)


def test_fewer_positions_than_the_context_are_refused() -> None:
    with pytest.raises(ModelFileError, match=r"position_embd\.weight has shape \(40, 16\)"):
        load("gpt2", context_length=41)


def test_q_k_and_v_may_lie_apart() -> None:
    whole = tensors("gpt2")["blk.0.attn_qkv.weight"]
    parts = dict(zip("qkv", np.split(whole, [32, 48]), strict=True))
    apart = {f"blk.0.attn_{name}.weight": part for name, part in parts.items()}
    got = uncached_logits(load("gpt2", {**apart, "blk.0.attn_qkv.weight": None}), TEXT)
    np.testing.assert_allclose(got, uncached_logits(load("gpt2"), TEXT), rtol=1e-4, atol=1e-5)
