"""Workers of one session keep to a processor each, and a test that is alone has them all."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workers import Worker

locks = pytest.mark.skipif(sys.platform == "win32", reason="files cannot be locked here")
WAIT = 0.2


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """What the process was allowed, in order; it starts with three of them."""
    allowed: list[set[int]] = [{2, 5, 7}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed[-1], raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, to: allowed.append(to), raising=False)
    return allowed


@pytest.fixture
def make(tmp_path: Path) -> Callable[[int | None], Worker]:
    """Workers that share files to lock."""
    door, room = tmp_path / "door", tmp_path / "room"
    door.touch()
    room.touch()
    return lambda number: Worker(number, door, room)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, [{2, 5, 7}]),
        ({"PYTEST_XDIST_WORKER": "gw0", "PYTEST_XDIST_WORKER_COUNT": "1"}, [{2, 5, 7}]),
        ({"PYTEST_XDIST_WORKER": "gw1", "PYTEST_XDIST_WORKER_COUNT": "2"}, [{2, 5, 7}, {5}]),
        ({"PYTEST_XDIST_WORKER": "gw3", "PYTEST_XDIST_WORKER_COUNT": "4"}, [{2, 5, 7}, {2}]),
    ],
)
def test_a_worker_beside_others_keeps_to_one_processor(
    processors: list[set[int]], variables: dict[str, str], expected: list[set[int]]
) -> None:
    Worker.of_environment(variables)
    assert processors == expected


def test_a_test_that_is_alone_has_all_processors(
    processors: list[set[int]], make: Callable[[int | None], Worker]
) -> None:
    worker = make(1)
    with worker.turn(alone=False):
        assert processors[-1] == {5}
    with worker.turn(alone=True):
        assert processors[-1] == {2, 5, 7}
    assert processors[-1] == {5}


@pytest.mark.usefixtures("processors")
def test_a_session_without_workers_waits_for_nothing(
    make: Callable[[int | None], Worker],
) -> None:
    with make(None).turn(alone=True), make(None).turn(alone=True):
        pass


@locks
@pytest.mark.usefixtures("processors")
def test_others_run_beside_one_another(make: Callable[[int | None], Worker]) -> None:
    with make(0).turn(alone=False), make(1).turn(alone=False):
        pass


@locks
@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("inside", [True, False])
def test_nothing_runs_beside_one_that_is_alone(
    make: Callable[[int | None], Worker], inside: bool
) -> None:
    """Whether it is the one inside or the one that comes."""
    entered = threading.Event()

    def come() -> None:
        with make(1).turn(alone=not inside):
            entered.set()

    comer = threading.Thread(target=come)
    with make(0).turn(alone=inside):
        comer.start()
        assert not entered.wait(WAIT)
    comer.join()
    assert entered.is_set()


@locks
@pytest.mark.usefixtures("processors")
def test_one_that_waits_to_be_alone_is_not_passed_by(make: Callable[[int | None], Worker]) -> None:
    order: list[str] = []

    def come(name: str, number: int, *, alone: bool) -> threading.Thread:
        def work() -> None:
            with make(number).turn(alone=alone):
                order.append(name)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(WAIT)
        return thread

    with make(0).turn(alone=False):
        threads = [come("alone", 1, alone=True), come("later", 2, alone=False)]
        assert order == []
    for thread in threads:
        thread.join()
    assert order == ["alone", "later"]
