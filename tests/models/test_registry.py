"""Which architectures there are."""

from __future__ import annotations

import pytest

from kvcellar.errors import UnsupportedModel
from kvcellar.models.registry import ARCHITECTURES, load_architecture
from kvcellar.testing.tiny_llama import TinyLlama
from tests.models.helpers import ShapeWeights
from tests.models.tiny import FAMILIES, metadata, tensors


def test_every_registered_class_can_be_imported() -> None:
    for target in ARCHITECTURES.values():
        module, _, name = target.partition(":")
        assert hasattr(__import__(module, fromlist=[name]), name)


def test_a_llama_is_found() -> None:
    tiny = TinyLlama()
    model = load_architecture(tiny.metadata(), ShapeWeights(tiny.tensors()))
    assert model.spec.arch == "llama"


@pytest.mark.parametrize("arch", FAMILIES)
def test_the_architecture_says_which_class(arch: str) -> None:
    model = load_architecture(metadata(arch), ShapeWeights(tensors(arch)))
    assert model.spec.arch == arch
    assert ARCHITECTURES[arch].endswith(f":{type(model).__name__}")


@pytest.mark.parametrize("arch", ["", "llama2", "rwkv9", "../llama", "x" * 500])
def test_an_unknown_architecture_names_those_we_have(arch: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"is not supported; known are .*llama"):
        load_architecture({"general.architecture": arch}, ShapeWeights({}))


def test_the_registry_cannot_be_changed_by_accident() -> None:
    with pytest.raises(TypeError):
        ARCHITECTURES["x"] = "y"  # type: ignore[index]
