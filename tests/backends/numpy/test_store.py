"""K and V rows in NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.backends.ggml import convert as ggml
from kvcellar.backends.numpy import convert, library
from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.errors import AllocationError, LibraryError, OptionError
from kvcellar.testing.conformance import KVStoreConformance, spec_name, store_specs
from kvcellar.testing.rotation import random_rows
from kvcellar.types import CacheSpec, KVType, LayerSpec

LAYERS = (LayerSpec(2, 64, 32), LayerSpec(1, 32, 64))
KINDS = [kind for kind in KVType if kind not in convert.NOT_MADE]


@pytest.mark.parametrize("spec", store_specs(KINDS), ids=spec_name)
class TestNumpyStore(KVStoreConformance):
    def open(self, spec: CacheSpec) -> NumpyStore:
        return NumpyStore(spec)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_rows_are_stored_as_ggml_stores_them(kind: KVType) -> None:
    """Bit for bit, ties, zeros and tiny numbers included."""
    rows = random_rows(20, 64)
    rows[3] = 0
    rows[4] = np.round(rows[4] * 4)
    rows[5, :32] *= 1e-7
    rows[6] = -rows[6, 0]
    stored = convert.to_rows(rows, kind)
    np.testing.assert_array_equal(stored, ggml.to_rows(rows, kind))
    np.testing.assert_array_equal(convert.from_rows(stored, kind), ggml.from_rows(stored, kind))


@pytest.mark.parametrize("kind", [KVType.F32, KVType.F16, KVType.BF16])
def test_what_is_no_number_stays_so(kind: KVType) -> None:
    rows = np.array([[np.nan, np.inf, -np.inf, 1.0]], np.float32)
    stored = convert.to_rows(rows, kind)
    np.testing.assert_array_equal(convert.from_rows(stored, kind), rows)


@pytest.mark.parametrize("kind", [KVType.F16, KVType.BF16])
def test_what_is_too_large_becomes_infinite(kind: KVType) -> None:
    stored = convert.to_rows(np.array([[3.4028e38, -3.4028e38]], np.float32), kind)
    np.testing.assert_array_equal(convert.from_rows(stored, kind), [[np.inf, -np.inf]])


@pytest.mark.parametrize("option", ["type_k", "type_v"])
def test_a_type_that_the_library_cannot_make_is_refused(option: str) -> None:
    kinds = {option: KVType.IQ4_NL}
    with pytest.raises(OptionError, match=f"{option}=iq4_nl"):
        NumpyStore(CacheSpec(8, 1, LAYERS, **kinds))  # type: ignore[arg-type]


def test_quantised_v_cannot_lie_across() -> None:
    with pytest.raises(OptionError, match="quantised V needs flash_attn=True"):
        NumpyStore(CacheSpec(8, 1, LAYERS, type_v=KVType.Q8_0, flash_attn=False))


def test_blocks_must_divide_a_head() -> None:
    odd = (LayerSpec(2, 32, 32), LayerSpec(2, 48, 48))
    with pytest.raises(OptionError, match="type_k=q8_0: heads of layer 1 have 48"):
        NumpyStore(CacheSpec(8, 1, odd, type_k=KVType.Q8_0))


def test_a_store_beyond_memory_is_refused_before_it_is_asked_for() -> None:
    spec = CacheSpec(2**40, 1, LAYERS)
    with pytest.raises(AllocationError, match="for the K/V buffer") as caught:
        NumpyStore(spec)
    assert caught.value.n_bytes == spec.n_bytes


def test_without_the_library_plain_types_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(library, "import_module", absent)
    library.quants.cache_clear()
    try:
        NumpyStore(CacheSpec(8, 1, LAYERS)).close()
        with pytest.raises(LibraryError, match=r"kvcellar\[numpy\]"):
            NumpyStore(CacheSpec(8, 1, LAYERS, type_k=KVType.Q8_0))
    finally:
        library.quants.cache_clear()
