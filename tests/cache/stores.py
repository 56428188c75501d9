"""Caches over stores with real bytes, for tests of what happens to rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import pytest

from kvcellar.backends.base import KVStore
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.batch import Batch
from kvcellar.cache import AttentionCache, OnShared
from kvcellar.testing.duel import PARTS
from kvcellar.testing.signs import MIXED, WIDE, Setup, check_rows, fill
from kvcellar.types import CacheSpec, KVType

MakeStore: TypeAlias = Callable[[CacheSpec], KVStore]

f32, f16, q8_0 = KVType.F32, KVType.F16, KVType.Q8_0


def ggml_store(spec: CacheSpec) -> KVStore:
    """A ggml store that can rotate."""
    return GgmlStore(spec, GgmlBackend(1))


MAKERS: dict[str, MakeStore] = {"ggml": ggml_store, "numpy": NumpyStore}

SETUPS = [
    pytest.param(Setup(make, layers, kind, kind, flash_attn), id=f"{name}-{kind.label}-{lies}")
    for name, make in MAKERS.items()
    for layers, kind, flash_attn, lies in (
        (MIXED, f32, True, "rows"),
        (WIDE[1:], f16, False, "across"),
        (WIDE, q8_0, True, "rows"),
    )
]
"""Both backends; exact and rounding types; both layouts of V; with and without a transform."""


class Signed:
    """A cache whose rows are signed with where they came from: sequence and first position."""

    def __init__(self, setup: Setup, size: int = 16, on_shared: OnShared = "copy") -> None:
        spec = setup.spec(size)
        self.store = setup.store(spec)
        self.cache = AttentionCache(spec, self.store, on_shared)
        self._turns = 0

    def put(self, seq_id: int, n: int) -> None:
        """Decode n tokens of a sequence; the content of each is 1000 * sequence + position."""
        batch = Batch.of(range(100, 100 + n), seq_id)
        with self.cache.place(batch, 4) as placement:
            for plan in placement.plans():
                contents = plan.micro.positions.astype(np.int64) + 1000 * seq_id
                fill(self.store, plan.cells, contents, plan.micro.positions)

    def update(self) -> None:
        """Rotate, and count it."""
        self._turns += 1
        self.cache.update()

    def check(self, seq_id: int, contents: list[int], turns: int | None = None) -> None:
        """A sequence holds these contents, in order, K rotated to where it should stand."""
        table = self.cache.table
        table.check()
        cells = table.cells_of(seq_id)
        stands = (table.positions[cells] - table.pending[cells]).astype(np.int64)
        n_turns = np.full(len(cells), self._turns if turns is None else turns)
        assert len(cells) == len(contents)
        check_rows(self.store, cells, np.array(contents, np.int64), stands, n_turns)

    def rows(self, seq_id: int) -> list[bytes]:
        """Every row of a sequence as stored, by position: what the map of invariant 7 gives."""
        cells = self.cache.table.cells_of(seq_id)
        layers = range(len(self.store.spec.layers))
        return [self.store.read_raw(i, part, cells).tobytes() for i in layers for part in PARTS]


@contextmanager
def signed(setup: Setup, size: int = 16, on_shared: OnShared = "copy") -> Iterator[Signed]:
    """Such a cache, closed afterwards."""
    made = Signed(setup, size, on_shared)
    yield made
    made.store.close()
