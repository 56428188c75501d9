"""Stages in processes of their own: what crashes or hangs is a finding, and the rest goes on.

A worker is ``python -m kvcellar.testing.interrupts.workers``. It reads what to do as a line of JSON
and writes a line before and after each trial, so that the one that it died of is known.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

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


def run_stage(
    stage: str,
    plan: Plan,
    tell: Callable[[Trial], object] = lambda _: None,
    deadline: float = DEADLINE,
) -> Result:
    """Run a plan on a stage, in as many processes as it takes.

    Args:
        stage: ``module:function:argument``, see `open_stage`.
        plan: which trials.
        tell: called with each trial.
        deadline: seconds that one may take.
    """
    result = Result(stage)
    names: list[str] | None = None
    for _ in range(MAX_DEATHS):
        todo = plan if names is None else replace(plan, only=tuple(names))
        with _Worker(stage, todo, deadline) as worker:
            current = "(learning)"
            done = False
            for told in worker.lines():
                if "skipped" in told:
                    result.skipped = told["skipped"]
                    return result
                if "names" in told:
                    current = "(between)"
                    result.n_points = told["points"]
                    if names is None:
                        names = told["names"]
                        result.n_planned = len(names)
                elif "begin" in told:
                    current = told["begin"]
                elif "trial" in told:
                    trial = Trial(**told["trial"])
                    result.trials.append(trial)
                    tell(trial)
                done |= "end" in told
            if done:
                return result
            trial = worker.death(current)
        result.trials.append(trial)
        tell(trial)
        if names is None or current not in names:
            return result
        names = names[names.index(current) + 1 :]
        if not names:
            return result
    result.trials.append(Trial("(the rest)", "fault", "given up", f"{MAX_DEATHS} processes died"))
    return result


class _Worker:
    """A process that runs a plan, and what is left of it."""

    def __init__(self, stage: str, plan: Plan, deadline: float) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed on exit)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            text=True,
        )
        assert self._process.stdin is not None
        job = {"stage": stage, "plan": asdict(plan), "deadline": deadline}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it tells, until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json.loads(line)

    def death(self, name: str) -> Trial:
        """What it died of."""
        code = self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().decode("utf-8", "replace")
        kind = "hang" if "Timeout (" in text else "crash"
        main = text[text.rfind("most recent call first") :] if kind == "hang" else text
        if "Current thread" in text and kind == "crash":
            main = text[text.index("Current thread") :]
        frames = [
            f"{file}:{line} {function}"
            for file, line, function in re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main)
            if "kvcellar/testing/interrupts" not in file
        ]
        where = " < ".join(frames[:4]) or text[-300:]
        return Trial(name, "fault", kind, f"exit status {code}; {where}", site="")

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def work() -> None:
    """Be a worker."""
    faulthandler.enable()
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print does not come between the lines

    def tell(**what: object) -> None:
        told.write(json.dumps(what) + "\n")

    job = json.loads(sys.stdin.readline())
    plan = Plan(**{**job["plan"], "only": tuple(job["plan"]["only"])})
    faulthandler.dump_traceback_later(4 * job["deadline"], exit=True)
    trials = Trials(open_stage(job["stage"]), plan)
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
    for name in names:
        faulthandler.dump_traceback_later(job["deadline"], exit=True)
        tell(begin=name)
        for trial in trials.run([name]):
            tell(trial=asdict(trial))
    faulthandler.cancel_dump_traceback_later()
    tell(end=True)
    told.flush()
    os._exit(0)  # what was broken on purpose may not survive a closing


if __name__ == "__main__":
    work()
