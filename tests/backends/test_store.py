"""The stores of K and V rows do what every store has to do, and refuse the same shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from kvcellar.backends.base import KVStore
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.backends.numpy.store import NOT_MADE, NumpyStore
from kvcellar.errors import AllocationError, OptionError
from kvcellar.testing.conformance import KVStoreConformance, spec_name, store_specs
from kvcellar.types import CacheSpec, KVType, LayerSpec, RopeSpec

LAYERS = (LayerSpec(2, 64, 32), LayerSpec(1, 32, 64))
Make: TypeAlias = Callable[[CacheSpec], KVStore]
MADE = [kind for kind in KVType if kind not in NOT_MADE]  # by the library that NumPy asks
STORES: dict[str, Make] = {"ggml": GgmlStore, "numpy": NumpyStore}

on_both = pytest.mark.parametrize("make", STORES.values(), ids=STORES)


@pytest.mark.parametrize("spec", store_specs(KVType), ids=spec_name)
class TestGgmlStore(KVStoreConformance):
    @pytest.fixture(autouse=True)
    def _backend(self) -> Iterator[None]:
        self.backend = GgmlBackend(1)
        yield
        self.backend.close()

    def open(self, spec: CacheSpec) -> KVStore:
        return GgmlStore(spec, self.backend)


@pytest.mark.parametrize("spec", store_specs(MADE), ids=spec_name)
class TestNumpyStore(KVStoreConformance):
    def open(self, spec: CacheSpec) -> KVStore:
        return NumpyStore(spec)


BLOCKS = [
    (name, kind)
    for name in STORES
    for kind in KVType
    if kind.is_quantized and (name == "ggml" or kind in MADE)
]


@pytest.mark.parametrize(("name", "kind"), BLOCKS)
@pytest.mark.parametrize("option", ["type_k", "type_v"])
def test_blocks_must_divide_a_head(name: str, kind: KVType, option: str) -> None:
    odd = (LayerSpec(2, 32, 32), LayerSpec(2, 48, 48))
    types = {"type_k": KVType.F16, "type_v": KVType.F16, option: kind}
    with pytest.raises(OptionError, match=rf"{option}={kind.label}: heads of layer 1 have 48"):
        STORES[name](CacheSpec(8, 1, odd, types["type_k"], types["type_v"]))


@on_both
def test_quantised_v_cannot_be_transposed(make: Make) -> None:
    with pytest.raises(OptionError, match="quantised V needs flash_attn=True"):
        make(CacheSpec(8, 1, LAYERS, type_v=KVType.Q8_0, flash_attn=False))


@on_both
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (LayerSpec(1, 96, 64, v_offset=33), "v_offset=33: V of layer 1 is 64 of the 96 values"),
        (LayerSpec(1, 96, 64, v_offset=-1), "v_offset=-1: V of layer 1"),
        (LayerSpec(1, 96, 32, RopeSpec("normal", 64), v_offset=32), "behind the 64 that are"),
    ],
)
def test_v_must_lie_in_what_is_kept_and_not_rotated(
    make: Make, layer: LayerSpec, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        make(CacheSpec(8, 1, (LAYERS[0], layer)))


@on_both
def test_v_in_k_has_no_type_of_its_own(make: Make) -> None:
    odd = LayerSpec(1, 96, 20, v_offset=7)
    make(CacheSpec(8, 1, (odd,), KVType.F16, KVType.Q8_0, flash_attn=False)).close()


@on_both
def test_a_store_beyond_memory_is_refused_before_it_is_asked_for(make: Make) -> None:
    spec = CacheSpec(2**40, 1, LAYERS)
    with pytest.raises(AllocationError, match="for the K/V buffer") as caught:
        make(spec)
    assert caught.value.n_bytes == spec.n_bytes
    assert caught.value.buffer == "the K/V buffer"
