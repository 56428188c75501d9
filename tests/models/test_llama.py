"""Loading a llama: what it reads, and how it refuses what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcellar.errors import ModelError, ModelFileError, UnsupportedModel
from kvcellar.models.llama import Llama
from kvcellar.models.moe import MAX_EXPERTS_USED
from kvcellar.testing.tiny_llama import TinyLlama
from tests.models.helpers import ShapeWeights

DENSE = TinyLlama(n_layer=1)
MOE = TinyLlama(n_layer=1, n_expert=4)
OPTIONAL_TENSORS = {"output.weight"}
OPTIONAL_KEYS = {"llama.attention.head_count_kv", "llama.expert_count"}


def _load(metadata: dict[str, Any], tensors: dict[str, Any]) -> Llama[Any]:
    return Llama(metadata, ShapeWeights(tensors))


def _bent(tiny: TinyLlama, **keys: Any) -> Llama[Any]:
    named = {f"llama.{key.replace('__', '.')}": value for key, value in keys.items()}
    return _load({**tiny.metadata(), **named}, dict(tiny.tensors()))


CASES = [
    pytest.param(tiny, name, id=f"{kind}-{name}")
    for kind, tiny in (("dense", DENSE), ("moe", MOE))
    for name in tiny.tensors()
]
KEY_CASES = [
    pytest.param(tiny, key, id=f"{kind}-{key}")
    for kind, tiny in (("dense", DENSE), ("moe", MOE))
    for key in tiny.metadata()
    if key != "general.architecture"
]


def test_the_shape_of_a_dense_model() -> None:
    spec = _load(DENSE.metadata(), dict(DENSE.tensors())).spec
    assert (spec.n_vocab, spec.n_embd, spec.n_ctx_train) == (48, 64, 512)
    (layer,) = spec.attention_layers
    assert (layer.n_head_kv, layer.head_dim_k, layer.head_dim_v) == (1, 32, 32)
    assert layer.rope is not None
    assert layer.rope.mode == "normal"


@pytest.mark.parametrize(("tiny", "name"), CASES)
def test_a_missing_tensor_is_named(tiny: TinyLlama, name: str) -> None:
    tensors = dict(tiny.tensors())
    del tensors[name]
    if name in OPTIONAL_TENSORS:
        _load(tiny.metadata(), tensors)
        return
    with pytest.raises(UnsupportedModel, match=name.replace(".", r"\.")):
        _load(tiny.metadata(), tensors)


@pytest.mark.parametrize(("tiny", "name"), CASES)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_tensor_of_another_shape_is_named(tiny: TinyLlama, name: str, axis: int) -> None:
    tensors: dict[str, Any] = dict(tiny.tensors())
    tensor = np.asarray(tensors[name])
    if axis >= tensor.ndim or (name, axis) == ("token_embd.weight", 0):
        tensors[name] = tensor[np.newaxis]
    else:
        tensors[name] = np.delete(tensor, 0, axis)
    with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
        _load(tiny.metadata(), tensors)


@pytest.mark.parametrize(("tiny", "key"), KEY_CASES)
def test_a_missing_key_is_named(tiny: TinyLlama, key: str) -> None:
    metadata = tiny.metadata()
    del metadata[key]
    with pytest.raises(ModelError) as caught:
        _load(metadata, dict(tiny.tensors()))
    assert key in str(caught.value) or key in OPTIONAL_KEYS


@pytest.mark.parametrize("value", [-1, 2**40, 1.5, "x", ["x"], True, np.array([1.5])])
@pytest.mark.parametrize(("tiny", "key"), KEY_CASES)
def test_a_key_of_the_wrong_kind_is_named(tiny: TinyLlama, key: str, value: object) -> None:
    if key.endswith("epsilon") and isinstance(value, float | int) and value > 1:
        return
    with pytest.raises(ModelFileError, match=key.replace(".", r"\.")):
        _load({**tiny.metadata(), key: value}, dict(tiny.tensors()))


@pytest.mark.parametrize("value", [0, 0.0, -1e-5, float("nan"), float("inf")])
def test_an_epsilon_that_ggml_would_abort_on_is_refused(value: float) -> None:
    with pytest.raises(ModelFileError, match="layer_norm_rms_epsilon"):
        _bent(DENSE, attention__layer_norm_rms_epsilon=value)


def test_an_absurd_number_of_layers_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedModel, match=r"blk\.2147483646\.attn_norm"):
        _bent(DENSE, block_count=2**31 - 1)


@pytest.mark.parametrize("n_head", [3, 5, 128, 2**30])
def test_heads_that_do_not_fit_are_refused(n_head: int) -> None:
    with pytest.raises(ModelFileError):
        _bent(DENSE, attention__head_count=n_head)


def test_heads_must_be_a_multiple_of_kv_heads() -> None:
    with pytest.raises(ModelFileError, match="2 heads over 3 K/V heads: not a whole multiple"):
        _bent(DENSE, attention__head_count_kv=3)


def test_more_experts_used_than_there_are_is_refused() -> None:
    with pytest.raises(ModelFileError, match="expert_used_count=5: the file has 4 experts"):
        _bent(MOE, expert_used_count=5)


def test_more_experts_than_a_graph_has_room_for_is_refused() -> None:
    n = MAX_EXPERTS_USED + 1
    many = TinyLlama(n_layer=1, n_embd=8, n_ff=8, n_expert=n, n_expert_used=n)
    with pytest.raises(UnsupportedModel, match=f"expert_used_count={n}: at most"):
        _load(many.metadata(), dict(many.tensors()))


def test_the_number_of_experts_must_fit_the_tensors() -> None:
    with pytest.raises(ModelFileError, match="ffn_gate_inp"):
        _bent(MOE, expert_count=3)


def test_heads_may_be_wider_than_the_embedding_has_room_for() -> None:
    tensors: dict[str, Any] = dict(DENSE.tensors())
    rows = {"attn_q": 2 * 48, "attn_k": 48, "attn_v": 16}
    for name, n in rows.items():
        tensors[f"blk.0.{name}.weight"] = np.ones((n, 64), np.float32)
    tensors["blk.0.attn_output.weight"] = np.ones((64, 2 * 16), np.float32)
    keys = {"llama.attention.key_length": 48, "llama.attention.value_length": 16}
    (layer,) = _load({**DENSE.metadata(), **keys}, tensors).spec.attention_layers
    assert (layer.head_dim_k, layer.head_dim_v) == (48, 16)


def test_head_counts_may_differ_between_layers() -> None:
    tiny = TinyLlama(n_layer=2)
    tensors: dict[str, Any] = dict(tiny.tensors())
    tensors["blk.1.attn_k.weight"] = tensors["blk.1.attn_v.weight"] = np.ones((64, 64), np.float32)
    counts = {"llama.attention.head_count_kv": np.array([1, 2], np.uint32)}
    layers = _load({**tiny.metadata(), **counts}, tensors).spec.attention_layers
    assert [layer.n_head_kv for layer in layers] == [1, 2]


@pytest.mark.parametrize("name", ["attn_q", "attn_k", "attn_output", "ffn_down"])
def test_a_bias_of_another_size_is_named(name: str) -> None:
    tensors = {**DENSE.tensors(), f"blk.0.{name}.bias": np.ones(7, np.float32)}
    with pytest.raises(ModelFileError, match=rf"blk\.0\.{name}\.bias"):
        _load(DENSE.metadata(), tensors)


def test_an_output_matrix_may_be_the_embedding() -> None:
    tensors = dict(DENSE.tensors())
    del tensors["output.weight"]
    model = _load(DENSE.metadata(), tensors)
    assert model._head.output.weight is model._embedding.table
