"""A GGUF file's facts about its model and the memory of a cache for it; nothing is computed.

A file that cannot be run is described as far as its metadata go, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from kvcellar.backends.ggml.gguf import GgmlWeights, GgufFile
from kvcellar.backends.memory import available_bytes
from kvcellar.errors import TokenizerError, UnsupportedModel
from kvcellar.models.blocks import ModelSpec
from kvcellar.models.registry import load_architecture
from kvcellar.text.tokenizer import check_kind
from kvcellar.types import KVType, LayerMemory, LayerSpec, StateSpec


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Layers with the same kind and size of cache.

    Attributes:
        layers: their numbers.
        kind: "full", "sliding 512", "MLA", "state", or several of them.
        bytes_per_token: size of K and V as f16 in one layer; a window keeps only its own tokens.
        bytes_per_sequence: size of the state in one layer.
    """

    layers: tuple[int, ...]
    kind: str
    bytes_per_token: int
    bytes_per_sequence: int

    @property
    def numbers(self) -> str:
        """The layers, consecutive ones as a range: ``0-4, 6-10``."""
        runs: list[list[int]] = []
        for number in self.layers:
            if runs and runs[-1][-1] == number - 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@dataclass(frozen=True, slots=True)
class TypeCost:
    """The size of K and V of one type; None where the type does not fit the heads.

    ``bytes_in_all`` is for one sequence of the training context's length; a window counts no
    more than its own tokens.
    """

    bytes_per_token: int | None
    cells_that_fit: int | None
    bytes_in_all: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model file; None where the file does not say.

    ``tokenizer_reason`` is why there is no tokenizer for it, None if there is one.
    ``n_head_kv`` and the head sizes are those of the first layer. ``memory_available`` is the
    memory that is free beside the weights. ``caches`` groups the layers by what they keep.
    """

    path: str
    name: str | None
    architecture: str
    supported: bool
    reason: str | None
    n_layers: int | None
    n_head: int | None
    n_head_kv: int | None
    head_dim_k: int | None
    head_dim_v: int | None
    n_embd: int | None
    n_vocab: int | None
    n_ctx_train: int | None
    tokenizer: str | None
    tokenizer_reason: str | None
    has_chat_template: bool
    n_parameters: int
    tensor_types: dict[str, int]
    weight_bytes: int
    file_bytes: int
    memory_available: int | None
    kv_types: dict[str, TypeCost]
    caches: tuple[LayerCache, ...] = ()


def read_model_info(path: Path, pre: str | None = None) -> ModelInfo:
    """Describe a file, with a pre-tokenizer in place of the one that it names.

    Raises:
        OptionError: there is no such pre-tokenizer, or the vocabulary has none.
        ModelFileError: it is missing, truncated, damaged or not GGUF.
    """
    file = GgufFile(path)
    spec, reason = _spec_of(file)
    layers = () if spec is None else spec.attention_layers
    data = file.metadata
    tensors = file.tensors.values()
    weight_bytes = sum(tensor.n_bytes for tensor in tensors)
    memory = available_bytes()
    free = None if memory is None else max(0, memory - weight_bytes)
    arch = _text(data, "general.architecture") or "unknown"
    tokens, n_ctx = data.get("tokenizer.ggml.tokens"), _count(data, f"{arch}.context_length")
    return ModelInfo(
        path=str(path),
        name=_text(data, "general.name"),
        architecture=arch,
        supported=spec is not None,
        reason=reason,
        n_layers=_count(data, f"{arch}.block_count"),
        n_head=_count(data, f"{arch}.attention.head_count"),
        n_head_kv=layers[0].n_head_kv if layers else None,
        head_dim_k=layers[0].head_dim_k if layers else None,
        head_dim_v=layers[0].head_dim_v if layers else None,
        n_embd=_count(data, f"{arch}.embedding_length"),
        n_vocab=len(tokens) if isinstance(tokens, list) else None,
        n_ctx_train=n_ctx,
        tokenizer=_tokenizer(data, pre),
        tokenizer_reason=_why_no_tokenizer(data, pre),
        has_chat_template=bool(data.get("tokenizer.chat_template")),
        n_parameters=sum(prod(tensor.shape) for tensor in tensors),
        tensor_types=dict(Counter(tensor.type_name for tensor in tensors).most_common()),
        weight_bytes=weight_bytes,
        file_bytes=len(file.data),
        memory_available=free,
        kv_types={kind.label: _cost(kind, layers, free, n_ctx) for kind in KVType if layers},
        caches=() if spec is None else layer_caches(spec.layers),
    )


def _spec_of(file: GgufFile) -> tuple[ModelSpec | None, str | None]:
    """Return the model's shape, or why it cannot be run."""
    try:
        weights = GgmlWeights(file)
    except UnsupportedModel as error:
        return None, str(error)
    try:
        return load_architecture(file.metadata, weights).spec, None
    except UnsupportedModel as error:
        return None, str(error)
    finally:
        weights.close()


