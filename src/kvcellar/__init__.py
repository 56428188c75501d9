"""llama.cpp's KV cache as a Python library: see it, edit it, fork it, save it.

The names below are loaded at first use, so that importing the package costs next to nothing.
Errors are there at once; ``help(kvcellar.errors)`` draws their tree.
"""

from __future__ import annotations

from importlib import import_module

from kvcellar import errors
from kvcellar._version import __version__
from kvcellar.errors import (
    AllocationError,
    BackendError,
    BatchError,
    CacheError,
    CacheFull,
    ClosedError,
    ComputeError,
    GrammarError,
    HandleError,
    InvariantError,
    KVCellarError,
    LibraryError,
    ModelError,
    ModelFileError,
    NotSupported,
    OptionError,
    PositionError,
    SequenceBusy,
    SequenceIdError,
    ShiftUnsupported,
    SnapshotError,
    SnapshotFileError,
    SnapshotMismatch,
    StoreError,
    TemplateError,
    TokenizerError,
    UnsupportedModel,
)

TYPE_CHECKING = False  # as in typing, which would be most of what the import takes

if TYPE_CHECKING:
    from typing import Any

    from kvcellar.batch import Batch
    from kvcellar.cache.attention import AttentionCache
    from kvcellar.prompts.cache import PromptCache
    from kvcellar.runtime.chat import Chat
    from kvcellar.runtime.context import Context, save_llama_file
    from kvcellar.runtime.demo import find_model
    from kvcellar.runtime.model import Model
    from kvcellar.runtime.options import ContextOptions, ContextShift
    from kvcellar.runtime.results import Result, Token
    from kvcellar.runtime.sequence import Sequence
    from kvcellar.runtime.together import generate_all, stream_all
    from kvcellar.stores.opening import open_store
    from kvcellar.text.chat_prompt import ChatPrompt
    from kvcellar.text.grammar import Grammar
    from kvcellar.text.sampler import SamplerOptions
    from kvcellar.types import CacheSpec, KVType, LayerSpec

__all__ = [
    "AllocationError",
    "AttentionCache",
    "BackendError",
    "Batch",
    "BatchError",
    "CacheError",
    "CacheFull",
    "CacheSpec",
    "Chat",
    "ChatPrompt",
    "ClosedError",
    "ComputeError",
    "Context",
    "ContextOptions",
    "ContextShift",
    "Grammar",
    "GrammarError",
    "HandleError",
    "InvariantError",
    "KVCellarError",
    "KVType",
    "LayerSpec",
    "LibraryError",
    "Model",
    "ModelError",
    "ModelFileError",
    "NotSupported",
    "OptionError",
    "PositionError",
    "PromptCache",
    "Result",
    "SamplerOptions",
    "Sequence",
    "SequenceBusy",
    "SequenceIdError",
    "ShiftUnsupported",
    "SnapshotError",
    "SnapshotFileError",
    "SnapshotMismatch",
    "StoreError",
    "TemplateError",
    "Token",
    "TokenizerError",
    "UnsupportedModel",
    "__version__",
    "errors",
    "find_model",
    "generate_all",
    "open_store",
    "save_llama_file",
    "stream_all",
]

_HOME = {
    "AttentionCache": "kvcellar.cache.attention",
    "Batch": "kvcellar.batch",
    "CacheSpec": "kvcellar.types",
    "Chat": "kvcellar.runtime.chat",
    "ChatPrompt": "kvcellar.text.chat_prompt",
    "Context": "kvcellar.runtime.context",
    "ContextOptions": "kvcellar.runtime.options",
    "ContextShift": "kvcellar.runtime.options",
    "Grammar": "kvcellar.text.grammar",
    "KVType": "kvcellar.types",
    "LayerSpec": "kvcellar.types",
    "Model": "kvcellar.runtime.model",
    "PromptCache": "kvcellar.prompts.cache",
    "Result": "kvcellar.runtime.results",
    "SamplerOptions": "kvcellar.text.sampler",
    "Sequence": "kvcellar.runtime.sequence",
    "Token": "kvcellar.runtime.results",
    "find_model": "kvcellar.runtime.demo",
    "generate_all": "kvcellar.runtime.together",
    "open_store": "kvcellar.stores.opening",
    "save_llama_file": "kvcellar.runtime.context",
    "stream_all": "kvcellar.runtime.together",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module 'kvcellar' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
