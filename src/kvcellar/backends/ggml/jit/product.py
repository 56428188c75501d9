"""Calling compiled products: which ones are ours, their code and scratch memory.

One instance serves all graphs of an executor. Scratch memory is kept here and not in graphs;
nodes find it through their task, and run one after the other, so all may share it.
"""

from __future__ import annotations

import ctypes as c
from functools import cache

import numpy as np

from kvcellar.backends.ggml.binding import TYPE_F32, Tensor
from kvcellar.backends.ggml.jit.compiler import (
    Compiled,
    compile_ir,
    counted,
    has_byte_products,
    why_not,
)
from kvcellar.backends.ggml.jit.product_formats import FORMATS, LANES, MOST, VALUES, unpacked_bytes
from kvcellar.backends.memory import scratch
from kvcellar.types import AnyArray

_BUFFER = "products of weights"
_LINE = 64  # bytes that memory is read in


def why_no_products() -> str | None:
    """Why ggml computes all products; None if some are ours."""
    return why_not() or (None if has_byte_products() else "this processor lacks AVX-512 VNNI")


class Task(c.Structure):
    """The user data of a node, as the code reads it."""

    _fields_ = (("scratch", c.c_void_p), ("thread_bytes", c.c_int64))


class Products:
    """Compiles products for the weights of a model, and holds what they work with.

    Raises:
        AllocationError: scratch memory cannot be had; :meth:`multiply` may raise it too.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._task = Task()
        self._kept: dict[int, Compiled] = {}  # by address; graphs have nothing but addresses
        self._memory: tuple[AnyArray, ...] = ()
        self._reserve(VALUES)

    def suits(self, x: Tensor, weight: Tensor) -> bool:
        """Whether it computes the product of such tensors; ggml computes the others."""
        return (
            weight.type in FORMATS
            and weight.ne[1] % LANES == 0
            and x.type == TYPE_F32
            and x.nb[0] == c.sizeof(c.c_float)
            and all(tensor.ne[i] == 1 for tensor in (x, weight) for i in (2, 3))
        )

    def quantise(self) -> int:
        """The address of what makes records of activations."""
        return self._keep(_compile_quantise())

    def multiply(self, weight: Tensor, n_tokens: int) -> int:
        """The address of the product of such weights with the records of ``n_tokens``."""
        self._reserve(weight.ne[0])
        return self._keep(_compile_product(weight.type, n_tokens if n_tokens <= MOST else 0))

    @property
    def task(self) -> int:
        """The address of the user data of products."""
        return c.addressof(self._task)

    def _keep(self, made: Compiled) -> int:
        """Keep code alive as long as this object, even if the cache of compiled code drops it."""
        return self._kept.setdefault(made.address, made).address

    def _reserve(self, n_in: int) -> None:
        """Allocate scratch memory for rows of ``n_in`` values."""
        n_bytes = unpacked_bytes(n_in)
        if n_bytes > self._task.thread_bytes:
            new = scratch(_BUFFER, n_bytes * self._n_threads + _LINE, np.uint8)
            self._memory = (*self._memory, new)  # the task may point to either now
            self._task.scratch = -(-new.ctypes.data // _LINE) * _LINE
            self._task.thread_bytes = n_bytes
            self._memory = (new,)


@cache
@counted
def _compile_quantise() -> Compiled:
    from kvcellar.backends.ggml.jit.product_code import FUNCTION, quantise_ir

    return compile_ir("quantised activations", quantise_ir, FUNCTION)


@cache
@counted
def _compile_product(kind: int, tokens: int) -> Compiled:
    from kvcellar.backends.ggml.jit.product_code import FUNCTION, product_ir

    form = FORMATS[kind]
    title = f"products of {form.name}, {tokens or 'many'} tokens"
    return compile_ir(title, lambda triple: product_ir(form, tokens, triple), FUNCTION)
