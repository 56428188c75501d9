"""Operations computed at once; what whole models give is compared in test_agreement.py."""

from __future__ import annotations

import numpy as np

from kvcellar.backends.base import KVStore
from kvcellar.backends.numpy.ops import NumpyExecutor, NumpyOps, attend, softmax
from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.backends.operations import Ops
from kvcellar.plan import CellPlan, Plan
from kvcellar.testing.plans import causal_plan
from kvcellar.testing.rotation import random_rows
from kvcellar.types import CacheSpec, Float32Array, KVType, LayerPlace, LayerSpec, MemorySpec

SPEC = CacheSpec(16, 1, (LayerSpec(1, 4, 4),), KVType.F32, KVType.F32)
TABLE = random_rows(10, 4)


def _ops(plan: Plan, store: KVStore | None = None) -> Ops[Float32Array]:
    return NumpyOps(plan, MemorySpec.single(SPEC), [store or NumpyStore(SPEC)])


def test_tokens_or_embeddings_are_the_input() -> None:
    np.testing.assert_array_equal(_ops(causal_plan([3, 1])).embed(TABLE), TABLE[[3, 1]])
    given = random_rows(2, 4, 7)
    plan = causal_plan(None, embeddings=given)
    np.testing.assert_array_equal(_ops(plan).embed(TABLE), given)


def test_hidden_cells_are_not_even_read() -> None:
    """A NaN in a cell that the mask hides reaches nobody (invariant 9)."""
    store, plan = NumpyStore(SPEC), causal_plan([1, 2], n_kv=16)
    store.write_raw(0, "k", np.arange(16), np.full((16, 16), 0xFF, np.uint8))
    store.write_raw(0, "v", np.arange(16), np.full((16, 16), 0xFF, np.uint8))
    x = random_rows(2, 4).reshape(2, 1, 4)
    assert np.isfinite(_ops(plan, store).attention(0, x, x, x, 1.0)).all()


def test_an_executor_runs_a_forward_pass_over_its_store() -> None:
    executor = NumpyExecutor(
        MemorySpec.single(SPEC), [NumpyStore(SPEC)], lambda ops: ops.outputs(ops.embed(TABLE))
    )
    got = executor.run(causal_plan([4, 5, 6], outputs=[0, 2]))
    np.testing.assert_array_equal(got, TABLE[[4, 6]])
    assert executor.run(causal_plan([4], outputs=[])).shape == (0, 4)
    executor.close()


LATENT = CacheSpec(16, 1, (LayerSpec(1, 6, 4, v_offset=2),), KVType.F32, KVType.F32)


def test_v_may_be_a_part_of_k() -> None:
    """Equal to a layer that stores the same numbers twice."""
    q, k = random_rows(3, 2 * 6).reshape(3, 2, 6), random_rows(3, 6, 1).reshape(3, 1, 6)
    twice = CacheSpec(16, 1, (LayerSpec(1, 6, 4),), KVType.F32, KVType.F32)
    plan, results = causal_plan([1, 2, 3], n_kv=16), []
    for spec, v in ((LATENT, None), (twice, k[..., 2:])):
        ops = NumpyOps(plan, MemorySpec.single(spec), [NumpyStore(spec)])
        results.append(ops.attention(0, q, k, v, 0.3))
    assert results[0].shape == (3, 8)
    np.testing.assert_array_equal(results[0], results[1])


def test_layers_write_to_the_group_they_are_in() -> None:
    """Each has cells, a mask and rows of its own."""
    spec = MemorySpec((SPEC, SPEC), None, (LayerPlace(1, 0), LayerPlace(0, 0)))
    stores = [NumpyStore(SPEC), NumpyStore(SPEC)]
    wide, near = causal_plan([1, 2], n_kv=16), causal_plan([1, 2], n_kv=16, cells=[9, 4])
    mask = near.mask.copy()
    mask[1, 9] = -np.inf  # a window of one
    plan = Plan(wide.micro, (wide.groups[0], CellPlan(near.cells, mask)))
    ops, x = NumpyOps(plan, spec, stores), random_rows(2, 4).reshape(2, 1, 4)
    narrow, all_seen = ops.attention(0, x, x, x, 1.0), ops.attention(1, x, 2 * x, x, 0.1)
    np.testing.assert_array_equal(narrow, x.reshape(2, 4))
    assert not np.allclose(all_seen[1], x[1, 0])
    np.testing.assert_array_equal(stores[1].read(0, "k", near.cells), x.reshape(2, 4))
    np.testing.assert_array_equal(stores[0].read(0, "k", wide.cells), 2 * x.reshape(2, 4))


def test_a_large_sink_leaves_nothing() -> None:
    q, keys, values = random_rows(3, 8).reshape(3, 4, 2), *random_rows(2, 20).reshape(2, 5, 2, 2)
    sinks, mask = np.full(4, 1e4, np.float32), np.zeros((3, 5), np.float16)
    np.testing.assert_array_equal(attend(q, keys, values, mask, 0.3, sinks=sinks), 0)


def test_shares_of_large_scores_sum_to_one() -> None:
    shares = softmax(np.array([[1e4, 0, -np.inf], [-1e4, -1e4, -1e4]], np.float32))
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    assert shares[0, 2] == 0
