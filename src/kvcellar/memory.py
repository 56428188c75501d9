"""What a model keeps between decodes, layer by layer, and how a context lays it out.

Three kinds of memory: K and V of every token, K and V of the tokens in a window, and states that
recurrent layers carry along. A layer may have more than one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcellar.errors import OptionError
from kvcellar.types import MAX_POSITION, CacheSpec, LayerSpec


@dataclass(frozen=True, slots=True)
class StateLayer:
    """What one recurrent layer keeps for each sequence, in f32.

    ``n_conv`` values are the last inputs of its convolution, ``n_ssm`` its recurrent state proper
    (0 where there is none).
    """

    n_conv: int
    n_ssm: int = 0


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What one layer of a model keeps: K and V of each token, a state of each sequence, or both."""

    attention: LayerSpec | None = None
    state: StateLayer | None = None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The shape of a store of recurrent states: ``n_rows`` rows, each one sequence's state."""

    n_rows: int
    n_seq_max: int
    layers: tuple[StateLayer, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one state over all layers."""
        return 4 * sum(layer.n_conv + layer.n_ssm for layer in self.layers)

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return self.n_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a model's layer keeps what it keeps: which group and which layer in it, which state."""

    group: int = -1  # -1: no K and V
    index: int = -1
    state: int = -1  # -1: no state


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """All that a context keeps for a model.

    ``groups`` are caches of K and V whose layers have one window each, the widest first (window 0,
    where there is one); ``places`` says where each layer of the model is found.
    """

    groups: tuple[CacheSpec, ...]
    states: StateSpec | None
    places: tuple[LayerPlace, ...]

    def __post_init__(self) -> None:
        for group in self.groups:
            if len({layer.window for layer in group.layers}) > 1:
                raise OptionError("the layers of a group must have the same window")

    @classmethod
    def single(cls, spec: CacheSpec) -> MemorySpec:
        """That of a model all of whose layers attend alike."""
        return cls((spec,), None, tuple(LayerPlace(0, i) for i in range(len(spec.layers))))

    @property
    def n_bytes(self) -> int:
        """Bytes of all of it."""
        states = 0 if self.states is None else self.states.n_bytes
        return states + sum(group.n_bytes for group in self.groups)


def group_layers(
    layers: tuple[LayerMemory, ...],
) -> tuple[tuple[tuple[LayerSpec, ...], ...], tuple[StateLayer, ...], tuple[LayerPlace, ...]]:
    """A model's attention layers by window, its states, and where each layer went."""
    windows = {layer.attention.window for layer in layers if layer.attention is not None}
    order = sorted(windows, key=lambda window: -(window or MAX_POSITION))
    groups: list[list[LayerSpec]] = [[] for _ in order]
    states: list[StateLayer] = []
    places: list[LayerPlace] = []
    for layer in layers:
        group = index = state = -1
        if layer.attention is not None:
            group = order.index(layer.attention.window)
            index = len(groups[group])
            groups[group].append(layer.attention)
        if layer.state is not None:
            state = len(states)
            states.append(layer.state)
        places.append(LayerPlace(group, index, state))
    return tuple(map(tuple, groups)), tuple(states), tuple(places)
