"""The operations of model files, each computed at once and in the plainest way; tensors are f32."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from kvcellar.backends.base import KVStore
from kvcellar.backends.checks import check_learned
from kvcellar.backends.numpy.formulas import attend, f32
from kvcellar.backends.numpy.plain import PlainOps
from kvcellar.backends.numpy.rope import magnitude, rotated
from kvcellar.backends.numpy.states import NumpyStateStore, short_conv, ssm_scan
from kvcellar.backends.operations import Forward
from kvcellar.errors import NotSupported
from kvcellar.plan import Plan, StatePlan
from kvcellar.types import Float32Array, MemorySpec, RopeSpec


class NumpyOps(PlainOps):
    """Computes a plan over any store. Implements ``Ops[Float32Array]``.

    Attributes:
        plan: the microbatch that is computed.
    """

    def __init__(
        self,
        plan: Plan,
        spec: MemorySpec,
        groups: Sequence[KVStore],
        states: NumpyStateStore | None = None,
    ) -> None:
        self.plan = plan
        self._spec = spec
        self._groups = groups
        self._states = states

    def embed(self, table: Float32Array) -> Float32Array:
        """Rows of the table for the plan's tokens, or its embeddings."""
        micro = self.plan.micro
        if micro.embeddings is not None:
            return micro.embeddings
        return f32(table[micro.tokens])

    def embed_positions(self, table: Float32Array) -> Float32Array:
        """Rows of the table for the plan's positions."""
        positions = self.plan.micro.positions
        check_learned(positions, len(table))
        return f32(table[positions])

    def rope(self, x: Float32Array, spec: RopeSpec) -> Float32Array:
        """Rotate ``[n, n_head, d]`` by the plan's positions."""
        return rotated(x, self.plan.micro.positions, spec, magnitude(spec))

    def attention(
        self,
        layer: int,
        q: Float32Array,
        k: Float32Array,
        v: Float32Array | None,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Float32Array | None = None,
    ) -> Float32Array:
        """Store k and v in the plan's cells, then attend over those that any token may see."""
        place = self._spec.places[layer]
        store, plan, index = self._groups[place.group], self.plan.groups[place.group], place.index
        shape = store.spec.layers[index]
        assert (v is None) == (shape.v_offset is not None)
        rows = np.empty((len(k), 0), np.float32) if v is None else v.reshape(len(v), -1)
        store.write(index, plan.cells, k.reshape(len(k), -1), rows)
        seen = np.flatnonzero((plan.mask > -inf).any(axis=0))
        keys = store.read(index, "k", seen).reshape(len(seen), *k.shape[1:])
        if shape.v_offset is None:
            values = store.read(index, "v", seen).reshape(len(seen), -1, shape.head_dim_v)
        else:
            values = keys[..., shape.v_offset : shape.v_offset + shape.head_dim_v]
        mask = plan.mask[:, seen]
        return attend(q, keys, values, mask, scale, softcap=softcap, sinks=sinks)

    def short_conv(self, layer: int, x: Float32Array, weight: Float32Array) -> Float32Array:
        """Causal convolution of each channel along each sequence."""
        states, plan = self._recurrent()
        return short_conv(plan, states.conv(self._spec.places[layer].state), x, weight)

    def ssm_scan(
        self,
        layer: int,
        x: Float32Array,
        dt: Float32Array,
        a: Float32Array,
        b: Float32Array,
        c: Float32Array,
    ) -> Float32Array:
        """Mamba's recurrence."""
        states, plan = self._recurrent()
        return ssm_scan(plan, states.ssm(self._spec.places[layer].state), x, dt, a, b, c)

    def outputs(self, x: Float32Array) -> Float32Array:
        """The rows whose logits are wanted."""
        return x[self.plan.micro.outputs]

    def _recurrent(self) -> tuple[NumpyStateStore, StatePlan]:
        if self._states is None or self.plan.states is None:
            raise NotSupported("a recurrent layer, but a plan or a memory without states")
        return self._states, self.plan.states


class NumpyExecutor:
    """Runs a model's forward pass over any store. Implements ``Executor``."""

    takes_lists = ()

    def __init__(
        self,
        spec: MemorySpec,
        groups: Sequence[KVStore],
        forward: Forward[Float32Array],
        states: NumpyStateStore | None = None,
    ) -> None:
        self._spec = spec
        self._groups = groups
        self._forward = forward
        self._states = states

    def run(self, plan: Plan) -> Float32Array:
        """Compute a plan; see ``Executor.run``. What is not finite shows in the logits."""
        with np.errstate(all="ignore"):
            return self._forward(NumpyOps(plan, self._spec, self._groups, self._states))

    def close(self) -> None:
        """Nothing to give back."""
