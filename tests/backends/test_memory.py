"""How much may still be allocated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.backends import memory
from kvcellar.errors import AllocationError


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
def test_the_limit_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: str, left: int | None
) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(used + "\n")
    (tmp_path / "memory.stat").write_text("anon 3\ninactive_file 7\nactive_file 2\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory._cgroup_available() == left


def test_no_container_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "nowhere")
    assert memory._cgroup_available() is None
