"""The protocols of a backend: stores of K and V and of states, and what computes over them.

The cache sees only :class:`KVStore` and :class:`StateStore`, model files only ``Ops`` (in
``operations.py``), the runtime only :class:`ModelFile`; none of them knows a framework.
Rows are those of cells: K of a cell is ``n_embd_k`` values (heads side by side), V ``n_embd_v``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeVar

from kvcellar.backends.operations import Forward, Weights
from kvcellar.files import FileStamp
from kvcellar.plan import Plan
from kvcellar.types import (
    ByteArray,
    CacheSpec,
    Float32Array,
    Int32Array,
    Int64Array,
    MemorySpec,
    RowFormat,
    StateSpec,
)

T = TypeVar("T")

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
        """Store rows, converted to the store's types: k ``[n, n_embd_k]``, v ``[n, n_embd_v]``.

        Raises:
            ComputeError: a row is not finite in its type; nothing was written.
        """

    def read(self, layer: int, part: Part, cells: Int64Array) -> Float32Array:
        """The rows of cells as f32, ``[n, n_embd_k]`` or ``[n, n_embd_v]``."""

    def read_raw(self, layer: int, part: Part, cells: Int64Array) -> ByteArray:
        """The rows of cells as they are stored, ``[n, row_bytes]``."""

    def write_raw(self, layer: int, part: Part, cells: Int64Array, rows: ByteArray) -> None:
        """Store rows that :meth:`read_raw` returned, bit for bit; the caller has checked them."""

    def copy(self, src: Int64Array, dst: Int64Array) -> None:
        """Copy K and V of cells ``src`` to cells ``dst`` in every layer, bit for bit."""

    def rotate(self, cells: Int64Array, shifts: Int32Array) -> None:
        """Rotate each K row of cells by its shift, in every layer with RoPE."""

    def wipe(self, cells: Int64Array) -> None:
        """Zero K and V of cells in every layer."""

    def zero(self) -> None:
        """Set every byte to zero."""

    def resize(self, size: int, src: Int64Array, dst: Int64Array) -> None:
        """Change to ``size`` cells: rows of cells src go to dst, bit for bit, all others are zero.

        Raises:
            AllocationError: the new buffers cannot be had; the store is as it was.
        """

    def close(self) -> None:
        """Free the buffers; every other verb raises ClosedError afterwards."""


class StateStore(Protocol):
    """The recurrent states of a context, in f32. Row numbers are checked by the caller.

    A state is never changed where others refer to it: a decode reads one row and writes another.
    """

    @property
    def spec(self) -> StateSpec:
        """The shape that the store was made for."""

    def read(self, rows: Int64Array) -> Float32Array:
        """The states in rows, ``[n, row_bytes / 4]``: layer by layer n_conv, then n_ssm values."""

    def write(self, rows: Int64Array, states: Float32Array) -> None:
        """Store states that :meth:`read` returned."""

    def wipe(self, rows: Int64Array) -> None:
        """Zero the states in rows."""

    def zero(self) -> None:
        """Set every byte to zero."""

    def close(self) -> None:
        """Free the buffers; every other verb raises ClosedError afterwards."""


class OpTime(NamedTuple):
    """Nodes of one kind in a graph, and how long they took together."""

    n_nodes: int
    seconds: float


class GraphTimes(NamedTuple):
    """One computation of a graph; begin and end as ``perf_counter`` gives them.

    ``ops`` is empty if it was computed whole; otherwise it holds every node, by kind, and what
    exceeds its sum between begin and end is the price of measuring.
    """

    begin: float
    end: float
    ops: Mapping[str, OpTime]


class Executor(Protocol):
    """Runs one model's forward pass over one store."""

    @property
    def takes_lists(self) -> tuple[bool, ...]:
        """For each group, whether its plans are better given with lists than with masks."""

    @property
    def compile_seconds(self) -> float:
        """Seconds of all runs that went into compiling code at its first use."""

    def run(self, plan: Plan) -> Float32Array:
        """Compute a plan; returns logits ``[n_outputs, n_vocab]``, valid until the next run.

        Raises:
            ComputeError: the graph failed or was aborted, or a K/V row or a state that it wrote is
                not finite; those of the plan are undefined.
        """

    def watch(self, watcher: Callable[[GraphTimes], None]) -> None:
        """Call the watcher after every graph from now on, and compute some node by node.

        Raises:
            NotSupported: the backend cannot tell where a graph's time goes.
        """

    def close(self) -> None:
        """Free graphs and buffers."""


class TensorBytes(NamedTuple):
    """One tensor of a file as it is stored; the bytes are good until the file is closed."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: ByteArray


@dataclass(frozen=True, slots=True)
class OpenMemory:
    """The memory of a context: a store for each group of layers, one for states, an executor."""

    groups: tuple[KVStore, ...]
    states: StateStore | None
    executor: Executor

    def close(self) -> None:
        """Close all of it."""
        self.executor.close()
        for store in self.groups:
            store.close()
        if self.states is not None:
            self.states.close()


class ModelFile(Protocol[T]):
    """A GGUF file opened by a backend: what it says, and what computes with it."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def stamp(self) -> FileStamp:
        """Its stamp when it was opened."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """Key to int, float, bool, str, list of str, or NumPy array."""

    @property
    def weights(self) -> Weights[T]:
        """Its tensors."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its tensors."""

    def tensors(self) -> Iterator[TensorBytes]:
        """All tensors, by their names."""

    def convert_rows(self, rows: ByteArray, src: RowFormat, dst: RowFormat) -> ByteArray:
        """Rows of K or V ``[n, row_bytes]`` stored another way.

        Raises:
            OptionError: the backend cannot make that type.
        """

    def why_no_kernel(self, spec: CacheSpec) -> str | None:
        """Why attention cannot run in a kernel of our own; None if it can."""

    def open_memory(
        self,
        spec: MemorySpec,
        forward: Forward[T],
        *,
        kernel: bool = False,
        products: bool = False,
    ) -> OpenMemory:
        """Stores of that shape and what runs a forward pass over them; the caller closes them.

        Args:
            spec: the shape.
            forward: the pass.
            kernel: whether attention runs in a kernel of our own, where it can.
            products: whether products may be computed by code of our own, where it can.

        Raises:
            OptionError: types that do not fit the shape.
            AllocationError: the buffers cannot be had; nothing is left behind.
        """

    def close(self) -> None:
        """Close the file, after its stores and executors; closing twice is fine."""
