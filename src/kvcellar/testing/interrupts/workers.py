"""Stages in processes of their own: what crashes or hangs is a finding, and the rest goes on.

A worker is ``python -m kvcellar.testing.interrupts.workers``. It reads what to do as a line of JSON
and writes a line before and after each trial, so that the one that it died of is known.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

from kvcellar.testing.interrupts.points import OWN, short
from kvcellar.testing.interrupts.trials import (
    Fault,
    NotApplicable,
    Plan,
    Trial,
    Trials,
    open_stage,
)

DEADLINE = 30.0
"""Seconds that a trial may take, by far."""

FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
MAX_DEATHS = 25
"""Crashes and hangs after which a stage is given up."""


@dataclass(slots=True)
class Result:
    """What came of one stage.

    Attributes:
        stage: its name.
        skipped: why the operation cannot be done there; "" if it can.
        n_points: how many points one run of the operation passes.
        n_planned: how many trials there were to be.
        trials: what came of each.
    """

    stage: str
    skipped: str = ""
    n_points: int = 0
    n_planned: int = 0
    trials: list[Trial] = field(default_factory=list)

    @property
    def faults(self) -> list[Trial]:
        """Those that found something."""
        return [trial for trial in self.trials if trial.outcome == "fault"]

    def count(self, outcome: str) -> int:
        """How many ended so."""
        return sum(trial.outcome == outcome for trial in self.trials)


def run_stages(
    stages: Sequence[str],
    plan: Plan,
    tell: Callable[[Trial], object] = lambda _: None,
    deadline: float = DEADLINE,
    done: Callable[[Result], object] = lambda _: None,
) -> list[Result]:
    """Run a plan on stages one after the other, in as many processes as it takes.

    Args:
        stages: ``module:function:argument`` each, see `open_stage`.
        plan: which trials.
        tell: called with each trial.
        deadline: seconds that one may take.
        done: called with each stage's result.
    """
    jobs = [Job(Result(stage), plan) for stage in stages]
    while todo := [job for job in jobs if not job.is_done]:
        with _Worker(todo, deadline) as worker:
            for job, trial in _follow(worker, todo):
                if trial is not None:
                    job.result.trials.append(trial)
                    tell(trial)
                elif job.is_done:
                    done(job.result)
    return [job.result for job in jobs]


@dataclass(slots=True)
class Job:
    """A stage, and what is left to do there.

    Attributes:
        result: what came of it so far.
        plan: what is left.
        is_done: whether nothing is.
        current: the trial that goes on.
        site: where that one is interrupted.
        is_told: whether that one's outcome is known.
        n_deaths: how many processes have ended before the plan did.
    """

    result: Result
    plan: Plan
    is_done: bool = False
    current: str = "(learning)"
    site: str = ""
    is_told: bool = False
    n_deaths: int = 0
    names: list[str] | None = None

    def heard(self, told: dict[str, Any]) -> Trial | None:
        """Take note of what a worker tells; return the trial that came to an end."""
        if "skipped" in told:
            self.result.skipped, self.is_done = told["skipped"], True
        elif "names" in told:
            if self.names is None:
                self.names, self.result.n_points = told["names"], told["points"]
                self.result.n_planned = len(told["names"])
        elif "begin" in told:
            self.current, self.site, self.is_told = told["begin"], told["site"], False
        elif "end" in told:
            self.is_done = True
        if "trial" not in told:
            return None
        self.is_told = True
        return Trial(**told["trial"])

    def died(self, kind: str, detail: str) -> Trial | None:
        """Take note that the worker is dead; go on behind the trial, which is returned."""
        self.n_deaths += 1
        left = self.names or []
        left = left[left.index(self.current) + 1 :] if self.current in left else []
        self.plan = replace(self.plan, only=tuple(left))
        self.is_done = not left or self.n_deaths >= MAX_DEATHS
        if self.is_done and left:
            detail += f"; {self.n_deaths} processes died, given up"
        return None if self.is_told else Trial(self.current, "fault", kind, detail, self.site)


def _follow(worker: _Worker, jobs: Sequence[Job]) -> Iterator[tuple[Job, Trial | None]]:
    """Yield the trials of a worker as they end, and what it died of if it did; None: it told."""
    job = jobs[0]
    job.current, job.site, job.is_told = "(learning)", "", False
    for told in worker.lines():
        if "stage" in told:
            job = next(one for one in jobs if one.result.stage == told["stage"])
            job.current, job.site, job.is_told = "(learning)", "", False
        yield job, job.heard(told)
    if not job.is_done:
        yield job, job.died(*worker.death())
        yield job, None


class _Worker:
    """A process that runs a plan, and what is left of it."""

    def __init__(self, jobs: Sequence[Job], deadline: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvcellar-", ignore_cleanup_errors=True)
        folders = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), self._folder.name)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed on exit)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **folders, "PYTHONHASHSEED": "0"},
            text=True,
        )
        assert self._process.stdin is not None
        for job in jobs:
            told = {"stage": job.result.stage, "plan": asdict(job.plan), "deadline": deadline}
            self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.close()

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it tells, until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json.loads(line)

    def death(self) -> tuple[str, str]:
        """Return what it died of, and where."""
        code = self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().decode("utf-8", "replace")
        kind = "hang" if "Timeout (" in text else "crash"
        at = text.rfind("most recent call first") if kind == "hang" else text.find("Current thread")
        frames = [
            f"{short(file)}:{line} {function}"
            for file, line, function in FRAME.findall(text[max(at, 0) :])
            if not file.startswith(OWN)
        ]
        return kind, f"exit status {code}; {' < '.join(frames[:5]) or text[-300:]}"

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
        self._folder.cleanup()


def work() -> None:
    """Be a worker."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print does not come between the lines

    def tell(**what: object) -> None:
        told.write(json.dumps(what) + "\n")

    for line in sys.stdin.read().splitlines():
        job = json.loads(line)
        plan = Plan(**{**job["plan"], "only": tuple(job["plan"]["only"])})
        tell(stage=job["stage"])
        _work_on(job["stage"], plan, job["deadline"], tell)
    told.flush()
    os._exit(0)  # what was broken may not survive being closed


def _work_on(name: str, plan: Plan, deadline: float, tell: Callable[..., None]) -> None:
    faulthandler.dump_traceback_later(4 * deadline, exit=True)
    stage = open_stage(name)
    trials = Trials(stage, plan)
    try:
        names = trials.learn()
    except NotApplicable as error:
        tell(skipped=str(error))
        return
    except Fault as fault:
        tell(trial=asdict(Trial("(learning)", "fault", fault.kind, str(fault))))
        tell(end=True)
        return
    tell(names=names, points=len(trials.points))
    for one in names:
        faulthandler.dump_traceback_later(deadline, exit=True)
        tell(begin=one, site=trials.site(one))
        for trial in trials.run([one]):
            tell(trial=asdict(trial))
        if trials.is_beyond_repair:
            os._exit(0)  # the next process goes on
    faulthandler.cancel_dump_traceback_later()
    with suppress(Exception):
        stage.close()
    tell(end=True)


if __name__ == "__main__":
    work()
