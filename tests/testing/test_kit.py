"""The test kit itself: oracles with known answers, stores, and replays that notice differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcellar.errors import CacheFull, NotSupported
from kvcellar.testing.machine import attention_spec
from kvcellar.testing.naive import NaiveCache, NaiveCell, NaiveToken, naive_mask, naive_moves
from kvcellar.testing.stores import NullStore, SignatureStore
from kvcellar.testing.traces import TraceReplay


def tokens(seq: int, start: int, n: int) -> list[NaiveToken]:
    return [NaiveToken(i, i, frozenset({seq}), i) for i in range(start, start + n)]


def picture(naive: NaiveCache) -> str:
    return "".join(str(min(cell.owners)) if cell.owners else "." for cell in naive.cells)


class TestNaiveCache:
    def test_places_wraps_and_scatters(self) -> None:
        naive = NaiveCache(6)
        assert naive.place(tokens(0, 0, 4), 2) == [0, 1, 2, 3]
        naive.seq_rm(0, 1, 2)
        assert naive.head == 1
        assert naive.place(tokens(1, 0, 2), 2) == [4, 5]
        assert naive.head == 0
        assert naive.place(tokens(1, 2, 1), 2) == [1]
        with pytest.raises(CacheFull):
            naive.place(tokens(1, 3, 1), 2)
        assert picture(naive) == "010011"

    def test_copies_shared_cells_or_moves_them(self) -> None:
        for on_shared, want in (("copy", [0, 1]), ("move", [5, 6])):
            naive = NaiveCache(6, on_shared)
            naive.place(tokens(0, 0, 2), 2)
            naive.seq_cp(0, 1, 0, 9)
            naive.seq_add(1, 0, 9, 5)
            assert naive.positions(1) == [5, 6]
            assert naive.positions(0) == want
            assert [content for _, content in naive.contents(1)] == [0, 1]

    def test_mask_and_moves(self) -> None:
        cells = [NaiveCell(0, owners={0}), NaiveCell(), NaiveCell(2, owners={0, 1})]
        mask = naive_mask([NaiveToken(0, 1, frozenset({0}))], cells, 3)
        assert np.isfinite(mask).tolist() == [[True, False, False]]
        assert naive_moves([True, False, True, False, True], 1) == [(4, 1)]
        assert naive_moves([c != "." for c in "00..11..22..33.."], 9) == [
            (8, 6),
            (9, 7),
            (12, 2),
            (13, 3),
        ]


class TestStores:
    def test_a_null_store_takes_everything_and_gives_nothing(self) -> None:
        spec = attention_spec(4)
        store = NullStore(spec, can_shift=False)
        cells = np.array([1, 2])

        store.write(0, cells, np.zeros((2, 2), np.float32), np.zeros((2, 2), np.float32))
        store.write_raw(0, "k", cells, np.zeros((2, 4), np.uint8))
        store.copy(cells, cells)
        store.rotate(cells, np.zeros(2, np.int32))
        store.zero()
        store.close()

        assert (store.spec, store.can_shift, store.can_copy) == (spec, False, True)
        with pytest.raises(NotSupported, match=r"no k rows of cells \[1, 2\] in layer 0"):
            store.read(0, "k", cells)
        assert store.read_raw(0, "v", cells).shape == (2, 0)

    def test_a_signature_store_follows_copies_and_rotations(self) -> None:
        store = SignatureStore(attention_spec(4))
        store.fill(np.array([0, 1]), np.array([7, 8]), np.array([3, 4], np.int32))
        store.copy(np.array([1]), np.array([3]))
        store.rotate(np.array([3]), np.array([-2], np.int32))

        assert store.content.tolist() == [7, 8, -1, 8]
        assert store.rotation.tolist() == [3, 4, 0, 2]
        with pytest.raises(AssertionError, match="both source and target"):
            store.copy(np.array([1, 2]), np.array([2, 3]))
        store.zero()
        assert store.content.tolist() == [-1] * 4


class TestReplay:
    def trace(self, **expect: Any) -> dict[str, Any]:
        step = {"op": "decode", "tokens": [{"pos": 0, "seqs": [1]}], "expect": expect}
        return {"size": 4, "padding": 2, "steps": [step]}

    def test_a_true_trace_passes(self) -> None:
        cells = [[0, 0, 0, [1]]]
        TraceReplay(self.trace(ret=[0, 1], head=1, used=1, n_kv=2, cells=cells)).run()

    @pytest.mark.parametrize(
        "wrong",
        [{"ret": [1, 2]}, {"head": 0}, {"used": 2}, {"n_kv": 4}, {"cells": [[0, 0, 0, [2]]]}],
    )
    def test_every_difference_is_noticed(self, wrong: dict[str, Any]) -> None:
        true = {"ret": [0, 1], "head": 1, "used": 1, "n_kv": 2, "cells": [[0, 0, 0, [1]]]}
        with pytest.raises(AssertionError, match="step 0, decode"):
            TraceReplay(self.trace(**{**true, **wrong})).run()
