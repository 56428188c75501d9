"""Calling the attention kernel: which caches it can read, its lists and its memory.

One instance serves all graphs of an executor. Lists, scratch memory and counters are kept here and
not in graphs, so that a graph depends on nothing that grows with a sequence; each node finds them
through its task. Nodes run one after the other, so all may share them. The counters are zero
whenever no node runs.
"""

from __future__ import annotations

import ctypes as c
from functools import cache

import numpy as np

from kvcellar.backends.ggml.aside import Stop
from kvcellar.backends.ggml.jit.attention_shape import MANY, PREFETCHED, TYPES, UNIT, KernelShape
from kvcellar.backends.ggml.jit.compiler import (
    Compiled,
    compile_ir,
    counted,
    processor,
    why_not,
)
from kvcellar.backends.memory import scratch
from kvcellar.errors import NotSupported
from kvcellar.plan import CellLists
from kvcellar.types import AnyArray, CacheSpec, Int32Array, LayerSpec

BUFFER = "the attention kernel"

MAX_UNITS = 4096
"""How many units there may be, or one for each token."""

MULTIPLE = 4
"""What heads are a multiple of: the narrowest vector."""
MAX_HEAD = 512
"""Loops over a head are unrolled, for each query head of a group."""


class Work(c.Structure):
    """Where the kernel finds lists and memory; ``attention_code.WORK``."""

    _fields_ = (
        ("cells", c.c_void_p),  # i32, of all lists
        ("starts", c.c_void_p),  # i32 [n_tokens], where each list begins
        ("ends", c.c_void_p),  # i32 [n_tokens], and ends
        ("units", c.c_void_p),  # i32 [n_tokens], cells of a unit
        ("first_unit", c.c_void_p),  # i32 [n_tokens + 1], units of all tokens before
        ("tokens", c.c_void_p),  # i32 [n_units], the token of each unit
        ("items", c.c_void_p),  # f32 [n_units, n_head_kv, item_floats]
        ("counters", c.c_void_p),  # i32 [n_tokens, n_head_kv], items that are done
        ("threads", c.c_void_p),  # [n_threads, thread_bytes]
        ("thread_bytes", c.c_int64),
        ("stop", c.c_void_p),  # a byte: whether to end early
    )


_PER_TOKEN = ("starts", "ends", "units", "first_unit", "tokens")
"""The fields that each plan sets."""


class Task(c.Structure):
    """The user data of a node; ``attention_code.TASK``."""

    _fields_ = (("work", c.POINTER(Work)), ("scale", c.c_float), ("softcap", c.c_float))


def why_no_kernel(spec: CacheSpec) -> str | None:
    """Why the kernel cannot run over such a cache; None if it can."""
    if spec.v_trans:
        return "it needs flash_attn=True"
    if spec.type_k not in TYPES or spec.type_v not in TYPES:
        known = ", ".join(kind.label for kind in TYPES)
        own = f"{spec.type_k.label} and {spec.type_v.label}"
        return f"it needs K and V as one of {known}, not {own}"
    reasons = (why_no_layer(spec, layer) for layer in spec.layers)
    return next(filter(None, reasons), None) or why_not()


def why_no_layer(spec: CacheSpec, layer: LayerSpec) -> str | None:
    """Why the kernel cannot run over a layer of such a cache; None if it can."""
    if layer.v_offset is not None:
        return "V is part of K, which all query heads share: code for so many would be huge"
    for d, kind in ((layer.head_dim_k, spec.type_k), (layer.head_dim_v, spec.type_v)):
        if d % max(kind.block_size, MULTIPLE):
            return (
                f"heads of {d} as {kind.label} are no multiple of {max(kind.block_size, MULTIPLE)}"
            )
        if d > MAX_HEAD:
            return f"heads of {d} are larger than {MAX_HEAD}: code for them would be huge"
    return None


