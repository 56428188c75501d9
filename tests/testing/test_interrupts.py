"""The tool that interrupts: it finds what is broken in toys, and nothing in sound ones."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from kvcellar.testing.interrupts import __main__ as command
from kvcellar.testing.interrupts.points import AtPoint, Interrupt, places, record
from kvcellar.testing.interrupts.signals import KINDS, AtMoment
from kvcellar.testing.interrupts.trials import Plan, Trials
from kvcellar.testing.interrupts.workers import Result, run_stages
from tests.testing.toy_stages import Pair, Toy, up

ROOT = Path(__file__).parents[2]
ALL = Plan(points=None, twice=0, moments=0)
POINTS_ONLY = Plan(points=50, new=0, twice=0, moments=0)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import these toys."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))


def toy(way: str) -> str:
    return f"tests.testing.toy_stages:Toy:{way}"


def run(way: str, plan: Plan = ALL, deadline: float = 20.0) -> Result:
    return run_stages([toy(way)], plan, deadline=deadline)[0]


def in_process(way: str, plan: Plan = ALL) -> Result:
    """Without a worker, for what neither crashes nor hangs."""
    trials = Trials(Toy(way), plan)
    names = trials.learn()
    return Result(way, n_points=len(trials.points), trials=list(trials.run(names)))


def kinds(result: Result) -> set[str]:
    return {trial.kind for trial in result.faults}


class TestPoints:
    def test_an_exception_comes_at_entries_and_behind_calls_of_c(self) -> None:
        pair = Pair()
        points, error = record(pair.sound)
        assert error is None
        found = {(point.function.rpartition(".")[2], point.step < 0) for point in points}
        assert ("sound", True) in found  # its entry
        assert ("up", False) in found  # behind sum(); its entry is the call in the caller
        assert ("up", True) not in found

    @pytest.mark.parametrize("kind", [Interrupt, KeyboardInterrupt, MemoryError, ValueError])
    def test_each_point_is_reached_and_nothing_is_missed(self, kind: type[BaseException]) -> None:
        points, _ = record(Pair().sound)
        for point in points:
            sent = AtPoint(point, kind).send(Pair().sound)
            assert isinstance(sent.error, kind)
            assert (sent.asked, sent.drifted, sent.late) == (1, False, False)

    def test_a_lock_written_in_c_is_never_left_held(self) -> None:
        """CPython cannot raise between the end of its block and its release."""
        points, _ = record(Pair().sound)
        for point in points:
            pair = Pair()
            AtPoint(point, Interrupt).send(pair.sound)
            assert "owner=0" in repr(pair.lock)

    def test_loops_look_where_they_jump_back(self) -> None:
        def loop() -> None:
            n = 0
            while n < 3:
                n += 1

        places_of_loop = places(loop.__code__)
        assert places_of_loop
        points, _ = record(loop)
        assert sum(point.step >= 0 for point in points) >= 2

    def test_an_operation_that_goes_another_way_is_told(self) -> None:
        pair = Pair()
        points, _ = record(pair.sound)
        sent = AtPoint(points[-1], Interrupt).send(lambda: up(1))
        assert sent.asked == 0 or sent.drifted

    def test_a_second_exception_comes_behind_the_first(self) -> None:
        points, _ = record(Pair().taken_back)
        asked = [AtPoint(point, Interrupt, 0).send(Pair().taken_back).asked for point in points]
        assert 2 in asked

    def test_nothing_is_traced_afterwards(self) -> None:
        points, _ = record(Pair().sound)
        for then in (None, 0, 100):
            AtPoint(points[0], Interrupt, then).send(Pair().sound)
            assert sys.gettrace() is None


class TestMoments:
    @pytest.mark.parametrize("kind", KINDS)
    def test_each_kind_interrupts(self, kind: str) -> None:
        def loop() -> None:
            for i in range(3_000_000):
                up(i)

        sent = AtMoment(kind, 0.01).send(loop)
        wanted = KeyboardInterrupt if kind == "sigint" else Interrupt
        assert isinstance(sent.error, wanted)
        assert not sent.late

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_comes_afterwards_is_late(self, kind: str) -> None:
        sent = AtMoment(kind, 0.02).send(lambda: up(1))
        assert sent.late
        assert sent.error is None


class TestToys:
    @pytest.mark.parametrize("way", ["sound", "taken_back"])
    def test_nothing_is_found_in_a_sound_one(self, way: str) -> None:
        result = in_process(way)
        assert not result.faults
        assert result.count("before")
        assert result.count("before") + result.count("after") == len(result.trials)

    @pytest.mark.parametrize(
        ("way", "kind"),
        [
            ("half", "half done"),
            ("swallow", "swallowed"),
            ("mask", "another error"),
            ("keep_lock", "lock held"),
        ],
    )
    def test_what_is_broken_is_found(self, way: str, kind: str) -> None:
        result = in_process(way)
        assert kinds(result) == {kind}
        assert all(trial.alone for trial in result.faults)
        name = result.faults[0].name
        again = in_process(way, Plan(only=(name,)))
        assert [trial.kind for trial in again.trials] == [kind]

    def test_what_adds_up_is_found_though_no_trial_shows_it_alone(self) -> None:
        result = in_process("leak", Plan(points=None, new=0, twice=0, moments=0))
        assert kinds(result) == {"leak"}
        assert not any(trial.alone for trial in result.faults)

    def test_a_second_exception_finds_what_one_does_not(self) -> None:
        result = in_process("taken_back", Plan(points=1, new=0, twice=200, moments=0))
        plan = Plan(only=tuple(f"{i}+{n}" for i in range(result.n_points) for n in range(4)))
        assert kinds(in_process("taken_back", plan)) == {"half done"}

    def test_random_moments_are_tried(self) -> None:
        result = in_process("sound", Plan(points=0, new=0, twice=0, moments=3))
        assert len(result.trials) == 3 * len(KINDS)
        assert not result.faults


class TestWorkers:
    @pytest.mark.parametrize(("way", "kind"), [("crash", "crash"), ("exit", "crash")])
    def test_a_crash_is_a_finding_and_the_rest_goes_on(self, way: str, kind: str) -> None:
        names = ("0", "4", "5")  # the first is outside of what crashes
        result = run(way, Plan(only=names))
        assert [trial.name for trial in result.trials] == list(names)
        assert [trial.kind for trial in result.trials] == ["", kind, kind]
        assert all(trial.site for trial in result.trials)

    def test_a_hang_is_one_as_well(self) -> None:
        result = run("hang", Plan(only=("4",)), deadline=1.0)
        assert kinds(result) == {"hang"}
        assert "toy_stages.py" in result.faults[0].detail

    def test_where_nothing_works_any_more_another_process_goes_on(self) -> None:
        result = run("spoil", Plan(only=("4", "5", "6")))
        told = [(trial.name, trial.outcome) for trial in result.trials]
        assert told == [("4", "before"), ("5", "fault"), ("6", "before")]

    def test_ctrl_c_comes_though_jobs_in_the_background_ignore_it(self) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            result = run("sound", POINTS_ONLY)
        finally:
            signal.signal(signal.SIGINT, before)
        assert not result.faults

    def test_several_stages_in_turn(self) -> None:
        sound, refused, half = run_stages([toy("sound"), toy("refuse"), toy("half")], POINTS_ONLY)
        assert not sound.faults
        assert len(sound.trials) == sound.n_planned > 3
        assert refused.skipped == "a toy that cannot"
        assert kinds(half) == {"half done"}


class TestCommand:
    def test_a_name_that_nothing_begins_with(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["--only", "nothing/such"]) == 2
        assert "nothing/such" in capsys.readouterr().err

    def test_models_that_are_not_there_are_left_out(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert command.main(["--models", str(tmp_path), "--only", "ggml/llama"]) == 2
        assert "the models of ggml/llama, " in capsys.readouterr().err

    def test_the_table_counts_and_the_status_tells(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(command, "run_stages", lambda *_: [in_process("half")])
        assert command.main(["--only", "ggml/tiny/append"]) == 1
        printed = capsys.readouterr().out
        assert "ggml/tiny/append" in printed
        assert "half done" in printed
        assert "--only ggml/tiny/append --at " in printed
        monkeypatch.setattr(command, "run_stages", lambda *_: [in_process("sound")])
        assert command.main(["--only", "ggml/tiny/append"]) == 0

    def test_json_has_a_line_for_each_stage(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        args = ["--models", str(tmp_path), "--only", "ggml/tiny/trim", "--at", "0", "--json"]
        status = command.main([*args, "--at", "1", "--jobs", "1"])
        (line,) = capsys.readouterr().out.splitlines()
        told = json.loads(line)
        assert told["stage"] == "ggml/tiny/trim"
        assert [trial["name"] for trial in told["trials"]] == ["0", "1"]
        assert status == any(trial["outcome"] == "fault" for trial in told["trials"])
