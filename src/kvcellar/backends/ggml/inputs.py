"""What a graph is built into, and the tensors it is fed through.

A model need not read all of them: a graph of recurrent layers has no use for positions. ggml gives
such a tensor no memory, and then nothing is written into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcellar.backends.checks import check_learned
from kvcellar.backends.ggml.binding import TYPE_F16, TYPE_F32, TYPE_I32, TYPE_I64, Ggml
from kvcellar.backends.ggml.gguf import array_at, tensor_at
from kvcellar.plan import CellPlan, Plan
from kvcellar.types import AnyArray, CacheSpec

_DTYPES = {TYPE_F32: np.float32, TYPE_F16: np.float16, TYPE_I32: np.int32, TYPE_I64: np.int64}


class Shape(NamedTuple):
    """What a graph depends on; the key it is kept under. Rows and cells are not part of it."""

    n_tokens: int
    n_kv: tuple[int, ...]  # a number a group; 0 where tokens attend over lists
    n_seqs: int  # that recurrent layers tell apart, 0 where there are none
    n_outputs: int
    n_embd: int  # width of input embeddings, 0 when tokens are given

    @classmethod
    def of(cls, plan: Plan) -> Shape:
        """The shape of a plan."""
        micro, n_kv = plan.micro, []
        for group in plan.groups:
            n_kv.append(group.mask.shape[1])  # noqa: PERF401 - once a token: no calls of our own
        n_embd = 0 if micro.embeddings is None else micro.embeddings.shape[1]
        n_seqs = 0 if plan.states is None else len(plan.states.sources)
        return cls(len(micro.positions), tuple(n_kv), n_seqs, len(micro.outputs), n_embd)


class Target(NamedTuple):
    """Where nodes are built."""

    api: Ggml
    context: int
    graph: int


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
    def declare(cls, api: Ggml, context: int, shape: Shape, specs: Sequence[CacheSpec]) -> Inputs:
        """New tensors without memory, for plans of a shape over groups of these specs."""

        def new(kind: int, *ne: int) -> int:
            make: Callable[..., int] = getattr(api, f"ggml_new_tensor_{len(ne)}d")
            tensor = make(context, kind, *ne)
            api.ggml_set_input(tensor)
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
        self._groups = [_GroupFeeds(*each) for each in zip(inputs.groups, specs, strict=True)]
        states = inputs.states
        self._sources = None if states is None else view_of(states.sources, 1)
        self._targets = None if states is None else view_of(states.targets, 1)

    def load(self, plan: Plan) -> None:
        """Write a plan of this graph's shape into them.

        Cells, rows of states and outputs come from a cache, and tokens are checked by the batch.

        Raises:
            PositionError: the model has not learned a position; ggml would abort the process.
        """
        micro = plan.micro
        if self._n_positions is not None:
            check_learned(micro.positions, self._n_positions)
        if self._tokens is not None and micro.tokens is not None:
            self._tokens[:] = micro.tokens
        if self._embeddings is not None and micro.embeddings is not None:
            self._embeddings[:] = micro.embeddings
        if self._positions is not None:
            self._positions[:] = micro.positions
        if self._outputs is not None:
            self._outputs[:] = micro.outputs
        for feeds, cells in zip(self._groups, plan.groups, strict=True):
            feeds.load(cells)
        if self._sources is not None and plan.states is not None:
            self._sources[:] = plan.states.sources
        if self._targets is not None and plan.states is not None:
            self._targets[:] = plan.states.targets


class _GroupFeeds:
    def __init__(self, inputs: GroupInputs, spec: CacheSpec) -> None:
        self._cells = view_of(inputs.cells, 1)
        self._channels = view_of(inputs.channels, 1)
        self._mask = view_of(inputs.mask, 2)
        self._starts = np.arange(transposed_width(spec), dtype=np.int64) * spec.size

    def load(self, plan: CellPlan) -> None:
        if self._cells is not None:
            self._cells[:] = plan.cells
        if self._mask is not None:
            self._mask[:] = plan.mask
        if self._channels is not None:
            out = self._channels.reshape(len(plan.cells), -1)
            np.add.outer(plan.cells, self._starts, out=out)


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