class AttentionKernel:
    """Compiles kernels for the layers of a cache, and holds what they work on.

    Raises:
        NotSupported: :func:`why_no_kernel` says so.
    """

    def __init__(self, spec: CacheSpec, n_threads: int) -> None:
        if reason := why_no_kernel(spec):
            raise NotSupported(f"the attention kernel cannot run: {reason}")
        self._spec = spec
        self._n_threads = n_threads
        self._work = Work()
        self._tasks: dict[tuple[float, float], Task] = {}
        self._item_floats = self._partial_floats = 0  # the most that any kernel needs
        self._score_rows = self._n_head_kv = 0
        self._kept: dict[int, Compiled] = {}  # by address; graphs have nothing but addresses
        self._arrays: dict[str, AnyArray] = {}  # what the fields of work are to point to

    def function(
        self, layer: int, n_head: int, *, softcap: bool = False, sinks: bool = False
    ) -> int:
        """The address of the kernel for a layer with ``n_head`` query heads.

        It reads q, K, V and, if there are any, sinks as f32: the sources of its node.
        """
        spec, native = self._spec.layers[layer], processor()
        assert native is not None, "why_no_kernel() was not asked"
        lanes = native.lanes
        while spec.head_dim_k % lanes or spec.head_dim_v % lanes:
            lanes //= 2
        group = n_head // spec.n_head_kv
        sizes = (spec.head_dim_k, spec.head_dim_v, group, lanes, native.registers)
        types = (self._spec.type_k, self._spec.type_v)
        shape = KernelShape(*sizes, *types, softcap=softcap, sinks=sinks)
        self._n_head_kv = max(self._n_head_kv, spec.n_head_kv)
        self._score_rows = max(self._score_rows, n_head)
        self._partial_floats = max(self._partial_floats, shape.partial_floats)
        self._item_floats = max(self._item_floats, spec.n_head_kv * shape.item_floats)
        compiled = _compile(shape)
        self._kept[compiled.address] = compiled
        return compiled.address

    def task(self, scale: float, softcap: float = 0.0) -> int:
        """The address of the user data for nodes with that scale and cap, 0 for none."""
        new = Task(c.pointer(self._work), scale, softcap)
        task = self._tasks.setdefault((scale, softcap), new)
        return c.addressof(task)

    def reset(self) -> None:
        """Forget what a computation that did not end has counted; :meth:`load` begins anew."""
        self._arrays.pop("counters", None)

    def load(self, lists: CellLists, stop: Stop | None = None) -> None:
        """Set the lists that the next graph reads, and all that its nodes find through their task.

        Every pointer is set: one that was interrupted may have left an array without its pointer.

        Args:
            lists: the lists.
            stop: ends the next graph early; None: nothing does.

        Raises:
            AllocationError: the memory that they take to work on cannot be had.
        """
        n_tokens, n_cells = len(lists.ends), len(lists.cells)
        lengths = lists.ends - lists.starts
        units = unit_sizes(lengths)
        n_units_each = -(-lengths // units)
        first_unit = np.zeros(n_tokens + 1, np.int32)
        np.cumsum(n_units_each, out=first_unit[1:])
        n_units = int(first_unit[-1])
        thread_floats = self._partial_floats + self._score_rows * int(units.max())
        self._work.thread_bytes = 4 * thread_floats
        sizes = {
            "cells": n_cells + PREFETCHED,
            "items": n_units * self._item_floats,
            "counters": n_tokens * self._n_head_kv,
            "threads": self._n_threads * thread_floats,
        }
        arrays = self._arrays
        for field, n in sizes.items():
            if field not in arrays or arrays[field].size < n:
                self._reserve(field, n)
        cells = arrays["cells"]
        cells[:n_cells] = lists.cells
        cells[n_cells : n_cells + PREFETCHED] = 0
        tokens = np.repeat(np.arange(n_tokens, dtype=np.int32), n_units_each)
        own = (lists.starts, lists.ends, units, first_unit, tokens)
        arrays.update(zip(_PER_TOKEN, own, strict=True))
        for field, array in arrays.items():
            setattr(self._work, field, array.ctypes.data)
        self._stop = stop or Stop()
        self._work.stop = self._stop.address

    def _reserve(self, field: str, n: int) -> None:
        """Allocate zeros for a field, at least n values of four bytes."""
        self._arrays[field] = scratch(BUFFER, 2 * n, np.int32)


def unit_sizes(lengths: Int32Array) -> Int32Array:
    """Cells of a unit for lists of these lengths: doubled until there are not too many units.

    A few lists may have :data:`MANY` units each; of many, which keep all threads busy anyway, each
    has fewer, so that what units leave behind stays small.
    """
    most = max(1, min(MANY, MAX_UNITS // len(lengths)))
    sizes = np.full(len(lengths), UNIT, np.int32)
    while (long := lengths > most * sizes).any():
        sizes[long] *= 2
    return sizes


@cache  # each kernel keeps its own: two threads may compile the same, and one result is dropped
@counted
def _compile(shape: KernelShape) -> Compiled:
    from kvcellar.backends.ggml.jit.attention_code import FUNCTION, kernel_ir

    return compile_ir(str(shape), lambda triple: kernel_ir(shape, triple), FUNCTION)
