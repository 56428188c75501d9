"""Recurrent states in one NumPy array, and the two operations that read and write them.

A row is a state: layer after layer, first the last inputs of its convolution ``[d, k - 1]``, the
oldest first, then its recurrent state ``[n_head, d, d_state]``. The row behind the last is a state
of zeros, which nothing writes.
"""

from __future__ import annotations

import numpy as np

from kvcellar.backends.memory import check_available
from kvcellar.errors import AllocationError, ClosedError, not_copied
from kvcellar.plan import StatePlan
from kvcellar.types import Float32Array, Int64Array, StateSpec

_BUFFER = "the state buffer"


class NumpyStateStore:
    """A :class:`~kvcellar.backends.base.StateStore` that is all NumPy.

    Attributes:
        spec: the shape.

    Raises:
        AllocationError: the buffer cannot be had.
    """

    __reduce_ex__ = not_copied(
        "a NumpyStateStore", "make another, and move rows with their read and write methods"
    )

    def __init__(self, spec: StateSpec) -> None:
        self.spec = spec
        n_bytes = (spec.n_rows + 1) * spec.row_bytes
        check_available(_BUFFER, n_bytes)
        try:
            self._open: Float32Array | None = np.zeros(
                (spec.n_rows + 1, spec.row_bytes // 4), np.float32
            )
        except (MemoryError, ValueError):
            raise AllocationError(_BUFFER, n_bytes) from None

    @property
    def _rows(self) -> Float32Array:
        if self._open is None:
            raise ClosedError(f"{_BUFFER} is closed with its context")
        return self._open

    def read(self, rows: Int64Array) -> Float32Array:
        """The states in rows, ``[n, row_bytes / 4]``; a copy."""
        return self._rows[rows]

    def write(self, rows: Int64Array, states: Float32Array) -> None:
        """Store states that :meth:`read` returned."""
        self._rows[rows] = states

    def wipe(self, rows: Int64Array) -> None:
        """Zero the states in rows."""
        self._rows[rows] = 0

    def zero(self) -> None:
        """Set every byte to zero."""
        self._rows.fill(0)

    def close(self) -> None:
        """Free the buffer; closing twice is fine."""
        self._open = None

    def conv(self, layer: int) -> Float32Array:
        """A view of all rows' last inputs of a layer's convolution, ``[n_rows + 1, n_conv]``."""
        start = self._start(layer)
        return self._rows[:, start : start + self.spec.layers[layer].n_conv]

    def ssm(self, layer: int) -> Float32Array:
        """A view of all rows' recurrent states of a layer, ``[n_rows + 1, n_ssm]``."""
        shape = self.spec.layers[layer]
        start = self._start(layer) + shape.n_conv
        return self._rows[:, start : start + shape.n_ssm]

    def _start(self, layer: int) -> int:
        return sum(before.n_conv + before.n_ssm for before in self.spec.layers[:layer])


def short_conv(
    plan: StatePlan, rows: Float32Array, x: Float32Array, weight: Float32Array
) -> Float32Array:
    """See ``Ops.short_conv``, token by token; ``rows`` as from :meth:`NumpyStateStore.conv`."""
    d, k = weight.shape
    out, left = [], []
    for held, tokens in zip(rows[plan.sources], np.split(x, plan.n_seqs), strict=True):
        last = held.reshape(d, k - 1)
        for token in tokens:
            seen = np.column_stack([last, token])
            out.append((seen * weight).sum(axis=1))
            last = seen[:, 1:]
        left.append(last.reshape(-1))
    rows[plan.targets] = left
    return np.array(out, np.float32)


def ssm_scan(
    plan: StatePlan,
    rows: Float32Array,
    x: Float32Array,
    dt: Float32Array,
    a: Float32Array,
    b: Float32Array,
    c: Float32Array,
) -> Float32Array:
    """See ``Ops.ssm_scan``, token by token; ``rows`` as from :meth:`NumpyStateStore.ssm`."""
    (n, n_head, d), d_state = x.shape, b.shape[2]
    step = softplus(dt)
    b, c = (np.repeat(part, n_head // part.shape[1], axis=1)[:, :, np.newaxis] for part in (b, c))
    out, left = [], []
    for held, tokens in zip(rows[plan.sources], np.split(np.arange(n), plan.n_seqs), strict=True):
        state = held.reshape(n_head, d, d_state)
        for i in tokens:
            step_i = step[i][:, np.newaxis]
            kept = state * np.exp(step_i * a)[:, np.newaxis]
            state = kept + (step_i * x[i])[:, :, np.newaxis] * b[i]
            out.append((state * c[i]).sum(axis=2))
        left.append(state.reshape(-1))
    rows[plan.targets] = left
    return np.array(out, np.float32)


def softplus(x: Float32Array) -> Float32Array:
    """``log(1 + exp(x))``; far above 0 that is x, and the exponential would overflow."""
    near = np.log1p(np.exp(np.minimum(x, np.float32(20))))
    result: Float32Array = np.where(x > 20, x, near).astype(np.float32)
    return result
