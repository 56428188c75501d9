"""Shapes and plans of attention that ggml's graphs refuse."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.errors import NotSupported, OptionError
from kvcellar.plan import CellLists, CellPlan
from kvcellar.types import CacheSpec, KVType, LayerSpec, MemorySpec
from tests.backends.ops_bench import Bench, plan_of, rows
from tests.backends.test_ops_attention import SIZE, Case


@pytest.mark.parametrize(
    ("layer", "kind", "message"),
    [
        (LayerSpec(1, 24, 16, v_offset=9), KVType.F32, "v_offset=9: V of layer 0 is 16 of the 24"),
        (LayerSpec(1, 24, 16, v_offset=-1), KVType.F16, "v_offset=-1"),
        (LayerSpec(1, 192, 128, v_offset=32), KVType.Q8_0, "from 32 on, .* runs of 64; use f16"),
        (LayerSpec(1, 128, 96, v_offset=0), KVType.Q4_0, "V of layer 0 is 96 .* runs of 128"),
        (LayerSpec(1, 96, 64, v_offset=16), KVType.Q8_0, "from 16 on, .* runs of 32"),
    ],
)
def test_v_that_cannot_be_read_out_of_k_is_refused(
    layer: LayerSpec, kind: KVType, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        Bench(MemorySpec.single(CacheSpec(SIZE, 1, (layer,), kind)))


def test_lists_without_a_kernel_are_refused(opened: list[Bench]) -> None:
    case = Case(LayerSpec(1, 16, 16), 1, 1)
    opened.append(Bench(MemorySpec.single(case.spec())))
    lists = CellLists.separate([np.zeros(1, np.int32)])
    plan = plan_of(rows(1, 48), [CellPlan(np.zeros(1, np.int64), np.empty((1, 0), "f2"), lists)])
    with pytest.raises(NotSupported, match="lists of cells"):
        opened[0].run(lambda _, x: x, plan)
