"""How many threads compute unless somebody says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcellar.backends.cgroups import groups
from kvcellar.backends.checks import MAX_THREADS
from kvcellar.backends.threads import cpu_quota, default_threads
from tests.backends.groups import FakeSystem


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSystem:
    """One in which the process may use eight processors."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    return FakeSystem(tmp_path)


def _max(value: str) -> dict[str, str]:
    return {"cpu.max": value}


def _cfs(quota: int, period: int = 100000) -> dict[str, str]:
    return {"cpu.cfs_quota_us": str(quota), "cpu.cfs_period_us": str(period)}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("max 100000", 8),
        ("100000 100000", 1),
        ("150000 100000", 2),  # docker run --cpus=1.5
        ("300000 100000", 3),
        ("1000 100000", 1),
        ("20000 10000", 2),
        ("1600000 100000", 8),
        ("", 8),
        ("100000", 8),
        ("many few", 8),
        ("100000 0", 8),
        ("-1 100000", 8),
    ],
)
def test_the_quota_of_the_second_generation(system: FakeSystem, value: str, expected: int) -> None:
    system.second_generation({"": _max(value)})
    assert default_threads(system.root) == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [(-1, 8), (0, 8), (50000, 1), (100000, 1), (100001, 2), (250000, 3)]
)
@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
def test_the_quota_of_the_first_generation(
    system: FakeSystem, controllers: str, quota: int, expected: int
) -> None:
    system.first_generation("memory", {"deep/inside": _cfs(1)})
    system.first_generation(controllers, {"": _cfs(-1), "docker/1": _cfs(quota)})
    assert default_threads(system.root) == expected


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"": "max", "a": "max", "a/b": "200000"}, 2),
        ({"": "max", "a": "200000", "a/b": "max"}, 2),
        ({"": "max", "a": "200000", "a/b": "400000"}, 2),
        ({"": "max", "a": "400000", "a/b": "200000"}, 2),
        ({"": "100000", "a": "400000", "a/b": "200000"}, 1),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_the_least_on_the_way_to_the_own_group_counts(
    system: FakeSystem, quotas: dict[str, str], expected: int, version: int
) -> None:
    system_of = system.second_generation
    found = {path: _max(f"{quota} 100000") for path, quota in quotas.items()}
    if version == 1:
        found = {path: _cfs(-1 if q == "max" else int(q)) for path, q in quotas.items()}
        system.first_generation("cpu", found)
    else:
        system_of(found)
    assert default_threads(system.root) == expected


def test_other_groups_do_not_count(system: FakeSystem) -> None:
    system.second_generation({"": {}, "a": _max("300000 100000"), "b": _max("1 2")}, own="/a")
    assert cpu_quota(system.root) == 3


def test_a_container_sees_its_own_group_as_the_root(system: FakeSystem) -> None:
    """Its path is that on the host, and what is mounted there is that group itself."""
    system.second_generation({"": _max("300000 100000")}, top="/docker/1", own="/docker/1")
    assert cpu_quota(system.root) == 3


@pytest.mark.parametrize("own", ["/elsewhere/1", "/../../elsewhere", "/docker/1/inner"])
def test_what_is_mounted_counts_wherever_the_process_is_said_to_be(
    system: FakeSystem, own: str
) -> None:
    system.second_generation({"": _max("300000 100000")}, top="/docker/1", own=own)
    assert cpu_quota(system.root) == 3


def test_both_generations_at_once(system: FakeSystem) -> None:
    system.first_generation("cpu", {"a": _cfs(200000)})
    system.second_generation({"": {}})
    assert cpu_quota(system.root) == 2


@pytest.mark.parametrize("name", ["proc/self/mountinfo", "proc/self/cgroup"])
@pytest.mark.parametrize("text", [None, "", "\n \nx - y\nno:colons\n1 2 3 - cgroup2 cgroup2 rw\n"])
def test_files_that_are_absent_or_odd_are_no_limit(
    system: FakeSystem, name: str, text: str | None
) -> None:
    system.second_generation({"": _max("100000 100000")})
    groups.cache_clear()
    (system.root / name).unlink()
    if text is not None:
        (system.root / name).write_text(text)
    assert default_threads(system.root) == 8


def test_fewer_processors_than_the_quota(
    system: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.second_generation({"": _max("300000 100000")})
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5}, raising=False)
    assert default_threads(system.root) == 1


def test_systems_without_affinity(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    for count, expected in ((3, 3), (None, 1), (10 * MAX_THREADS, MAX_THREADS)):
        monkeypatch.setattr("os.cpu_count", lambda count=count: count)
        assert default_threads(system.root) == expected


def test_here_there_is_at_least_one() -> None:
    assert 1 <= default_threads() <= (os.cpu_count() or 1)
