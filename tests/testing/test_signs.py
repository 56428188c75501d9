"""A signed store notices every byte that is not what it should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest

from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.testing.signs import SignedStore, signed_spec
from kvcellar.testing.stores import SignatureStore

Damage: TypeAlias = Callable[[SignedStore], None]


@pytest.fixture(params=[True, False], ids=["rows", "across"])
def store(request: pytest.FixtureRequest) -> SignedStore:
    """Eight cells, of which six are filled."""
    made = SignedStore(NumpyStore(signed_spec(8, 1, 1, request.param)))
    cells = np.arange(6)
    made.fill(cells, cells + 40, cells.astype(np.int32) * 3)
    return made


def test_what_goes_through_the_store_is_fine(store: SignedStore) -> None:
    store.check_rows()
    store.rotate(np.array([0, 4]), np.array([7, -9], np.int32))
    store.copy(np.array([4, 1]), np.array([6, 0]))
    store.wipe(np.array([2]))
    store.check_rows()
    for part in ("k", "v"):
        for layer in range(2):
            rows = store.read_raw(layer, part, np.array([0, 6, 2]))
            store.write_raw(layer, part, np.array([1, 3, 4]), rows)
    store.check_rows()
    store.resize(5, np.array([6, 5, 3]), np.array([0, 1, 4]))
    assert store.content.tolist() == [44, 45, -1, -1, 44]
    store.check_rows()
    store.zero()
    store.check_rows()


def _v_of_another(store: SignedStore) -> None:
    store.inner.write_raw(1, "v", np.array([2]), store.inner.read_raw(1, "v", np.array([3])))


def _one_bit_of_v(store: SignedStore) -> None:
    rows = store.inner.read_raw(0, "v", np.array([5]))
    rows[0, 0] ^= 1
    store.inner.write_raw(0, "v", np.array([5]), rows)


def _one_position_too_far(store: SignedStore) -> None:
    store.inner.rotate(np.array([3]), np.array([1], np.int32))


def _k_of_another(store: SignedStore) -> None:
    store.inner.write_raw(1, "k", np.array([2]), store.inner.read_raw(1, "k", np.array([3])))


def _not_wiped(store: SignedStore) -> None:
    SignatureStore.wipe(store, np.array([1]))


@pytest.mark.parametrize(
    "damage", [_v_of_another, _one_bit_of_v, _one_position_too_far, _k_of_another, _not_wiped]
)
def test_what_goes_past_it_is_noticed(store: SignedStore, damage: Damage) -> None:
    damage(store)
    with pytest.raises(AssertionError, match=r"K of cells|V of cell|of wiped cells"):
        store.check_rows()
