"""Which architectures run, and where they are written."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TypeVar, cast

from kvcellar.backends.operations import Weights
from kvcellar.errors import UnsupportedModel
from kvcellar.models.blocks import Decoder
from kvcellar.models.hparams import HyperParams
from kvcellar.models.reader import TrackedWeights

T = TypeVar("T")

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "deepseek2": "kvcellar.models.deepseek2:Deepseek2",
        "falcon-h1": "kvcellar.models.falcon_h1:FalconH1",
        "gemma2": "kvcellar.models.gemma2:Gemma2",
        "gemma3": "kvcellar.models.gemma3:Gemma3",
        "gpt-oss": "kvcellar.models.gpt_oss:GptOss",
        "gpt2": "kvcellar.models.gpt2:Gpt2",
        "jamba": "kvcellar.models.jamba:Jamba",
        "lfm2": "kvcellar.models.lfm2:Lfm2",
        "llama": "kvcellar.models.llama:Llama",
        "mamba": "kvcellar.models.mamba:MambaModel",
        "mamba2": "kvcellar.models.mamba:Mamba2Model",
        "phi3": "kvcellar.models.phi3:Phi3",
        "qwen2": "kvcellar.models.qwen2:Qwen2",
        "qwen3": "kvcellar.models.qwen3:Qwen3",
    }
)
"""``general.architecture`` to ``module:class``; modules are imported when needed."""


def load_architecture(metadata: Mapping[str, object], weights: Weights[T]) -> Decoder[T]:
    """The model that a file describes.

    Raises:
        UnsupportedModel: we have no such architecture, or the file needs more than we have,
            or has tensors that the architecture does not use.
    """
    arch = HyperParams(metadata).arch
    if arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"architecture {arch!r} is not supported; known are {known}")
    module, _, name = ARCHITECTURES[arch].partition(":")
    tracked = TrackedWeights(weights)
    model = cast("Decoder[T]", getattr(import_module(module), name)(metadata, tracked))
    tracked.refuse_unread(arch, model.unused)
    return model
