"""What holds for every family: what is missing or does not fit is named, nothing is ignored."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kvcellar.errors import ModelError, ModelFileError, UnsupportedModel
from kvcellar.models.reader import TRIVIAL
from kvcellar.models.registry import ARCHITECTURES
from kvcellar.testing.uncached import uncached_logits
from tests.models.tiny import FAMILIES, load, metadata, tensors
from tests.models.tiny_recurrent import FILES

OPTIONAL_TENSORS = {
    "output.weight",
    "rope_factors_long.weight",
    "exp_probs_b.bias",
    "ffn_gate_inp.bias",
    "ffn_gate_exps.bias",
    "ffn_up_exps.bias",
    "ffn_down_exps.bias",
}
DEFAULTED = {
    ("gemma2", "attention.sliding_window"),
    ("gemma3", "attention.sliding_window"),
    ("gemma3", "attention.sliding_window_pattern"),
    ("deepseek2", "attention.head_count_kv"),
    ("deepseek2", "expert_gating_func"),
    ("deepseek2", "expert_weights_norm"),
    ("deepseek2", "expert_weights_scale"),
}
TENSORS = [(arch, name) for arch in FAMILIES for name in tensors(arch)]
KEYS = [(arch, key) for arch in FAMILIES for key in metadata(arch) if key.startswith(f"{arch}.")]


def test_every_registered_family_is_tried() -> None:
    recurrent = {tiny.arch for tiny in FILES}  # in test_recurrent_files.py
    assert set(FAMILIES) | recurrent == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_family_computes(arch: str) -> None:
    model = load(arch)
    logits = uncached_logits(model, [3, 1, 4, 1, 5, 9, 2])
    assert logits.shape == (7, model.spec.n_vocab)
    assert np.isfinite(logits).all()
    assert len(model.spec.layers) == len(FAMILIES[arch].blocks)


@pytest.mark.parametrize(("arch", "name"), TENSORS)
def test_every_tensor_counts(arch: str, name: str) -> None:
    """Another value of any tensor gives other logits."""
    text = [3, 1, 4, 1, 5, 9, 2]
    changed = tensors(arch)[name] * np.float32(-0.7)
    a, b = uncached_logits(load(arch), text), uncached_logits(load(arch, {name: changed}), text)
    assert not np.allclose(a, b, rtol=1e-4)


@pytest.mark.parametrize(("arch", "name"), TENSORS)
def test_a_missing_tensor_is_named(arch: str, name: str) -> None:
    if re.sub(r"blk\.\d+\.", "", name) in OPTIONAL_TENSORS:
        load(arch, {name: None})
        return
    expected = "attn_q" if "attn_qkv" in name else name  # it is one or three
    with pytest.raises(UnsupportedModel, match=re.escape(expected)):
        load(arch, {name: None})


@pytest.mark.parametrize(("arch", "name"), TENSORS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_tensor_of_another_shape_is_named(arch: str, name: str, axis: int) -> None:
    tensor = tensors(arch)[name]
    whole = axis >= tensor.ndim or (name, axis) == ("token_embd.weight", 0)
    bent = tensor[np.newaxis] if whole else np.delete(tensor, 0, axis)
    with pytest.raises(ModelFileError, match=re.escape(name)):
        load(arch, {name: bent})


@pytest.mark.parametrize(("arch", "key"), KEYS)
def test_a_missing_key_is_named(arch: str, key: str) -> None:
    """Or there is a default, which need not fit the tensors."""
    without = {key.removeprefix(f"{arch}.").replace(".", "__"): None}
    if (arch, key.removeprefix(f"{arch}.")) in DEFAULTED:
        load(arch, **without)
        return
    with pytest.raises(ModelError, match=rf"{re.escape(key)}|tensor |heads of "):
        load(arch, **without)


@pytest.mark.parametrize("value", [-1, 2**40, 1.5, float("nan"), "x", ["x"], np.array(["y"])])
@pytest.mark.parametrize(("arch", "key"), KEYS)
def test_a_key_of_the_wrong_kind_is_named(arch: str, key: str, value: object) -> None:
    name = key.removeprefix(f"{arch}.")
    if name.endswith(("epsilon", "weights_scale")) and value in (-1, 1.5, 2**40):
        return  # that is a number
    wrong: dict[str, Any] = {name.replace(".", "__"): value}
    with pytest.raises(ModelError, match=re.escape(key)):
        load(arch, **wrong)


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("key", TRIVIAL)
def test_a_setting_that_we_lack_is_named(arch: str, key: str) -> None:
    name, nothing = key[1:].replace(".", "__"), TRIVIAL[key]
    other = not nothing[0] if isinstance(nothing[0], bool) else 7
    wrongs: list[dict[str, Any]] = [{name: other}, {name: np.array([nothing[0], other])}]
    for value in nothing:
        same: dict[str, Any] = {name: value}
        load(arch, **same)
    for wrong in wrongs:
        with pytest.raises(UnsupportedModel, match=re.escape(f"{arch}{key}=")):
            load(arch, **wrong)


@pytest.mark.parametrize("arch", sorted(set(FAMILIES) - {"llama", "gpt-oss", "deepseek2"}))
def test_experts_in_a_dense_family_are_refused(arch: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{arch}.expert_count=4: only 0"):
        load(arch, expert_count=4)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gpt2", "deepseek2"])
def test_a_window_that_we_lack_is_refused(arch: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{arch}.attention.sliding_window=8: only 0"):
        load(arch, attention__sliding_window=8)


@pytest.mark.parametrize("arch", sorted(set(FAMILIES) - {"gpt2"}))
@pytest.mark.parametrize("kind", ["dynamic", "su"])
def test_an_unknown_scaling_is_refused(arch: str, kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"rope\.scaling\.type='{kind}'"):
        load(arch, rope__scaling__type=kind)


@pytest.mark.parametrize("arch", sorted(set(FAMILIES) - {"gpt2", "deepseek2"}))
def test_yarn_s_multiplier_is_deepseek_s_alone(arch: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"yarn_log_multiplier=0\.1"):
        load(arch, rope__scaling__yarn_log_multiplier=0.1)


@pytest.mark.parametrize("arch", FAMILIES)
def test_an_absurd_number_of_layers_is_refused_at_once(arch: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"blk\.2147483646\.attn_norm"):
        load(arch, block_count=2**31 - 1)
