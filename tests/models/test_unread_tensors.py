"""Tensors that an architecture does not use: refused by name, or declared and without effect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.cli.model_info import read_model_info
from kvcellar.errors import ModelError, UnsupportedModel
from kvcellar.models.blocks import Decoder
from kvcellar.models.reader import TrackedWeights
from kvcellar.models.registry import ARCHITECTURES, load_architecture
from kvcellar.runtime.model import BACKENDS, Model, open_model_file
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.testing.uncached import uncached_logits
from tests.models import tiny, tiny_recurrent
from tests.models.helpers import ShapeWeights

TEXT = [3, 1, 4, 1, 5, 9, 2]
File = tuple[dict[str, Any], dict[str, Any]]

FILES: dict[str, File] = {
    **{arch: (tiny.metadata(arch), tiny.tensors(arch)) for arch in tiny.FAMILIES},
    **{one.arch: (one.metadata(), one.random()) for one in tiny_recurrent.FILES},
}
"""Metadata and tensors of each family."""
MORE = {
    "rope_freqs.weight": (4,),
    "rope_factors_short.weight": (4,),
    "output.weight": (24, 16),
    "cls.output.weight": (2, 16),
    "blk.0.attn_kv_b.weight": (44, 10),
    "blk.0.ffn_gate_up_exps.weight": (3, 24, 16),
}
ALL_NAMES: dict[str, tuple[int, ...]] = MORE | {
    name: tensor.shape for _, tensors in FILES.values() for name, tensor in tensors.items()
}
"""Every tensor that any family has, and its shape in one of them."""

UNKNOWN = (
    "blk.0.attn_q.lora_a",
    "blk.0.attn_q.weight.loraA",
    "blk.0.attn_norm.weight.scale",
    "blk.0.attn_norm.scale",
    "blk.0.attn_rot_embd",
    "blk.0.attn_zz_norm.weight",
    "blk.0.zz.weight",
    "blk.0.zz.scale",
    "blk.0.zz.input_scale",
    "blk.9.attn_norm.weight",
    "blk.00.attn_norm.weight",
    "blk.0.attn_norm.weight ",
    "BLK.0.ATTN_NORM.WEIGHT",
    "token_embd.scale",
    "output_norm.scale",
    "input_scale",
    "scale",
    "zz",
    "",
)
"""Names that no family has, or not in that place."""


def load(arch: str, more: Mapping[str, Any]) -> Decoder[Any]:
    metadata, tensors = FILES[arch]
    return load_architecture(metadata, ShapeWeights({**tensors, **more}))


def family(arch: str) -> type[Decoder[Any]]:
    module, _, name = ARCHITECTURES[arch].partition(":")
    found: type[Decoder[Any]] = getattr(import_module(module), name)
    return found


def values(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Far enough apart to change which experts are chosen."""
    return np.random.default_rng(7).uniform(-8, 8, shape).astype(np.float32)


def is_declared(arch: str, name: str) -> bool:
    return re.sub(r"^blk\.\d+\.", "blk.*.", name) in family(arch).unused


def test_every_family_is_tried() -> None:
    assert set(FILES) == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", FILES)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_family_has_is_refused(arch: str, name: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load(arch, {name: values((1,))})
    assert f"architecture {arch} does not use" in str(caught.value)
    assert f"would be wrong: {name}; convert the model again" in str(caught.value)


@pytest.mark.parametrize("arch", FILES)
@pytest.mark.parametrize("name", ALL_NAMES)
def test_what_another_family_has_counts_or_is_refused(arch: str, name: str) -> None:
    """Unless the family says that it has no effect; then it has none."""
    metadata, tensors = FILES[arch]
    if name in tensors:
        return
    more = {name: values(ALL_NAMES[name])}
    try:
        model = load(arch, more)
    except ModelError:
        assert not is_declared(arch, name)
        parts = {
            "exps": "exps",
            "qkv": "attn_q",
            "kv_b": "attn_kv_b",
            "gate_inp": "gate_inp|expert",
        }
        expected = next((p for key, p in parts.items() if key in name), re.escape(name))
        with pytest.raises(ModelError, match=expected):
            load(arch, more)
        return
    own = uncached_logits(load_architecture(metadata, ShapeWeights(tensors)), TEXT)
    same = np.array_equal(own, uncached_logits(model, TEXT))
    # That is left out as in llama.cpp, and the family's docstring says so.
    assert same == (is_declared(arch, name) or (arch, name) == ("falcon-h1", "rope_freqs.weight"))


