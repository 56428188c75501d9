"""The tiny models, by what they keep, and ways to ask them for logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvcellar.batch import Batch
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.testing.golden import nmse
from kvcellar.types import Float32Array

PLAIN = (
    "deepseek2-moe",
    "gpt2-dense",
    "llama-dense",
    "llama-moe",
    "phi3-dense",
    "qwen2-dense",
    "qwen3-dense",
)
WINDOWED = ("gemma2-dense", "gemma3-dense", "gpt-oss-moe")
HYBRID = ("falcon-h1-dense", "jamba-dense", "lfm2-dense")
RECURRENT = ("mamba-dense", "mamba2-dense")
ARCHS = (*PLAIN, *WINDOWED, *HYBRID, *RECURRENT)

N_VOCAB = 128
TOLERANCE = 2e-5
"""Against the reference, which differs from itself by 2e-7."""
SAME = 1e-8
"""Against ourselves, with K and V as f32: only the order of sums may differ.

A state that is one token behind moves some logits by no more than 1e-6.
"""
F32 = {"type_k": "f32", "type_v": "f32"}


@contextmanager
def opened(shared: Path, arch: str, backend: str = "ggml", **options: Any) -> Iterator[Context]:
    """A context of a tiny model, small enough that its windows slide."""
    path = shared / "models" / f"{arch}.gguf"
    with Model.from_gguf(path, n_threads=1, backend=backend) as model:
        yield model.context(**{"n_ctx": 512, "n_seq_max": 4, "n_ubatch": 16, **options})


def text(seed: int, n: int) -> list[int]:
    """Random tokens."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, N_VOCAB, n).tolist()
    return tokens


def fresh(context: Context, tokens: Sequence[int]) -> Float32Array:
    """Logits after a text, by a context that never held anything else."""
    k, v = context.spec.type_k, context.spec.type_v
    with context.model.context(n_ctx=512, n_seq_max=1, type_k=k, type_v=v) as other:
        logits: Float32Array = other.decode(Batch.of(tokens))[-1]
        return logits


def check_logits(context: Context, got: Float32Array, tokens: Sequence[int]) -> None:
    """Raise AssertionError unless these are the logits after a text."""
    error = nmse(got, fresh(context, tokens))
    assert error < SAME, (error, list(tokens))
