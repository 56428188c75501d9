"""Forward passes made by hand, run by the ggml backend over memory of any shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.binding import InitParams, array_at, tensor_at
from kvcellar.backends.ggml.graph import GgmlExecutor
from kvcellar.backends.ggml.model_memory import GgmlMemory
from kvcellar.backends.ggml.store import to_rows
from kvcellar.backends.operations import Ops
from kvcellar.batch import MicroBatch
from kvcellar.plan import CellPlan, Plan, StatePlan
from kvcellar.types import AnyArray, Float32Array, KVType, MemorySpec

NO_MEMORY = MemorySpec((), None, ())
_BYTES = 2**24

Pass = Callable[[Ops[int], int], int]
"""From the ops and the input ``[n, n_embd]`` to the output ``[n, m]``."""


class Bench:
    """A backend, memory, and weights given as arrays."""

    def __init__(
        self,
        spec: MemorySpec = NO_MEMORY,
        *,
        kernel: bool = False,
        products: bool = False,
        n_threads: int = 1,
    ) -> None:
        self.backend = GgmlBackend(n_threads)
        self.memory = GgmlMemory.open(spec, self.backend, kernel=kernel, products=products)
        self._context = self.backend.api.ggml_init(InitParams(_BYTES, None, False))
        self._executors: list[GgmlExecutor] = []

    def weight(self, values: npt.ArrayLike, kind: KVType = KVType.F32) -> int:
        """A tensor of these values."""
        array = np.asarray(values, np.float32)
        ne = [*reversed(array.shape), 1, 1, 1][:4]
        tensor: int = self.backend.api.ggml_new_tensor_4d(self._context, kind.ggml_id, *ne)
        rows = to_rows(array.reshape(-1, array.shape[-1]), kind)
        array_at(tensor_at(tensor).data, np.uint8, rows.shape)[:] = rows
        return tensor

    def executor(self, forward: Pass) -> GgmlExecutor:
        """What runs a pass over plans of embeddings."""
        made = GgmlExecutor(self.backend, self.memory, lambda ops: forward(ops, ops.embed(0)))
        self._executors.append(made)
        return made

    def run(self, forward: Pass, plan: Plan | npt.ArrayLike) -> Float32Array:
        """A pass over one plan, or over embeddings alone."""
        given = plan if isinstance(plan, Plan) else plan_of(plan)
        return np.array(self.executor(forward).run(given))

    def close(self) -> None:
        """Free all of it."""
        for executor in self._executors:
            executor.close()
        for store in self.memory.groups:
            store.close()
        if self.memory.states is not None:
            self.memory.states.close()
        self.backend.api.ggml_free(self._context)
        self.backend.close()


def plan_of(
    x: npt.ArrayLike,
    groups: Sequence[CellPlan] = (),
    states: StatePlan | None = None,
    positions: Sequence[int] | None = None,
) -> Plan:
    """A plan of embeddings ``[n, n_embd]``, all of whose outputs are wanted."""
    embeddings = np.asarray(x, np.float32)
    n = len(embeddings)
    micro = MicroBatch(
        rows=np.arange(n, dtype=np.int32),
        tokens=None,
        embeddings=embeddings,
        positions=np.array(range(n) if positions is None else positions, np.int32),
        owners=np.ones((1, n), np.uint64),
        outputs=np.arange(n, dtype=np.int32),
    )
    return Plan(micro, tuple(groups), states)


def rows(*shape: int, seed: int = 0) -> Float32Array:
    """Random numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close_to(got: AnyArray, expected: AnyArray, tolerance: float = 1e-5) -> None:
    """See that values are equal within a share of the largest."""
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())
