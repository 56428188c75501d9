"""The long random walk, and that it tells what went wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.base import KVStore
from kvcellar.cache.rows import StoreSync
from kvcellar.testing import soak
from kvcellar.testing.duel import Duel
from kvcellar.testing.signs import MIXED, Setup
from kvcellar.types import CacheSpec, KVType
from tests.cache.stores import MAKERS, MakeStore

STEPS = 1500


@pytest.mark.slow
@pytest.mark.parametrize("name", soak.setups())
def test_a_few_thousand_steps_of_every_store(name: str) -> None:
    assert soak.main(["--store", name, "--steps", str(STEPS)]) == 0


@pytest.mark.slow
def test_every_kind_of_step_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--steps", "1500", "--store", "signatures"]) == 0
    printed = capsys.readouterr().out
    assert "signatures: 1500 steps in" in printed
    assert all(kind in printed for kind in soak.STEPS)


def test_a_difference_is_reported_with_what_repeats_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clear = StoreSync.clear

    def forget(upkeep: Any, data: bool) -> None:
        clear(upkeep, data)
        upkeep._table.head = 1

    monkeypatch.setattr(StoreSync, "clear", forget)
    assert soak.main(["--steps", "3000", "--store", "signatures", "--seed", "5"]) == 1
    printed = capsys.readouterr().out
    assert "signatures: " in printed
    command = printed.split("repeat with: python -m kvcellar.testing.soak ")[1].split()
    assert soak.main(command) == 1


def test_the_duel_notices_a_failure_that_changed_something() -> None:
    duel = Duel(soak.setups()["signatures"], 6)
    duel.decode([frozenset({0})] * 3, [0, 0, 0], 4)

    def touch() -> None:
        duel.cache.table.tokens[0] += 1
        raise ValueError

    with pytest.raises(AssertionError, match="ValueError changed something"):
        duel.refused(ValueError, touch)
    with pytest.raises(AssertionError, match="ValueError was not raised"):
        duel.refused(ValueError, lambda: None)
    duel.close()


@pytest.mark.parametrize("part", ["k", "v"])
def test_the_duel_notices_a_byte_that_changed(part: Any) -> None:
    duel = Duel(soak.setups()["ggml-q8_0"], 6)
    duel.decode([frozenset({0})] * 3, [0, 0, 0], 4)
    duel.check()
    cells = np.array([1])
    rows = duel.store.read_raw(1, part, cells)
    rows[0, 0] ^= 1
    duel.store.write_raw(1, part, cells, rows)
    with pytest.raises(AssertionError, match=f"{part.upper()} of cell 1 has changed"):
        duel.check()
    duel.close()


def test_a_cell_with_another_content_is_noticed() -> None:
    duel = Duel(soak.setups()["ggml-f32"], 6)
    duel.decode([frozenset({0})] * 3, [0, 0, 0], 4)
    duel.naive.cells[2] = replace(duel.naive.cells[2], content=77)
    with pytest.raises(AssertionError, match="K, layer 0: errors"):
        duel.check()
    duel.close()


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("method", ["copy", "rotate", "write_raw", "resize"])
def test_a_store_that_is_wrong_is_found(make: MakeStore, method: str) -> None:
    def opened(spec: CacheSpec) -> KVStore:
        store = make(spec)
        works = getattr(store, method)

        def wrong(*args: Any) -> None:
            if method == "resize":
                works(*args[:2], args[2][::-1])

        setattr(store, method, wrong)
        return store

    setup = Setup(opened, MIXED, KVType.F32, KVType.F32)
    with pytest.raises(AssertionError, match=r"has changed|errors"):
        soak.walk(setup, 3, 4000)
