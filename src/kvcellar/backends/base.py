"""What a backend provides: a store of K and V bytes, and the operations models are written in.

The cache sees only :class:`KVStore`, model files only :class:`Ops`, the runtime only
:class:`ModelFile`; none of them knows a framework.
Rows are those of cells: K of a cell is ``n_embd_k`` values (heads side by side), V ``n_embd_v``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

from kvcellar.plan import Plan
from kvcellar.types import (
    ByteArray,
    CacheSpec,
    Float32Array,
    Int32Array,
    Int64Array,
    RopeSpec,
)

T = TypeVar("T")

T_co = TypeVar("T_co", covariant=True)

Part = Literal["k", "v"]


class KVStore(Protocol):
    """The bytes of a cache. Cell numbers are checked by the caller, never here."""

    @property
    def spec(self) -> CacheSpec:
        """The shape that the store was made for."""

    @property
    def can_shift(self) -> bool:
        """Whether :meth:`rotate` works on this store."""

    @property
    def can_copy(self) -> bool:
        """Whether :meth:`copy` works on this store."""

    def write(self, layer: int, cells: Int64Array, k: Float32Array, v: Float32Array) -> None:
        """Store rows, converted to the store's types: k ``[n, n_embd_k]``, v ``[n, n_embd_v]``."""

    def read(self, layer: int, part: Part, cells: Int64Array) -> Float32Array:
        """The rows of cells as f32, ``[n, n_embd_k]`` or ``[n, n_embd_v]``."""

    def read_raw(self, layer: int, part: Part, cells: Int64Array) -> ByteArray:
        """The rows of cells as they are stored, ``[n, row_bytes]``."""

    def write_raw(self, layer: int, part: Part, cells: Int64Array, rows: ByteArray) -> None:
        """Store rows that :meth:`read_raw` returned, bit for bit."""

    def copy(self, src: Int64Array, dst: Int64Array) -> None:
        """Copy K and V of cells ``src`` to cells ``dst`` in every layer, bit for bit."""

    def rotate(self, cells: Int64Array, shifts: Int32Array) -> None:
        """Rotate the K rows of cells by so many positions each, in every layer with RoPE."""

    def wipe(self, cells: Int64Array) -> None:
        """Zero K and V of cells in every layer."""

    def zero(self) -> None:
        """Set every byte to zero."""

    def resize(self, size: int, src: Int64Array, dst: Int64Array) -> None:
        """Have so many cells: the rows of cells src lie at dst, bit for bit, all others are zero.

        Raises:
            AllocationError: the new buffers cannot be had; the store is as it was.
        """

    def close(self) -> None:
        """Give the buffers back; the store is of no use afterwards."""


@dataclass(frozen=True, slots=True)
class ExpertWeights(Generic[T]):
    """The weights of a mixture of experts, of which each token uses ``n_used``.

    A scale multiplies what its expert's matrix gives; None where the file has none.
    """

    router: T  # [n_expert, n_embd]
    gate: T  # [n_expert, n_ff, n_embd]
    up: T  # [n_expert, n_ff, n_embd]
    down: T  # [n_expert, n_embd, n_ff]
    gate_scale: T | None  # [n_expert]
    up_scale: T | None  # [n_expert]
    down_scale: T | None  # [n_expert]
    n_used: int


class Ops(Protocol[T]):
    """The operations that a model file is written in; T is the backend's tensor.

    Shapes are given the NumPy way, tokens first. A backend may compute at once or build a graph.
    """

    @property
    def plan(self) -> Plan:
        """The microbatch that is computed."""

    def embed(self, table: T) -> T:
        """Rows of a ``[n_vocab, n_embd]`` table for the plan's tokens (or its embeddings)."""

    def linear(self, x: T, weight: T, bias: T | None = None) -> T:
        """``x @ weight.T + bias``: x ``[..., n_in]``, weight ``[n_out, n_in]``."""

    def rms_norm(self, x: T, weight: T, eps: float) -> T:
        """Root-mean-square normalisation over the last axis, times weight."""

    def heads(self, x: T, n_head: int) -> T:
        """Split the last axis: ``[n, n_head * d]`` to ``[n, n_head, d]``."""

    def rope(self, x: T, spec: RopeSpec) -> T:
        """Rotate ``[n, n_head, d]`` by the plan's positions."""

    def attention(self, layer: int, q: T, k: T, v: T, scale: float) -> T:
        """Store k and v in the plan's cells, then attend over the cells that it allows.

        q ``[n, n_head, d]``, k and v ``[n, n_head_kv, d]``; returns ``[n, n_head * d_v]``.
        """

    def add(self, a: T, b: T) -> T:
        """Elementwise sum; b may have fewer rows and is then repeated."""

    def mul(self, a: T, b: T) -> T:
        """Elementwise product; b may have fewer rows and is then repeated."""

    def scale(self, x: T, factor: float) -> T:
        """Multiply by a number."""

    def swiglu(self, gate: T, up: T) -> T:
        """``silu(gate) * up``."""

    def experts(self, x: T, weights: ExpertWeights[T]) -> T:
        """Mixture of SwiGLU experts: softmax over all, the best ``n_used``, weights renormalised.

        x ``[n, n_embd]``; returns the same shape.
        """

    def outputs(self, x: T) -> T:
        """Only the rows whose logits are wanted."""


class Weights(Protocol[T_co]):
    """The tensors of a model file, by name; shapes are given the NumPy way."""

    def has(self, name: str) -> bool:
        """Whether the file has that tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that the file must have."""

    def matrix(self, name: str, *shape: int) -> T_co:
        """A weight of any type that :meth:`Ops.linear` or :meth:`Ops.embed` can take.

        Raises:
            UnsupportedModel: absent, of another shape, or of a type that cannot be computed.
        """

    def vector(self, name: str, n: int) -> T_co:
        """A norm or bias of n f32 values."""

    def values(self, name: str, n: int) -> tuple[float, ...]:
        """The numbers of a small f32 tensor, for example RoPE's frequency factors."""


class Executor(Protocol):
    """Runs one model's forward pass over one store."""

    @property
    def lists_up_to(self) -> int:
        """Plans of so many tokens are better given with lists of cells than with a mask."""

    def run(self, plan: Plan) -> Float32Array:
        """Compute a plan; returns logits ``[n_outputs, n_vocab]``, valid until the next run.

        Raises:
            ComputeError: the graph failed or was aborted; K/V rows of the plan are undefined.
        """

    def close(self) -> None:
        """Give graphs and buffers back."""


Forward = Callable[[Ops[T]], T]
"""A model's forward pass: from the plan that the ops carry to logits."""


class ModelFile(Protocol[T]):
    """A GGUF file opened by a backend: what it says, and what computes with it."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """Key to int, float, bool, str, list of str, or NumPy array."""

    @property
    def weights(self) -> Weights[T]:
        """Its tensors."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its tensors."""

    def why_no_kernel(self, spec: CacheSpec) -> str | None:
        """Why few tokens cannot attend through a kernel of our own; None if they can."""

    def open_cache(
        self, spec: CacheSpec, forward: Forward[T], *, kernel: bool = False
    ) -> tuple[KVStore, Executor]:
        """A store of that shape and what runs a forward pass over it; the caller closes both.

        Args:
            spec: the shape.
            forward: the pass.
            kernel: whether few tokens attend through a kernel of our own.

        Raises:
            OptionError: types that do not fit the shape.
            AllocationError: the buffers cannot be had; nothing is left behind.
        """

    def close(self) -> None:
        """Give the file back; stores and executors are closed before. Twice is fine."""
