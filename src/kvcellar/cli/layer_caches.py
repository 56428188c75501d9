"""Which cache the layers of a model get, and what it takes: layers that are alike in a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcellar.types import KVType, LayerMemory, LayerSpec, StateSpec


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Layers that keep the same.

    Attributes:
        layers: their numbers.
        kind: "full", "sliding 512", "MLA", "state", or several of them.
        bytes_per_token: of K and V as f16, in each of these layers. Within a window that is for
            its tokens only.
        bytes_per_sequence: of a state, in each of these layers.
    """

    layers: tuple[int, ...]
    kind: str
    bytes_per_token: int
    bytes_per_sequence: int

    @property
    def numbers(self) -> str:
        """The layers, neighbours as a range: ``0-4, 6-10``."""
        runs: list[list[int]] = []
        for number in self.layers:
            if runs and runs[-1][-1] == number - 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def layer_caches(layers: Iterable[LayerMemory]) -> tuple[LayerCache, ...]:
    """What each layer gets, those that keep the same together, by the first of them."""
    found: dict[tuple[str, int, int], list[int]] = {}
    for number, layer in enumerate(layers):
        per_token = 0 if layer.attention is None else token_bytes(layer.attention, KVType.F16)
        per_sequence = 0 if layer.state is None else StateSpec(1, 1, (layer.state,)).row_bytes
        found.setdefault((_kind(layer), per_token, per_sequence), []).append(number)
    return tuple(LayerCache(tuple(numbers), *what) for what, numbers in found.items())


def token_bytes(layer: LayerSpec, kind: KVType) -> int:
    """Bytes of a token's K and V in a layer."""
    return kind.row_bytes(layer.n_embd_k) + kind.row_bytes(layer.n_embd_v)


def context_bytes(layers: Iterable[LayerSpec], kind: KVType, n_tokens: int) -> int:
    """Bytes of K and V of one sequence of so many tokens; windows keep no more than they see."""
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
