"""The suite and its engines: answers, refusals, and engines that die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _protocol import TAIL, EngineFailed, NotInstalled, Unsupported, Worker

FAKE = Path(__file__).with_name("fake_worker.py")


def start(**settings: Any) -> Worker:
    return Worker(FAKE, settings)


@pytest.fixture(scope="module")
def shared_worker() -> Iterator[Worker]:
    made = start(seconds=2.0)
    yield made
    made.close()


def test_it_says_hello_and_answers(shared_worker: Worker) -> None:
    assert shared_worker.hello == {"version": "1.0", "seconds": {"import": 0.25, "load": 0.5}}
    for steps in (4, 8):
        assert shared_worker.ask("decode", steps=steps) == {"": {"seconds": 2.0, "count": steps}}


def test_what_it_cannot_do_is_refused_and_it_lives_on(shared_worker: Worker) -> None:
    with pytest.raises(Unsupported, match="several sequences"):
        shared_worker.ask("refuse")
    with pytest.raises(Unsupported, match="shift"):
        shared_worker.ask("shift", keep=4)
    assert shared_worker.ask("decode", steps=1)


def test_what_it_prints_is_no_answer(shared_worker: Worker) -> None:
    assert shared_worker.ask("chatter") == {"": {"seconds": 1.0, "count": 1}}


def test_an_error_is_named(shared_worker: Worker) -> None:
    with pytest.raises(EngineFailed, match="RuntimeError: cannot compute"):
        shared_worker.ask("fail")


def test_one_that_dies_leaves_its_last_words() -> None:
    worker = start()
    with pytest.raises(EngineFailed) as caught:
        worker.ask("die")
    text = str(caught.value)
    assert "status 3" in text
    assert text.endswith("last words")
    assert "first words" not in text
    assert len(text.splitlines()) == 1 + TAIL
    with pytest.raises(EngineFailed):  # asking the dead is no other kind of error
        worker.ask("decode", steps=1)
    worker.kill()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"missing": True}, NotInstalled, "No module named 'nothing'"),
        ({"broken": True}, EngineFailed, "ValueError: no such model"),
    ],
)
def test_one_that_does_not_start_says_why(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        start(**settings)


def test_ending_it_twice_is_fine() -> None:
    worker = start()
    worker.close()
    worker.close()
    worker.kill()