def _cost(
    kind: KVType, layers: tuple[LayerSpec, ...], free: int | None, n_ctx: int | None = None
) -> TypeCost:
    sizes = {layer.head_dim_k for layer in layers}
    sizes |= {layer.head_dim_v for layer in layers if layer.v_offset is None}
    if any(size % kind.block_size for size in sizes):
        return TypeCost(None, None)
    n_bytes = sum(token_bytes(layer, kind) for layer in layers)
    in_all = None if n_ctx is None else context_bytes(layers, kind, n_ctx)
    return TypeCost(n_bytes, None if free is None else free // n_bytes, in_all)


def _text(data: Mapping[str, object], key: str) -> str | None:
    value = data.get(key)
    return value if isinstance(value, str) else None


def _count(data: Mapping[str, object], key: str) -> int | None:
    value = data.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _tokenizer(data: Mapping[str, object], pre: str | None) -> str | None:
    kind, pre = _text(data, "tokenizer.ggml.model"), pre or _text(data, "tokenizer.ggml.pre")
    return f"{kind}, {pre}" if kind and pre else kind


def _why_no_tokenizer(data: Mapping[str, object], pre: str | None) -> str | None:
    try:
        check_kind(data, pre)
    except (TokenizerError, UnsupportedModel) as error:
        return str(error)
    return None


def layer_caches(layers: Iterable[LayerMemory]) -> tuple[LayerCache, ...]:
    """Group layers by kind and size of cache, in the order of their first layer."""
    found: dict[tuple[str, int, int], list[int]] = {}
    for number, layer in enumerate(layers):
        per_token = 0 if layer.attention is None else token_bytes(layer.attention, KVType.F16)
        per_sequence = 0 if layer.state is None else StateSpec(1, 1, (layer.state,)).row_bytes
        found.setdefault((_kind(layer), per_token, per_sequence), []).append(number)
    return tuple(LayerCache(tuple(numbers), *what) for what, numbers in found.items())


def token_bytes(layer: LayerSpec, kind: KVType) -> int:
    """Return the bytes of a token's K and V in a layer."""
    return kind.row_bytes(layer.n_embd_k) + kind.row_bytes(layer.n_embd_v)


def context_bytes(layers: Iterable[LayerSpec], kind: KVType, n_tokens: int) -> int:
    """Return the bytes of K and V of one sequence; a window keeps no more than it sees."""
    return sum(
        token_bytes(layer, kind) * min(n_tokens, layer.window or n_tokens) for layer in layers
    )


def _kind(layer: LayerMemory) -> str:
    kinds = []
    if (spec := layer.attention) is not None:
        kinds.append("full" if spec.v_offset is None else "MLA")
        if spec.window:
            kinds[-1] = f"sliding {spec.window}" if spec.v_offset is None else f"MLA {spec.window}"
    if layer.state is not None:
        kinds.append("state")
    return " + ".join(kinds) or "none"
