"""What every architecture provides: its shape, and a forward pass written in ``Ops``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvcellar.backends.operations import Ops
from kvcellar.types import LayerMemory, LayerSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The numbers that caches and callers need of a model.

    ``n_positions`` is how many positions a model has learned: a token must stand below it. None
    where positions are computed.
    """

    arch: str
    n_vocab: int
    n_embd: int
    n_ctx_train: int
    layers: tuple[LayerMemory, ...]
    n_positions: int | None = None

    @property
    def attention_layers(self) -> tuple[LayerSpec, ...]:
        """What the layers that attend keep."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)


class Architecture(Protocol[T]):
    """A model whose weights are loaded."""

    @property
    def spec(self) -> ModelSpec:
        """Its shape."""

    def forward(self, ops: Ops[T]) -> T:
        """Logits ``[n_outputs, n_vocab]`` of the plan that ops carries; K and V are written."""
