"""Recurrent states in one ggml buffer, and the nodes that read and write them.

Up to two f32 tensors a layer, a row a state: the last inputs of its convolution ``[d, k - 1]``, a
channel after the other and the oldest input first, and its recurrent state
``[n_head, d, d_state]``. The row behind the last is a state of zeros, from which new sequences
start: nothing ever writes it.

States are gathered by row and scattered by row. The rows are inputs, so a graph serves every plan
of its shape. A row may be read and written by one graph: what reads it comes before what writes it,
since the node that writes is made of the node that read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from kvcellar.backends.ggml.binding import TYPE_F32, Owned, array_at, tensor_at
from kvcellar.backends.ggml.buffers import Buffer, BufferType, HostBufferType
from kvcellar.backends.ggml.inputs import StateInputs
from kvcellar.backends.ggml.library import load
from kvcellar.backends.ggml.nodes import Nodes
from kvcellar.backends.memory import check_available
from kvcellar.errors import AllocationError, ClosedError, not_copied
from kvcellar.types import Float32Array, Int64Array, StateSpec

BUFFER = "the state buffer"
_FLOAT = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Open:
    """Allocated states."""

    context: Owned
    buffer: Buffer | None
    parts: list[Float32Array]  # in the order of a state's values

    def close(self) -> None:
        if self.buffer is not None:
            self.buffer.close()
        self.context.close()


class GgmlStateStore:
    """A :class:`~kvcellar.backends.base.StateStore` in memory that ggml allocates.

    Attributes:
        spec: the shape.
        conv: address of each layer's tensor ``[n_rows + 1, n_conv]``, 0 where it has none.
        ssm: address of each layer's tensor ``[n_rows + 1, n_ssm]``, 0 where it has none.

    Raises:
        AllocationError: the buffer cannot be had; nothing is left behind.
    """

    __reduce_ex__ = not_copied(
        "a GgmlStateStore", "make another, and move rows with their read and write methods"
    )

    def __init__(self, spec: StateSpec, buffer_type: BufferType | None = None) -> None:
        self.spec = spec
        self._api = load().api
        self.conv: list[int] = []
        self.ssm: list[int] = []
        n_bytes = (spec.n_rows + 1) * spec.row_bytes
        check_available(BUFFER, n_bytes)
        kind = HostBufferType() if buffer_type is None else buffer_type
        self._open: _Open | None = self._allocate(kind, n_bytes)

    @property
    def _parts(self) -> list[Float32Array]:
        if self._open is None:
            raise ClosedError(f"{BUFFER} is closed with its context")
        return self._open.parts

    def read(self, rows: Int64Array) -> Float32Array:
        """The states in rows, ``[n, row_bytes / 4]``: layer by layer n_conv, then n_ssm values."""
        states = np.empty((len(rows), self.spec.row_bytes // 4), np.float32)
        for part, piece in zip(self._parts, self._split(states), strict=True):
            piece[:] = part[rows]
        return states

    def write(self, rows: Int64Array, states: Float32Array) -> None:
        """Store states that :meth:`read` returned."""
        for part, piece in zip(self._parts, self._split(states), strict=True):
            part[rows] = piece

    def wipe(self, rows: Int64Array) -> None:
        """Zero the states in rows."""
        for part in self._parts:
            part[rows] = 0

    def zero(self) -> None:
        """Set every byte to zero."""
        for part in self._parts:
            part[:] = 0

    def close(self) -> None:
        """Free the buffer; closing twice is fine."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def _allocate(self, kind: BufferType, n_bytes: int) -> _Open:
        size = (2 * len(self.spec.layers) + 1) * self._api.ggml_tensor_overhead()
        context = self._api.context(BUFFER, size)
        try:
            return self._fill(context, kind, n_bytes)
        except BaseException:
            context.close()
            raise

    def _fill(self, context: Owned, kind: BufferType, n_bytes: int) -> _Open:
        for i, layer in enumerate(self.spec.layers):
            self.conv.append(self._declare(context, f"cache_r_l{i}", layer.n_conv))
            self.ssm.append(self._declare(context, f"cache_s_l{i}", layer.n_ssm))
        if n_bytes == 0:  # there are no tensors
            return _Open(context, None, [])
        buffer = kind.allocate(context.address)
        if buffer is None:
            raise AllocationError(f"{BUFFER} in {kind.name} memory", n_bytes)
        pairs = zip(self.conv, self.ssm, strict=True)
        parts = [_rows(tensor) for pair in pairs for tensor in pair if tensor]
        _log.info("%s state buffer: %.2f MiB", kind.name, n_bytes / 2**20)
        return _Open(context, buffer, parts)

    def _declare(self, context: Owned, name: str, n: int) -> int:
        """A tensor of n values a row; 0 for none."""
        if n == 0:
            return 0
        n_rows = self.spec.n_rows + 1
        tensor: int = self._api.ggml_new_tensor_2d(context, TYPE_F32, n, n_rows)
        self._api.ggml_set_name(tensor, name.encode())
        return tensor

    def _split(self, states: Float32Array) -> list[Float32Array]:
        """Views of the columns that belong to each part."""
        ends = np.cumsum([part.shape[1] for part in self._parts])
        return np.split(states, ends[:-1], axis=1) if self._parts else []


