"""Turns, warm-ups, and what happens when an engine is missing or fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from _case import BATCHED, LLAMA_CPP, OPENVINO, OURS, Case, Step, Unit
from _peers import Peer, engines, has_module, locate
from _protocol import Worker
from _results import Results
from _runner import Runner

FAKE = str(Path(__file__).with_name("fake_worker.py"))
DECODE = Step("decode", ("decode", {"steps": 4}), {"": Unit.RATE}, before=(("rewind", {"n": 9}),))


def fakes(*names: str) -> dict[str, tuple[Peer, str]]:
    return {name: (Peer(name, FAKE, (), ""), sys.executable) for name in names}


def case(*steps: Step, fresh: bool = False, **settings: object) -> Case:
    return Case("group", (OURS, LLAMA_CPP, OPENVINO), settings, steps, fresh)


def run(
    made: Case, *names: str, repeats: int = 2, said: Callable[[str], None] = lambda _: None
) -> Results:
    results = Results()
    models = {"demo": (Path("model.gguf"), 100)}
    runner = Runner(fakes(*names), models, results, repeats=repeats, threads=1, progress=said)
    runner.run(made)
    return results


def test_every_engine_that_is_there_is_asked_as_often_as_wanted() -> None:
    results = run(case(DECODE, seconds=2.0), OURS, LLAMA_CPP, repeats=3)
    (scenario,) = results.scenarios
    assert scenario.engines == {OURS: [2.0] * 3, LLAMA_CPP: [2.0] * 3}
    assert results.versions == {OURS: "1.0", "llama.cpp": "1.0"}
    assert results.notes == []


def test_engines_take_turns_and_the_first_round_is_thrown_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, str]] = []
    ask = Worker.ask

    def listen(worker: Worker, question: str, **arguments: object) -> object:
        asked.append((id(worker), question))
        return ask(worker, question, **arguments)

    monkeypatch.setattr(Worker, "ask", listen)
    results = run(case(DECODE), OURS, LLAMA_CPP)
    turns = [worker for worker, question in asked if question == "decode"]
    last, first = turns[:2]  # every second round goes backwards, the one thrown away too
    assert turns == [last, first, first, last, last, first]
    assert first != last
    assert [question for _, question in asked] == ["rewind", "decode"] * 6
    assert [len(v) for v in results.scenarios[0].engines.values()] == [2, 2]


@pytest.mark.parametrize(
    ("rounds", "repeats", "expected"), [("all", 5, 5), ("few", 5, 3), ("few", 1, 1), ("once", 5, 1)]
)
def test_long_steps_have_fewer_rounds(rounds: str, repeats: int, expected: int) -> None:
    step = Step("x", ("decode", {}), rounds=rounds)  # type: ignore[arg-type]
    assert step.n_rounds(repeats) == expected


def test_a_step_without_a_label_is_done_once_and_not_kept() -> None:
    results = run(case(Step("", ("decode", {"steps": 1}))), OURS, repeats=3)
    assert results.scenarios == []


def test_one_that_dies_is_named_and_the_others_go_on() -> None:
    said: list[str] = []
    steps = (DECODE, Step("dying", ("die", {}), {"": Unit.MS}), DECODE)
    made = Case("group", (OURS,), {}, steps)
    results = run(made, OURS, repeats=1, said=said.append)
    (note,) = results.notes
    assert note.startswith("kvcellar failed at group, dying: the engine ended with status 3")
    assert note.endswith("last words")
    assert note in said
    assert results.scenarios[0].engines == {OURS: [4.0]}


def test_one_that_does_not_start_leaves_the_others_alone() -> None:
    good, bad = fakes(OURS), fakes(LLAMA_CPP)
    bad[LLAMA_CPP] = (Peer(LLAMA_CPP, "there_is_no_such_file.py", (), ""), sys.executable)
    results = Results()
    models = {"demo": (Path("model.gguf"), 100)}
    runner = Runner({**good, **bad}, models, results, repeats=1, threads=1, progress=lambda _: None)
    runner.run(case(DECODE))
    assert list(results.scenarios[0].engines) == [OURS]
    (note,) = results.notes
    assert note.startswith("llama.cpp (flash) failed at group, start: the engine ended with status")
    assert "there_is_no_such_file.py" in note


@pytest.mark.parametrize("question", ["refuse", "shift"])
def test_what_an_engine_cannot_do_is_left_out(question: str) -> None:
    steps = (Step("edit", (question, {}), {"": Unit.MS}), DECODE)
    results = run(case(*steps), OURS)
    assert [scenario.label for scenario in results.scenarios] == ["decode"]
    (note,) = results.notes
    assert note.startswith("kvcellar cannot do: ")


def test_start_up_is_measured_in_new_processes() -> None:
    parts = ("import", "load", "process start to first token")
    step = Step("start-up", ("decode", {"steps": 1}), dict.fromkeys(parts, Unit.SECONDS))
    results = run(case(step, fresh=True), OURS)
    figures = {s.label: s.engines[OURS] for s in results.scenarios}
    assert figures["start-up: import"] == [0.25, 0.25]
    assert figures["start-up: load"] == [0.5, 0.5]
    whole = figures["start-up: process start to first token"]
    assert len(whole) == 2
    assert all(0 < seconds < 60 for seconds in whole)


def test_what_was_measured_before_ctrl_c_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    results, killed = Results(), []
    kill = Worker.kill

    def interrupt(text: str) -> None:
        if text == "group: second":
            raise KeyboardInterrupt

    def note_kill(worker: Worker) -> None:
        killed.append(worker)
        kill(worker)

    monkeypatch.setattr(Worker, "kill", note_kill)
    runner = Runner(
        fakes(OURS, LLAMA_CPP),
        {"demo": (Path("model.gguf"), 100)},
        results,
        repeats=1,
        threads=1,
        progress=interrupt,
    )
    second = Step("second", ("decode", {"steps": 4}), {"": Unit.MS})
    with pytest.raises(KeyboardInterrupt):
        runner.run(case(DECODE, second))
    assert results.scenarios[0].engines == {OURS: [4.0], LLAMA_CPP: [4.0]}
    assert len(set(map(id, killed))) == 2


def test_an_engine_is_looked_for_in_every_interpreter() -> None:
    where = {"kvcellar": "here", "llama_cpp": "there"}

    def finder(python: str, module: str) -> bool:
        return where.get(module) == python

    found, missing = locate(["here", "there", "nowhere"], finder)
    assert {name: python for name, (_, python) in found.items()} == {
        "kvcellar": "here",
        "llama.cpp (flash)": "there",
        "llama.cpp (no flash)": "there",
        "llama.cpp, one pool (flash)": "there",
        "llama.cpp, one pool (no flash)": "there",
    }
    assert list(missing) == ["openvino", "transformers"]
    assert "pip install openvino-genai" in missing["openvino"]
    assert "--peer-python" in missing["transformers"]


def test_one_that_is_missing_is_named_once_not_in_every_setting() -> None:
    _, missing = locate(["nowhere"], lambda *_: False)
    assert list(missing) == [
        "kvcellar",
        "llama.cpp",
        "llama.cpp, one pool",
        "openvino",
        "transformers",
    ]


def test_every_setting_reaches_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, object]] = []

    def start(script: str, settings: dict[str, object], python: str) -> Worker:
        assert script == "_worker_llama_cpp.py"
        given.append((settings["unified"], settings["flash"]))
        return Worker(FAKE, settings, python)

    monkeypatch.setattr("_runner.Worker", start)
    installed = {peer.name: (peer, sys.executable) for peer in engines()}
    models = {"demo": (Path("model.gguf"), 100)}
    runner = Runner(installed, models, Results(), repeats=1, threads=1, progress=lambda _: None)
    runner.run(Case("group", BATCHED[1:], {}, (DECODE,)))
    assert given == [(False, True), (False, False), (True, True), (True, False)]


def test_ours_comes_first_and_every_worker_exists() -> None:
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    assert engines()[0].name == OURS
    for peer in engines():
        assert (folder / peer.script).is_file()


def test_modules_are_looked_for_without_importing_them() -> None:
    assert has_module(sys.executable, "json")
    assert not has_module(sys.executable, "there_is_no_such_module")
    with pytest.raises(SystemExit, match="--peer-python /no/such/python"):
        has_module("/no/such/python", "json")
