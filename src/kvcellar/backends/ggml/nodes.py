"""Making nodes of a ggml graph, and the constant tensors that graphs read.

Constants (RoPE's factors, the Hadamard matrix) lie in buffers of their own. Graphs share one
compute buffer, so what lies in that is gone once another graph has run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from kvcellar.backends.ggml.binding import (
    HINT_HADAMARD,
    ROPE_MODES,
    TYPE_F32,
    TYPE_I64,
    Ggml,
    Owned,
    tensor_at,
)
from kvcellar.backends.hadamard import hadamard
from kvcellar.backends.memory import aligned
from kvcellar.types import Float32Array, Int64Array, RopeSpec

_SHORTEST_ORDER = 2**12


class Nodes:
    """Makes the tensors of one graph; a tensor is its C address.

    Functions of ggml that take a context first are called without prefix and context:
    ``nodes.add(a, b)`` is ``ggml_add(context, a, b)``.

    Attributes:
        api: ggml's functions.
        context: where tensors are made.
        graph: what they become nodes of.
        sums: of tensors that have to be finite; the graph's owner looks at them.
    """

    def __init__(self, api: Ggml, context: int, graph: int, constants: Constants) -> None:
        self.sums: list[int] = []
        self.api = api
        self.context = context
        self.graph = graph
        self._constants = constants

    def __getattr__(self, name: str) -> Callable[..., int]:
        """The function ``ggml_<name>`` with this context; looked up once."""
        function: Callable[..., int] = partial(getattr(self.api, f"ggml_{name}"), self.context)
        setattr(self, name, function)
        return function

    def run_first(self, node: int) -> None:
        """Put a node before all that are made later: nodes run in the graph's order."""
        self.api.ggml_build_forward_expand(self.graph, node)

    def watch(self, x: int) -> None:
        """Put the sum of a tensor among ``sums``: it is finite only if every value is."""
        total = self.sum(x)
        self.api.ggml_set_output(total)
        self.run_first(total)
        self.sums.append(total)

    def dense(self, x: int) -> int:
        """x, copied if its values do not lie side by side, as those of a view may not."""
        return x if self.api.ggml_is_contiguous(x) else self.cont(x)

    def even(self, x: int) -> int:
        """x, copied unless its rows are equally far apart."""
        return x if self.api.ggml_is_contiguous_1(x) else self.cont(x)

    def f32(self, x: int) -> int:
        """A weight as f32, for functions of ggml that take no other type."""
        return x if tensor_at(x).type == TYPE_F32 else self.cast(x, TYPE_F32)

    def flat(self, x: int) -> int:
        """``[n, n_head, d]`` to ``[n, n_head * d]``."""
        d, n_head, n = tensor_at(x).ne[:3]
        return self.reshape_2d(self.dense(x), d * n_head, n)

    def softcap(self, x: int, cap: float, scale: float = 1.0) -> int:
        """``cap * tanh(scale * x / cap)``."""
        return self.scale(self.tanh(self.scale(self.dense(x), scale / cap)), cap)

    def rope(self, x: int, positions: int, spec: RopeSpec, attn_factor: float) -> int:
        """Rotate ``[n, n_head, d]`` by positions ``[n]``, and multiply by YaRN's magnitude."""
        return self.rope_ext(
            x,
            positions,
            None if spec.factors is None else self._constants.factors(spec.factors),
            spec.n_rot,
            ROPE_MODES[spec.mode],
            spec.n_ctx_orig,
            spec.freq_base,
            spec.freq_scale,
            spec.ext_factor,
            attn_factor,
            spec.beta_fast,
            spec.beta_slow,
        )

    def order(self, n: int) -> int:
        """Numbers from 0 to n at least, as i64."""
        return self._constants.order(n)

    def mix(self, x: int, size: int) -> int:
        """Apply the Hadamard transform to each run of ``size`` values of ``[n, n_head, d]``.

        0 for none; applied twice it gives x back.
        """
        if size == 0:
            return x
        d, n_head, n = tensor_at(x).ne[:3]
        runs = self.reshape_2d(self.dense(x), size, d * n_head * n // size)
        mixed = self.mul_mat(self._constants.hadamard(size), runs)
        self.api.ggml_mul_mat_set_hint(mixed, HINT_HADAMARD)
        return self.reshape_3d(mixed, d, n_head, n)


class Constant(NamedTuple):
    """A tensor in memory of its own."""

    tensor: int
    context: Owned
    buffer: Owned

    @classmethod
    def of(cls, api: Ggml, values: Float32Array | Int64Array) -> Constant:
        """A tensor of these values.

        Raises:
            AllocationError: there is no memory for it.
        """
        what = "a constant tensor"
        memory = aligned(what, values.nbytes)
        memory.view(values.dtype)[:] = values.reshape(-1)
        address = memory.ctypes.data
        context = api.context(what, 2 * api.ggml_tensor_overhead())
        buffer = api.make("ggml_backend_cpu_buffer_from_ptr", address, values.nbytes)
        buffer.memory = memory
        ne = [*reversed(values.shape), 1][:2]
        kind = TYPE_I64 if values.dtype == np.int64 else TYPE_F32
        tensor: int = api.ggml_new_tensor_2d(context, kind, *ne)
        api.ggml_backend_tensor_alloc(buffer, tensor, address)
        return cls(tensor, context, buffer)


class Constants:
    """Small tensors that graphs only read; each is made once and kept until :meth:`close`.

    One is kept as a whole or not at all, whatever interrupts the making.
    """

    def __init__(self, api: Ggml) -> None:
        self._api = api
        self._made: dict[object, Constant] = {}

    def factors(self, values: tuple[float, ...]) -> int:
        """A vector of RoPE factors."""
        if values not in self._made:
            self._made[values] = Constant.of(self._api, np.asarray(values, np.float32))
        return self._made[values].tensor

    def hadamard(self, size: int) -> int:
        """The Hadamard matrix of that size."""
        if size not in self._made:
            self._made[size] = Constant.of(self._api, hadamard(size))
        return self._made[size].tensor

    def order(self, n: int) -> int:
        """Numbers from 0 to n at least, as i64."""
        size = max(_SHORTEST_ORDER, 1 << (n - 1).bit_length())
        key = ("order", size)
        if key not in self._made:
            self._made[key] = Constant.of(self._api, np.arange(size))
        return self._made[key].tensor

    def close(self) -> None:
        """Free all tensors; closing twice is fine."""
        while self._made:
            constant = self._made.popitem()[1]
            constant.buffer.close()
            constant.context.close()