def _rows(tensor: int) -> Float32Array:
    struct = tensor_at(tensor)
    return array_at(struct.data, np.float32, (struct.ne[1], struct.ne[0]))


def short_conv(
    nodes: Nodes, store: GgmlStateStore, inputs: StateInputs, layer: int, x: int, weight: int
) -> int:
    """See ``Ops.short_conv``; ``layer`` counts those with a state."""
    (d, n), n_seqs = tensor_at(x).ne[:2], tensor_at(inputs.sources).ne[0]
    k, state = tensor_at(weight).ne[0], store.conv[layer]
    assert store.spec.layers[layer].n_conv == (k - 1) * d
    row = tensor_at(x).nb[1]
    steps = n // n_seqs
    nodes.watch(x)  # what the state will be made of
    new = nodes.transpose(nodes.view_3d(x, d, steps, n_seqs, row, row * steps, 0))
    if k == 1:
        columns = nodes.cont(new)
    else:
        old = nodes.reshape_3d(nodes.get_rows(state, inputs.sources), k - 1, d, n_seqs)
        columns = nodes.concat(old, new, 0)
        nb = tensor_at(columns).nb
        last = nodes.cont(nodes.view_3d(columns, k - 1, d, n_seqs, nb[1], nb[2], steps * nb[0]))
        last = nodes.reshape_2d(last, (k - 1) * d, n_seqs)
        nodes.run_first(nodes.set_rows(state, last, inputs.targets))
    return nodes.reshape_2d(nodes.ssm_conv(columns, nodes.f32(weight)), d, n)


def ssm_scan(
    nodes: Nodes,
    store: GgmlStateStore,
    inputs: StateInputs,
    layer: int,
    parts: tuple[int, int, int, int, int],
) -> int:
    """See ``Ops.ssm_scan``, whose x, dt, a, b and c are the parts; ``layer`` as above."""
    x, dt, a, b, c = parts
    d, n_head, n = tensor_at(x).ne[:3]
    d_state, state, n_seqs = tensor_at(b).ne[0], store.ssm[layer], tensor_at(inputs.sources).ne[0]
    n_ssm = n_head * d * d_state
    assert store.spec.layers[layer].n_ssm == n_ssm
    both = nodes.ssm_scan(
        nodes.reshape_4d(state, d_state, d, n_head, tensor_at(state).ne[1]),
        _by_seq(nodes, x, n_seqs),
        nodes.reshape_3d(nodes.dense(dt), n_head, n // n_seqs, n_seqs),
        nodes.f32(a),
        _by_seq(nodes, b, n_seqs),
        _by_seq(nodes, c, n_seqs),
        inputs.sources,
        1,  # only the last state
    )
    new = nodes.view_2d(both, n_ssm, n_seqs, n_ssm * _FLOAT, d * n_head * n * _FLOAT)
    nodes.run_first(nodes.set_rows(state, new, inputs.targets))
    head = d * _FLOAT
    y = nodes.view_3d(both, d, n_head, n, head, head * n_head, 0)
    nodes.watch(y)  # a state that is not finite makes its products with c so
    return y


def _by_seq(nodes: Nodes, x: int, n_seqs: int) -> int:
    """``[n, n_head, d]`` to ``[n_seqs, n / n_seqs, n_head, d]``, heads side by side."""
    struct = tensor_at(x)
    if struct.nb[1] != struct.ne[0] * struct.nb[0]:
        x = nodes.cont(x)
        struct = tensor_at(x)
    d, n_head, n = struct.ne[:3]
    steps, token = n // n_seqs, struct.nb[2]
    return nodes.view_4d(x, d, n_head, steps, n_seqs, struct.nb[1], token, token * steps, 0)
