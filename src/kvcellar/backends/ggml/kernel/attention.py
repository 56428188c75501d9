"""Attention over lists of cells, for graphs of few tokens: what a compiled kernel is fed with.

One instance serves all graphs of an executor. Lists, scratch memory and counters lie here and not
in graphs, so that a graph depends on nothing that grows with a sequence; each node finds them
through its task. Nodes run one after the other, so all may share them. The counters are zero
whenever no node runs.
"""

from __future__ import annotations

import ctypes as c

import numpy as np

from kvcellar.backends.ggml.kernel.jit import compile_attention, processor, why_not
from kvcellar.backends.ggml.kernel.shape import MANY, PREFETCHED, UNIT, KernelShape
from kvcellar.plan import CellLists
from kvcellar.types import AnyArray, CacheSpec, Int32Array, KVType

MAX_TOKENS = 63
"""With more, flash attention works on tiles of queries, and is about as fast."""


class Work(c.Structure):
    """Where the kernel finds lists and memory; ``code.WORK``."""

    _fields_ = (
        ("cells", c.c_void_p),  # i32, the lists one after the other
        ("starts", c.c_void_p),  # i32 [n_tokens + 1], where each list begins
        ("units", c.c_void_p),  # i32 [n_tokens], cells of a unit
        ("first_unit", c.c_void_p),  # i32 [n_tokens + 1], units of all tokens before
        ("items", c.c_void_p),  # f32 [n_units, n_head_kv, item_floats]
        ("counters", c.c_void_p),  # i32 [n_tokens, n_head_kv], items that are done
        ("threads", c.c_void_p),  # [n_threads, thread_bytes]
        ("thread_bytes", c.c_int64),
    )


class Task(c.Structure):
    """The user data of a node; ``code.TASK``."""

    _fields_ = (("work", c.POINTER(Work)), ("scale", c.c_float), ("softcap", c.c_float))


def why_no_kernel(spec: CacheSpec) -> str | None:
    """Why the kernel cannot run over such a cache; None if it can."""
    if spec.v_trans:
        return "it needs flash_attn=True"
    if spec.type_k is not KVType.F16 or spec.type_v is not KVType.F16:
        return f"it needs K and V as f16, not {spec.type_k.label} and {spec.type_v.label}"
    for layer in spec.layers:
        if layer.head_dim_k % 4 or layer.head_dim_v % 4:
            return f"heads of {layer.head_dim_k} and {layer.head_dim_v} are no multiples of 4"
    return why_not()


class AttentionKernel:
    """Compiles kernels for the layers of a cache, and holds what they work on."""

    max_tokens = MAX_TOKENS

    def __init__(self, spec: CacheSpec, n_threads: int) -> None:
        self._spec = spec
        self._n_threads = n_threads
        self._work = Work()
        self._tasks: dict[tuple[float, float], Task] = {}
        self._shapes: dict[KernelShape, int] = {}  # with their largest n_head_kv
        self._arrays: dict[str, AnyArray] = {}  # what the fields of work point to

    def function(
        self, layer: int, n_head: int, *, softcap: bool = False, sinks: bool = False
    ) -> int:
        """The address of the kernel for a layer with so many query heads.

        It reads q, K, V and, if there are any, sinks as f32: the sources of its node.
        """
        spec, native = self._spec.layers[layer], processor()
        assert native is not None, "why_no_kernel() was not asked"
        lanes = native.lanes
        while spec.head_dim_k % lanes or spec.head_dim_v % lanes:
            lanes //= 2
        group = n_head // spec.n_head_kv
        sizes = (spec.head_dim_k, spec.head_dim_v, group, lanes, native.registers)
        shape = KernelShape(*sizes, softcap=softcap, sinks=sinks)
        self._shapes[shape] = max(self._shapes.get(shape, 0), spec.n_head_kv)
        return compile_attention(shape).address

    def task(self, scale: float, softcap: float = 0.0) -> int:
        """The address of the user data for nodes with that scale and cap, 0 for none."""
        new = Task(c.pointer(self._work), scale, softcap)
        task = self._tasks.setdefault((scale, softcap), new)
        return c.addressof(task)

    def load(self, lists: CellLists) -> None:
        """Let the next graph that is computed read these lists."""
        lengths = np.diff(lists.starts)
        units = unit_sizes(lengths)
        first_unit = np.zeros(len(lists.starts), np.int32)
        np.cumsum(-(-lengths // units), out=first_unit[1:])
        n_cells, n_units = len(lists.cells), int(first_unit[-1])
        cells = self._reserve("cells", n_cells + PREFETCHED)
        cells[:n_cells] = lists.cells
        cells[n_cells : n_cells + PREFETCHED] = 0
        self._point_to("starts", lists.starts)
        self._point_to("units", units)
        self._point_to("first_unit", first_unit)
        shapes, largest = self._shapes.items(), int(units.max())
        self._reserve("items", n_units * max(n * shape.item_floats for shape, n in shapes))
        self._reserve("counters", len(units) * max(self._shapes.values()))
        self._work.thread_bytes = max(shape.thread_bytes(n, largest) for shape, n in shapes)
        self._reserve("threads", self._n_threads * self._work.thread_bytes // 4)

    def _reserve(self, field: str, n: int) -> AnyArray:
        """At least n values of four bytes for a field; zeros when new."""
        array = self._arrays.get(field)
        if array is None or array.size < n:
            array = np.zeros(2 * n, np.int32)
            self._point_to(field, array)
        return array

    def _point_to(self, field: str, array: AnyArray) -> None:
        self._arrays[field] = array
        setattr(self._work, field, array.ctypes.data)


def unit_sizes(lengths: Int32Array) -> Int32Array:
    """Cells of a unit for lists of these lengths: doubled until there are not too many units."""
    sizes = np.full(len(lengths), UNIT, np.int32)
    while (long := lengths > MANY * sizes).any():
        sizes[long] *= 2
    return sizes
