"""How much may still be allocated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.backends import memory
from kvcellar.errors import AllocationError
from tests.backends.groups import FakeSystem


@pytest.fixture(autouse=True)
def _nothing_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests have left open."""
    monkeypatch.setattr(memory, "owed_bytes", lambda: 0)


def test_what_fits_is_allowed() -> None:
    memory.check_available("a test", 1)


def test_what_does_not_fit_is_named_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**20)
    memory.check_available("a test", 2**20)
    with pytest.raises(AllocationError, match=r"cannot allocate 2\.0 MiB for a test") as caught:
        memory.check_available("a test", 2**21)
    assert caught.value.buffer == "a test"
    assert caught.value.n_bytes == 2**21


def test_scratch_memory_is_zero_and_of_the_type_asked_for() -> None:
    made = memory.scratch("a test", 3, np.int32)
    assert made.dtype.name == "int32"
    assert made.tolist() == [0, 0, 0]


def test_scratch_memory_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * 2**20 - 1)
    memory.scratch("a test", 2**20 - 1, np.float32)
    with pytest.raises(AllocationError, match=r"cannot allocate 4\.0 MiB for a test"):
        memory.scratch("a test", 2**20, np.float32)
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    for n in (2**60, 2**62):  # more than there is, more than an array may have
        with pytest.raises(AllocationError, match="for a test") as caught:
            memory.scratch("a test", n, np.int32)
        assert caught.value.n_bytes == 4 * n


class Holder:
    """Holds memory, and itself."""

    def __init__(self, taken: list[int]) -> None:
        self.me, self.taken = self, taken
        taken.append(2**20)

    def __del__(self) -> None:
        self.taken.pop()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What is in use of 2.5 MiB; nothing is collected unasked."""
    found: list[int] = []
    monkeypatch.setattr(memory, "available_bytes", lambda: 5 * 2**19 - sum(found))
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.slow
def test_garbage_is_collected_before_anything_is_refused(taken: list[int]) -> None:
    for _ in range(5):
        memory.check_available("a test", 2**20)
        Holder(taken)
    assert len(taken) < 5


def test_nothing_is_collected_where_there_is_room(taken: list[int]) -> None:
    Holder(taken)
    memory.check_available("a test", 2**20)
    assert len(taken) == 1


def test_what_is_no_garbage_still_counts(taken: list[int]) -> None:
    held = [Holder(taken), Holder(taken)]
    with pytest.raises(AllocationError):
        memory.check_available("a test", 2**20)
    assert len(taken) == len(held)


def test_a_system_that_does_not_say_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    memory.check_available("a test", 2**60)


def test_the_smaller_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_meminfo_available", lambda: 5)
    monkeypatch.setattr(memory, "_cgroup_available", lambda: 3)
    assert memory.available_bytes() == 3
    monkeypatch.setattr(memory, "_cgroup_available", lambda: None)
    assert memory.available_bytes() == 5


@pytest.mark.parametrize(
    ("limit", "used", "left"),
    [("1000", "400", 607), ("1000", "1200", 0), ("max", "5", None), ("what", "5", None)],
)
def test_the_limit_of_a_container(tmp_path: Path, limit: str, used: str, left: int | None) -> None:
    stat = "anon 3\ninactive_file 7\nactive_file 2\n"
    files = {"memory.max": limit, "memory.current": used, "memory.stat": stat}
    FakeSystem(tmp_path).second_generation({"": files})
    assert memory._cgroup_available(tmp_path) == left


def test_the_limit_of_the_first_generation(tmp_path: Path) -> None:
    unlimited = {"memory.limit_in_bytes": str(2**63 - 4096), "memory.usage_in_bytes": "5"}
    limited = {
        "memory.limit_in_bytes": "1000",
        "memory.usage_in_bytes": "400",
        "memory.stat": "inactive_file 1\ntotal_inactive_file 7\n",
    }
    FakeSystem(tmp_path).first_generation("memory", {"": unlimited, "one": limited})
    assert memory._cgroup_available(tmp_path) == 607


def test_the_least_of_nested_limits_counts(tmp_path: Path) -> None:
    groups = {
        name: {"memory.max": limit, "memory.current": "100"}
        for name, limit in {"": "max", "a": "700", "a/b": "900"}.items()
    }
    FakeSystem(tmp_path).second_generation(groups)
    assert memory._cgroup_available(tmp_path) == 600


def test_no_container_no_limit(tmp_path: Path) -> None:
    assert memory._cgroup_available(tmp_path) is None


def test_c_code_is_not_asked_where_the_system_promises_nothing() -> None:
    memory.check_room("a test")
    memory.check_room("a test", 2**20)
    with pytest.raises(AllocationError, match="for a test") as caught:
        memory.check_room("a test", 2**60)
    assert caught.value.n_bytes == 2**60


@pytest.mark.parametrize("n_bytes", [1, 100, 4096])
def test_aligned_memory(n_bytes: int) -> None:
    made = memory.aligned("a test", n_bytes)
    assert (made.nbytes, made.ctypes.data % 64) == (n_bytes, 0)
    made[:] = 1
    with pytest.raises(AllocationError, match="for a test"):
        memory.aligned("a test", 2**60)
