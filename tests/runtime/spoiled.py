"""Models in which a token's K, V or state is not finite, though all others' are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.tiny_llama import TinyLlama
from tests.models import tiny, tiny_recurrent

LARGE, NAN = 1, 2
"""Tokens whose K and V are about 1e7 in the first layer, and NaN in every one."""
FIRST = 3
"""Tokens from this one on are as any others."""
N_TOKENS = 10
"""Tokens that every model knows."""

Parts = tuple[dict[str, Any], dict[str, Any]]
ATTENTION = tuple(tiny.FAMILIES)
RECURRENT = tuple(file.arch for file in tiny_recurrent.FILES)


def parts_of(arch: str) -> Parts:
    """Metadata and tensors of a tiny model; "wide": a llama with heads of 32, for any type."""
    if arch == "wide":
        wide = TinyLlama()
        return dict(wide.metadata()), dict(wide.tensors())
    if arch in tiny.FAMILIES:
        tensors: dict[str, Any] = dict(tiny.tensors(arch))
        if arch == "gpt2":
            tensors["position_embd.weight"] = np.tile(tensors["position_embd.weight"], (4, 1))
        return tiny.metadata(arch, context_length=160), tensors
    file = next(file for file in tiny_recurrent.FILES if file.arch == arch)
    return file.metadata(context_length=160), file.random()


def spoil(arch: str) -> Parts:
    """The model, with both tokens spoiled."""
    metadata, tensors = parts_of(arch)
    table = tensors["token_embd.weight"].copy()
    table[:, 0] = 0
    table[LARGE, 0] = 3
    tensors.setdefault("output.weight", table.copy())
    table[NAN] = np.nan
    tensors["token_embd.weight"] = table
    if "blk.0.attn_norm.bias" not in tensors:  # a norm with one takes the mean away
        norm = tensors["blk.0.attn_norm.weight"].copy()
        norm[0] = 1e7
        tensors["blk.0.attn_norm.weight"] = norm
    return metadata, tensors


@contextmanager
def spoiled(
    folder: Path,
    arch: str,
    backend: str = "ggml",
    change: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> Iterator[Context]:
    """A context of such a model, whose tensors may be changed further."""
    metadata, tensors = spoil(arch)
    if change is not None:
        change(tensors)
    path = write_gguf(folder / f"{arch}.gguf", metadata, tensors)
    with Model.from_gguf(path, n_threads=1, backend=backend) as model:
        yield model.context(**{"n_ctx": 160, "n_seq_max": 3, "checkpoints": 4, **options})
