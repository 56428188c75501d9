"""Small f32 tensors that graphs read but never write: RoPE's factors, the Hadamard matrix.

They lie in buffers of their own. Graphs share one compute buffer, so whatever lies in that is gone
once another graph has run.
"""

from __future__ import annotations

import numpy as np

from kvcellar.backends.ggml.binding import TYPE_F32, Ggml, InitParams
from kvcellar.backends.ggml.memory import array_at
from kvcellar.backends.ggml.weights import tensor_at
from kvcellar.backends.hadamard import hadamard
from kvcellar.errors import AllocationError
from kvcellar.types import Float32Array


class Constants:
    """Constant tensors by what they stand for; each is made once and kept until :meth:`close`."""

    def __init__(self, api: Ggml) -> None:
        self._api = api
        self._tensors: dict[object, int] = {}
        self._owned: list[tuple[int, int]] = []  # context, buffer

    def factors(self, values: tuple[float, ...]) -> int:
        """A vector of RoPE factors."""
        if values not in self._tensors:
            self._tensors[values] = self._make(np.asarray(values, np.float32))
        return self._tensors[values]

    def hadamard(self, size: int) -> int:
        """The Hadamard matrix of that size."""
        if size not in self._tensors:
            self._tensors[size] = self._make(hadamard(size))
        return self._tensors[size]

    def close(self) -> None:
        """Free all tensors; closing twice is fine."""
        while self._owned:
            context, buffer = self._owned.pop()
            self._api.ggml_backend_buffer_free(buffer)
            self._api.ggml_free(context)
        self._tensors.clear()

    def __del__(self) -> None:
        self.close()

    def _make(self, values: Float32Array) -> int:
        api = self._api
        context = api.ggml_init(InitParams(2 * api.ggml_tensor_overhead(), None, True))
        ne = [*reversed(values.shape), 1][:2]
        tensor: int = api.ggml_new_tensor_2d(context, TYPE_F32, *ne)
        kind = api.ggml_backend_cpu_buffer_type()
        buffer = api.ggml_backend_alloc_ctx_tensors_from_buft(context, kind)
        if not buffer:
            api.ggml_free(context)
            raise AllocationError("a constant tensor", values.nbytes)
        self._owned.append((context, buffer))
        array_at(tensor_at(tensor).data, np.float32, values.shape)[:] = values
        return tensor
