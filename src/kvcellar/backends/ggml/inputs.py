"""The tensors that a graph is fed through, and what it depends on.

A model need not read all of them: a graph of recurrent layers has no use for positions. ggml gives
such a tensor no memory, and then nothing is written into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcellar.backends.checks import check_learned
from kvcellar.backends.ggml.binding import (
    TYPE_F16,
    TYPE_F32,
    TYPE_I32,
    TYPE_I64,
    array_at,
    tensor_at,
)
from kvcellar.backends.ggml.nodes import Nodes
from kvcellar.plan import Plan
from kvcellar.types import AnyArray, CacheSpec

_DTYPES = {TYPE_F32: np.float32, TYPE_F16: np.float16, TYPE_I32: np.int32, TYPE_I64: np.int64}


class Shape(NamedTuple):
    """The shape that a graph depends on, its key. Rows and cells are not part of it."""

    n_tokens: int
    n_kv: tuple[int, ...]  # of each group; 0 where tokens attend over lists
    n_seqs: int  # that recurrent layers tell apart, 0 where there are none
    n_outputs: int
    n_embd: int  # width of input embeddings, 0 when tokens are given

    @classmethod
    def of(cls, plan: Plan) -> Shape:
        """The shape of a plan."""
        micro = plan.micro
        n_embd = 0 if micro.embeddings is None else micro.embeddings.shape[1]
        n_kv = tuple([group.mask.shape[1] for group in plan.groups])
        n_seqs = 0 if plan.states is None else len(plan.states.sources)
        return cls(len(micro.positions), n_kv, n_seqs, len(micro.outputs), n_embd)


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """Where a group of attention layers writes, and what it may read."""

    cells: int  # i64 [n]
    channels: int | None  # i64 [n * n_embd_v], where V's values go when V is transposed
    mask: int | None  # f16 [n, n_kv]


@dataclass(frozen=True, slots=True)
class StateInputs:
    """The rows that recurrent layers start from and leave their states in."""

    sources: int  # i32 [n_seqs]
    targets: int  # i64 [n_seqs]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The graph's input tensors; those that the plan has nothing for are None."""

    tokens: int | None  # i32 [n]
    embeddings: int | None  # f32 [n, n_embd]
    positions: int  # i32 [n]
    outputs: int | None  # i32 [n_outputs]; None where all rows are wanted, or none
    groups: tuple[GroupInputs, ...]
    states: StateInputs | None

    @classmethod
    def declare(cls, nodes: Nodes, shape: Shape, specs: Sequence[CacheSpec]) -> Inputs:
        """New tensors without memory, for plans of a shape over groups of these specs."""

        def new(kind: int, *ne: int) -> int:
            tensor = (
                nodes.new_tensor_2d(kind, *ne) if len(ne) > 1 else nodes.new_tensor_1d(kind, *ne)
            )
            nodes.api.ggml_set_input(tensor)
            return tensor

        def group(spec: CacheSpec, n_kv: int) -> GroupInputs:
            width = transposed_width(spec)
            return GroupInputs(
                cells=new(TYPE_I64, n),
                channels=new(TYPE_I64, n * width) if width else None,
                mask=new(TYPE_F16, n_kv, n) if n_kv else None,
            )

        n, n_seqs = shape.n_tokens, shape.n_seqs
        partial = 0 < shape.n_outputs < n
        return cls(
            tokens=None if shape.n_embd else new(TYPE_I32, n),
            embeddings=new(TYPE_F32, shape.n_embd, n) if shape.n_embd else None,
            positions=new(TYPE_I32, n),
            outputs=new(TYPE_I32, shape.n_outputs) if partial else None,
            groups=tuple(map(group, specs, shape.n_kv)),
            states=StateInputs(new(TYPE_I32, n_seqs), new(TYPE_I64, n_seqs)) if n_seqs else None,
        )


class Feeds:
    """The memory of a built graph's inputs.

    Args:
        inputs: their tensors.
        specs: the shape of each group.
        n_positions: how many positions the model has learned, if it looks them up.
    """

    def __init__(
        self, inputs: Inputs, specs: Sequence[CacheSpec], n_positions: int | None = None
    ) -> None:
        self._n_positions = n_positions
        self._tokens = view_of(inputs.tokens, 1)
        self._embeddings = view_of(inputs.embeddings, 2)
        self._positions = view_of(inputs.positions, 1)
        self._outputs = view_of(inputs.outputs, 1)
        self._cells = [view_of(group.cells, 1) for group in inputs.groups]
        self._masks = [view_of(group.mask, 2) for group in inputs.groups]
        self._channels = [view_of(group.channels, 1) for group in inputs.groups]
        self._starts = [np.arange(transposed_width(s), dtype=np.int64) * s.size for s in specs]
        states = inputs.states
        self._sources = None if states is None else view_of(states.sources, 1)
        self._targets = None if states is None else view_of(states.targets, 1)

    def load(self, plan: Plan) -> None:
        """Write a plan of this graph's shape into them.

        Cells, rows of states and outputs come from a cache, and tokens are checked by the batch.

        Raises:
            PositionError: the model has not learned a position; ggml would abort the process.
        """
        micro, states = plan.micro, plan.states
        if self._n_positions is not None:
            check_learned(micro.positions, self._n_positions)
        pairs: list[tuple[AnyArray | None, AnyArray | None]] = [
            (self._tokens, micro.tokens),
            (self._embeddings, micro.embeddings),
            (self._positions, micro.positions),
            (self._outputs, micro.outputs),
        ]
        for i, group in enumerate(plan.groups):
            pairs += (self._cells[i], group.cells), (self._masks[i], group.mask)
            channels = self._channels[i]
            if channels is not None:
                out = channels.reshape(len(group.cells), -1)
                np.add.outer(group.cells, self._starts[i], out=out)
        if states is not None:
            pairs += (self._sources, states.sources), (self._targets, states.targets)
        for view, values in pairs:
            if view is not None and values is not None:
                view[:] = values


def transposed_width(spec: CacheSpec) -> int:
    """Values of V a cell when V is transposed, else 0; the same in all layers that store V."""
    return max((layer.n_embd_v for layer in spec.layers), default=0) if spec.v_trans else 0


def view_of(tensor: int | None, n_dims: int) -> AnyArray | None:
    """A tensor's memory as an array, or None where it has none."""
    if tensor is None:
        return None
    struct = tensor_at(tensor)
    if not struct.data:
        return None
    return array_at(struct.data, _DTYPES[struct.type], tuple(reversed(struct.ne[:n_dims])))
