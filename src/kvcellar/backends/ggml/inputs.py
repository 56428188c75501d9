"""What a graph is built into, and the tensors it is fed through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcellar.backends.ggml.binding import Ggml


@dataclass(frozen=True, slots=True)
class Inputs:
    """The graph's input tensors; those it does not need are None."""

    tokens: int | None  # i32 [n]
    embeddings: int | None  # f32 [n, n_embd]
    positions: int  # i32 [n]
    cells: int  # i64 [n]
    channels: int | None  # i64 [n * n_embd_v], where V's values go when V lies across
    mask: int | None  # f16 [n, n_kv]
    outputs: int | None  # i32 [n_outputs]


class Target(NamedTuple):
    """Where nodes are built."""

    api: Ggml
    context: int
    graph: int
