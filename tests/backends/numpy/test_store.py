"""K and V rows in NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.backends.ggml import store as ggml
from kvcellar.backends.numpy import gguf as library
from kvcellar.backends.numpy import store as convert
from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.errors import LibraryError, OptionError
from kvcellar.testing.conformance import tolerance
from kvcellar.testing.rotation import random_rows
from kvcellar.types import CacheSpec, KVType, LayerSpec, RopeSpec

LAYERS = (LayerSpec(2, 64, 32), LayerSpec(1, 32, 64))
KINDS = [kind for kind in KVType if kind not in convert.NOT_MADE]


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_a_layer_whose_v_is_in_its_k_stores_no_v(kind: KVType, flash_attn: bool) -> None:
    rope = RopeSpec("normal", 64)
    latent = LayerSpec(1, 192, 128, rope, v_offset=64)
    spec = CacheSpec(8, 1, (latent, LayerSpec(1, 64, 64)), kind, KVType.F16, flash_attn)
    store, cells, keys = NumpyStore(spec), np.array([5, 0, 2]), random_rows(3, 192)
    nothing = np.empty((3, 0), np.float32)
    assert store.spec.n_bytes == 8 * (kind.row_bytes(192) + kind.row_bytes(64) + 128)
    store.write(0, cells, keys, nothing)
    np.testing.assert_array_equal(store.read(0, "v", cells), nothing)
    assert store.read_raw(0, "v", cells).shape == (3, 0)
    before = store.read(0, "k", cells)
    assert np.abs(before - keys).max() <= tolerance(kind, keys)
    store.copy(cells, np.array([1, 3, 4]))
    store.rotate(np.array([1, 3, 4]), np.array([3, -2, 9], np.int32))
    after = store.read(0, "k", np.array([1, 3, 4]))
    assert np.abs(after[:, 64:] - before[:, 64:]).max() <= tolerance(kind, keys)
    assert np.abs(after[:, :64] - before[:, :64]).max() > 1
    store.write_raw(0, "v", cells, store.read_raw(0, "v", cells))
    store.resize(20, cells, cells)
    np.testing.assert_array_equal(store.read(0, "k", cells), before)
    store.wipe(cells)
    assert not store.read_raw(0, "k", cells).any()


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
