"""What files of the recurrent and hybrid families must have; what does not fit is named."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvcellar.errors import ModelError, ModelFileError, UnsupportedModel
from kvcellar.testing.uncached import uncached_logits
from tests.models.tiny_recurrent import FILES, Tiny, load

TENSORS = [
    pytest.param(tiny, name, id=f"{tiny.arch}-{name}") for tiny in FILES for name in tiny.tensors()
]
KEYS = [
    pytest.param(tiny, key, id=key)
    for tiny in FILES
    for key in tiny.metadata()
    if key != "general.architecture"
]
INSTEAD = {
    "attention.head_count": "layer 0 has 0 heads over 1 K/V heads",
    "attention.head_count_kv": "attn_k.weight",  # as many as there are heads of q
}
"""What is wrong without a key that files may lack."""
OPTIONAL = [
    pytest.param(tiny, f"blk.{i}.{name}.{what}", id=f"{tiny.arch}-{name}.{what}")
    for tiny in FILES
    for i, layer in enumerate(tiny.layers)
    for name, what in [
        ("ssm_conv1d", "bias"),
        ("ssm_in", "scale"),
        ("ssm_out", "scale"),
        ("attn_q", "bias"),
        ("attn_output", "scale"),
        ("ffn_up", "bias"),
        ("shortconv.out_proj", "scale"),
    ]
    if f"{name}.weight" in layer
]


@pytest.mark.parametrize("tiny", FILES, ids=lambda tiny: tiny.arch)
def test_nothing_more_is_needed(tiny: Tiny) -> None:
    spec = tiny.load().spec
    assert (spec.arch, spec.n_vocab, spec.n_embd, spec.n_ctx_train) == (tiny.arch, 10, 8, 64)
    assert len(spec.layers) == len(tiny.layers)


@pytest.mark.parametrize(("tiny", "name"), TENSORS)
def test_every_tensor_counts(tiny: Tiny, name: str) -> None:
    """Another value of any tensor gives other logits."""
    tensors, text = tiny.random(), [3, 1, 4, 1, 5, 9, 2]
    expected = uncached_logits(load(tiny.metadata(), tensors), text)
    factor = 0.5 if name.endswith("ssm_a") else -0.7  # states that decay, not ones that grow
    tensors[name] = tensors[name] * np.float32(factor)
    got = uncached_logits(load(tiny.metadata(), tensors), text)
    assert np.isfinite(expected).all()
    assert not np.allclose(got, expected, rtol=1e-4)


@pytest.mark.parametrize(("tiny", "name"), TENSORS)
def test_a_missing_tensor_is_named(tiny: Tiny, name: str) -> None:
    tensors = tiny.tensors()
    del tensors[name]
    with pytest.raises(UnsupportedModel, match=re.escape(name)):
        load(tiny.metadata(), tensors)


@pytest.mark.parametrize(("tiny", "name"), TENSORS)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_tensor_of_another_shape_is_named(tiny: Tiny, name: str, axis: int) -> None:
    tensors = tiny.tensors()
    tensor = tensors[name]
    if axis >= tensor.ndim or (name, axis) == ("token_embd.weight", 0):
        tensors[name] = tensor[np.newaxis]
    else:
        tensors[name] = np.repeat(tensor, 2, axis)
    with pytest.raises(ModelFileError, match=re.escape(name)):
        load(tiny.metadata(), tensors)


@pytest.mark.parametrize(("tiny", "key"), KEYS)
def test_a_missing_key_is_named(tiny: Tiny, key: str) -> None:
    metadata = tiny.metadata()
    del metadata[key]
    with pytest.raises(ModelError) as caught:
        load(metadata, tiny.tensors())
    said = str(caught.value)
    assert key in said or INSTEAD.get(key.partition(".")[2], key) in said


@pytest.mark.parametrize("value", [-1, 2**40, 1.5, "x", ["x"], True, np.array([1.5])])
@pytest.mark.parametrize(("tiny", "key"), KEYS)
def test_a_key_of_the_wrong_kind_is_named(tiny: Tiny, key: str, value: object) -> None:
    if key.endswith("epsilon") and isinstance(value, float | int) and value > 1:
        return
    with pytest.raises(ModelFileError, match=re.escape(key)):
        load({**tiny.metadata(), key: value}, tiny.tensors())


@pytest.mark.parametrize(("tiny", "name"), OPTIONAL)
def test_an_optional_tensor_of_another_size_is_named(tiny: Tiny, name: str) -> None:
    tensors = {**tiny.tensors(), name: np.ones(5, np.float32)}
    with pytest.raises(ModelFileError, match=re.escape(name)):
        load(tiny.metadata(), tensors)


@pytest.mark.parametrize("tiny", FILES, ids=lambda tiny: tiny.arch)
def test_an_absurd_number_of_layers_is_refused_at_once(tiny: Tiny) -> None:
    with pytest.raises(UnsupportedModel, match=r"blk\.2147483646\.attn_norm"):
        tiny.load(block_count=2**31 - 1)


@pytest.mark.parametrize("tiny", FILES, ids=lambda tiny: tiny.arch)
@pytest.mark.parametrize("key", ["residual_scale", "embedding_scale", "logit_scale"])
def test_a_setting_that_we_lack_is_named(tiny: Tiny, key: str) -> None:
    tiny.load(**{key: 0.0})
    with pytest.raises(UnsupportedModel, match=f"{tiny.arch}.{key}=0.5"):
        tiny.load(**{key: 0.5})
