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
from kvcellar.backends.ggml.kernel.shape import PREFETCHED, UNIT, KernelShape
from kvcellar.plan import CellLists
from kvcellar.types import CacheSpec, Float32Array, Int32Array, KVType

MAX_TOKENS = 32
"""Up to so many tokens the kernel is faster than flash attention with a mask."""


class Work(c.Structure):
    """Where the kernel finds lists and memory; ``code.WORK``."""

    _fields_ = (
        ("cells", c.c_void_p),  # i32, the lists one after the other
        ("starts", c.c_void_p),  # i32 [n_tokens + 1], where each list begins
        ("first_unit", c.c_void_p),  # i32 [n_tokens + 1], units of all tokens before
        ("items", c.c_void_p),  # f32 [n_units, n_head_kv, item_floats]
        ("threads", c.c_void_p),  # f32 [n_threads, thread_floats]
        ("counters", c.c_void_p),  # i32 [n_tokens, n_head_kv], items that are done
    )


class Task(c.Structure):
    """The user data of a node; ``code.TASK``."""

    _fields_ = (("work", c.POINTER(Work)), ("scale", c.c_float))


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
        self._tasks: dict[float, Task] = {}
        self._item_floats = 0  # of all heads of a unit
        self._thread_floats = 0
        self._n_head_kv = max(layer.n_head_kv for layer in spec.layers)
        self._cells: Int32Array = np.empty(0, np.int32)
        self._starts: Int32Array = np.zeros(1, np.int32)
        self._first_unit: Int32Array = np.zeros(1, np.int32)
        self._items: Float32Array = np.empty(0, np.float32)
        self._threads: Float32Array = np.empty(0, np.float32)
        self._counters: Int32Array = np.empty(0, np.int32)

    def function(self, layer: int, n_head: int) -> int:
        """The address of the kernel for a layer with so many query heads."""
        spec, native = self._spec.layers[layer], processor()
        assert native is not None, "why_no_kernel() was not asked"
        lanes = native.lanes
        while spec.head_dim_k % lanes or spec.head_dim_v % lanes:
            lanes //= 2
        group = n_head // spec.n_head_kv
        shape = KernelShape(spec.head_dim_k, spec.head_dim_v, group, lanes, native.registers)
        self._item_floats = max(self._item_floats, spec.n_head_kv * shape.item_floats)
        self._thread_floats = max(self._thread_floats, shape.thread_floats(spec.n_head_kv))
        return compile_attention(shape).address

    def task(self, scale: float) -> int:
        """The address of the user data for nodes with that scale."""
        task = self._tasks.setdefault(scale, Task(c.pointer(self._work), scale))
        return c.addressof(task)

    def load(self, lists: CellLists) -> None:
        """Let the next graph that is computed read these lists."""
        n_cells, n_tokens = len(lists.cells), len(lists.starts) - 1
        n_units = (np.diff(lists.starts) + (UNIT - 1)) // UNIT
        self._starts = lists.starts
        self._first_unit = np.zeros(n_tokens + 1, np.int32)
        np.cumsum(n_units, out=self._first_unit[1:])
        self._reserve(n_cells, int(self._first_unit[-1]), n_tokens)
        self._cells[:n_cells] = lists.cells
        self._cells[n_cells : n_cells + PREFETCHED] = 0
        work = self._work
        work.cells, work.starts = self._cells.ctypes.data, self._starts.ctypes.data
        work.first_unit = self._first_unit.ctypes.data
        work.items, work.threads = self._items.ctypes.data, self._threads.ctypes.data
        work.counters = self._counters.ctypes.data

    def _reserve(self, n_cells: int, n_units: int, n_tokens: int) -> None:
        if self._cells.size < n_cells + PREFETCHED:
            self._cells = np.empty(2 * n_cells + PREFETCHED, np.int32)
        if self._items.size < n_units * self._item_floats:
            self._items = np.empty(2 * n_units * self._item_floats, np.float32)
        if self._threads.size < self._n_threads * self._thread_floats:
            self._threads = np.empty(self._n_threads * self._thread_floats, np.float32)
        if self._counters.size < n_tokens * self._n_head_kv:
            self._counters = np.zeros(n_tokens * self._n_head_kv, np.int32)