@pytest.mark.parametrize("arch", FILES)
def test_layers_beyond_the_last_are_refused(arch: str) -> None:
    """A file that says that it has fewer layers than it has is no shorter model."""
    metadata, tensors = FILES[arch]
    n = metadata[f"{arch}.block_count"]
    last = {
        name.replace(f"blk.{n - 1}.", f"blk.{n}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"blk.{n - 1}.")
    }
    with pytest.raises(UnsupportedModel, match=rf"does not use, .*: blk\.{n}\."):
        load(arch, last)


@pytest.mark.parametrize("arch", FILES)
def test_declared_names_have_no_effect(arch: str) -> None:
    for name in family(arch).unused:
        metadata, tensors = FILES[arch]
        own = uncached_logits(load_architecture(metadata, ShapeWeights(tensors)), TEXT)
        for layer in ("0", "12"):
            model = load(arch, {name.replace("*", layer): values((4,))})
            np.testing.assert_array_equal(uncached_logits(model, TEXT), own)
        for other in (f"x{name}", f"{name}x", name.replace(".weight", ".bias")):
            with pytest.raises(UnsupportedModel, match="does not use"):
                load(arch, {other.replace("*", "0"): values((4,))})
        if "*" in name:
            for layer in ("", "x", "0.1", "1\n"):
                with pytest.raises(UnsupportedModel, match="does not use"):
                    load(arch, {name.replace("*", layer): values((4,))})


def test_an_input_scale_belongs_to_a_product_that_is_read() -> None:
    one = values((1,))
    load("llama", {"blk.0.attn_q.input_scale": one, "blk.0.ffn_up.input_scale": one})
    for name in ("blk.0.attn_qkv", "blk.1.attn_q", "blk.0.attn_norm", "token_embd"):
        with pytest.raises(UnsupportedModel, match=rf"{name}\.input_scale"):
            load("llama", {f"{name}.input_scale": one})


def test_asking_is_not_reading() -> None:
    weights = TrackedWeights(ShapeWeights({"a": values((2,)), "b": values((2,))}))
    assert TrackedWeights.of(weights) is weights
    assert weights.has("a")
    assert weights.shape("a") == (2,)
    weights.vector("b", 2)
    with pytest.raises(UnsupportedModel, match="wrong: a;"):
        weights.refuse_unread("llama")
    assert weights.values("a", 2)
    weights.refuse_unread("llama")


def test_an_error_lists_a_few_and_shows_what_is_in_a_name() -> None:
    weights = TrackedWeights(ShapeWeights({f"t{i}\x1b[2J" + "x" * 99: 0 for i in range(9)}))
    with pytest.raises(UnsupportedModel) as caught:
        weights.refuse_unread("llama")
    message = str(caught.value)
    assert "t0\\x1b[2J" in message
    assert "\x1b" not in message
    assert "t3" in message
    assert "t4" not in message
    assert " and 5 more;" in message
    assert len(message) < 600


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.0.attn_norm.bias", "blk.1.x"])
def test_files_on_both_backends(tmp_path: Path, backend: str, name: str) -> None:
    small = TinyLlama()
    path = write_gguf(
        tmp_path / "x.gguf", small.metadata(), {**small.tensors(), name: values((8,))}
    )
    with pytest.raises(UnsupportedModel, match=rf"architecture llama does not use, .*: {name};"):
        Model.from_gguf(path, n_threads=1, backend=backend)
    found = read_model_info(path)
    assert not found.supported
    assert name in str(found.reason)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_reference_files_load(shared: Path, backend: str) -> None:
    """Those whose architecture and settings we have; they hold what llama.cpp wrote."""
    problems = {}
    for path in sorted((shared / "models").glob("*.gguf")):
        file = open_model_file(path, backend, 1)
        try:
            load_architecture(file.metadata, file.weights)
            problems[path.name] = ""
        except UnsupportedModel as error:
            problems[path.name] = str(error)
        file.close()
    lacking = re.compile(r"architecture '.*' is not supported|=\d+: only 0")
    assert not {name: why for name, why in problems.items() if why and not lacking.search(why)}
    assert list(problems.values()).count("") >= 19


def test_published_files_load(smollm2_path: Path, gemma3_path: Path) -> None:
    for path in (smollm2_path, gemma3_path):
        assert read_model_info(path).supported
