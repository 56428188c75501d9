"""Zeros that take no room until they are written, and what is still owed of them."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.backends import memory as memory_module
from kvcellar.backends.ggml.states import GgmlStateStore
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.backends.memory import ZeroedMemory, check_available, owed_bytes
from kvcellar.errors import AllocationError
from kvcellar.types import ByteArray, CacheSpec, LayerSpec, StateLayer, StateSpec

PAGE = mmap.PAGESIZE
MIB = 2**20
SPEC = CacheSpec(2**17, 1, (LayerSpec(2, 64, 64),) * 4)
STATES = StateSpec(2**12, 1, (StateLayer(2**10, 2**13),))
IS_LINUX = Path("/proc/self/statm").exists()
needs_pages = pytest.mark.skipif(not IS_LINUX, reason="pages are not counted here")


@pytest.fixture
def held() -> Iterator[ZeroedMemory]:
    gc.collect()
    made = ZeroedMemory(10 * PAGE)
    yield made
    made.close()


def _values(memory: ZeroedMemory) -> ByteArray:
    assert memory._map is not None
    return np.frombuffer(memory._map, np.uint8)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_all_of_it_is_zero_and_can_be_written(held: ZeroedMemory) -> None:
    assert (held.n_bytes, held.address % PAGE) == (10 * PAGE, 0)
    values = _values(held)
    assert (values.ctypes.data, values.size) == (held.address, held.n_bytes)
    assert not values.any()
    values[-3:] = 7
    assert values.sum() == 21
    del values
    held.close()
    held.close()
    assert held.owed_bytes() == 0


@needs_pages
def test_what_is_not_written_is_owed(held: ZeroedMemory) -> None:
    others = owed_bytes() - held.owed_bytes()
    assert held.owed_bytes() == 10 * PAGE
    values = _values(held)
    values[[0, 5, PAGE, 9 * PAGE]] = 1
    assert held.owed_bytes() == 7 * PAGE
    second = ZeroedMemory(5 * PAGE + 1)
    assert owed_bytes() == others + (7 + 6) * PAGE
    second.close()
    assert owed_bytes() == others + 7 * PAGE


def test_what_is_dropped_is_given_back() -> None:
    made = ZeroedMemory(PAGE)
    ref = weakref.ref(made)
    before = owed_bytes()
    del made
    assert ref() is None
    assert owed_bytes() == before - PAGE * IS_LINUX


def test_more_than_the_system_promises_is_no_memory() -> None:
    for n_bytes in (2**62, 2**80, -1):
        with pytest.raises(MemoryError):
            ZeroedMemory(n_bytes)


def test_nothing_is_owed_where_nobody_counts(
    held: ZeroedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise TypeError("no such library")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    assert held.owed_bytes() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # other tests leave threads
def test_a_forked_process_writes_into_its_own(held: ZeroedMemory) -> None:
    values, child = _values(held), os.fork()
    if not child:
        values[:] = 1
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not values.any()


@pytest.mark.parametrize("platform", [sys.platform, "elsewhere"])
def test_zeroing_is_as_if_nothing_had_been_written(
    held: ZeroedMemory, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    values = _values(held)
    values[:] = 7
    held.zero()
    assert not values.any()
    values[3] = 1
    assert values.sum() == 1
    del values
    held.close()
    held.zero()


@needs_pages
def test_promises_count_as_taken(held: ZeroedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    owed = owed_bytes()
    monkeypatch.setattr(memory_module, "available_bytes", lambda: owed + PAGE)
    check_available("a test", PAGE)
    with pytest.raises(AllocationError, match="for a test"):
        check_available("a test", PAGE + 1)
    values = _values(held)
    values[0] = 1
    check_available("a test", 2 * PAGE)


@needs_pages
def test_a_store_costs_what_is_in_it() -> None:
    before = _resident()
    store = GgmlStore(SPEC)
    cells = np.array([5, 2**17 - 1])
    rows = np.ones((2, 128), np.float32)
    for i in range(4):
        store.write(i, cells, rows, rows)
        assert store.read(i, "v", cells).all()
        assert not store.read_raw(i, "k", np.array([4, 77_777])).any()
    assert SPEC.n_bytes == 256 * MIB
    assert _resident() - before < 64 * MIB
    store.resize(2**18, cells, cells)
    assert store.read(3, "k", cells).all()
    assert _resident() - before < 128 * MIB
    owed = owed_bytes()
    store.zero()
    assert not store.read_raw(3, "k", cells).any()
    assert owed_bytes() > owed
    store.close()


@needs_pages
def test_two_stores_do_not_get_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    free = owed_bytes() + 3 * SPEC.n_bytes // 2
    monkeypatch.setattr(memory_module, "available_bytes", lambda: free)
    store = GgmlStore(SPEC)
    with pytest.raises(AllocationError, match=r"256\.0 MiB for the K/V buffer"):
        GgmlStore(SPEC)
    store.close()
    GgmlStore(SPEC).close()


@needs_pages
def test_a_store_of_states_costs_what_is_in_it() -> None:
    before = _resident()
    store = GgmlStateStore(STATES)
    store.write(np.array([7]), np.ones((1, STATES.row_bytes // 4), np.float32))
    assert store.read(np.array([7])).all()
    assert not store.read(np.array([8, 2**12])).any()
    assert STATES.n_bytes > 128 * MIB
    assert _resident() - before < 16 * MIB
    store.close()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without large pages"
)
def test_large_pages_are_asked_for() -> None:
    made = ZeroedMemory(8 * MIB)
    flags = _flags_at(made.address + 4 * MIB)
    made.close()
    if not flags:
        pytest.skip("this system does not say what it was asked for")
    assert "hg" in flags


def _flags_at(address: int) -> list[str]:
    """What the system knows of the memory at an address; nothing where it does not tell."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, last = (int(edge, 16) for edge in name.split("-"))
            inside = first <= address < last
        elif inside and name == "VmFlags:":
            return rest.split()
    return []
