"""Asking the engines, in turns, and noting what they answer.

1. In a round every engine is asked once; every second round goes through them backwards.
2. An engine that fails is named with its last words and left out of the rest of the case.
3. What was measured is in the results at once, whatever happens afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from _case import Case, Step, peer_of
from _peers import Peer
from _protocol import EngineFailed, Measured, Unsupported, Worker
from _results import Results

Start = Callable[[str, dict[str, Any]], Worker]
"""Starts an engine by name, with settings."""


class Runner:
    """Runs cases.

    Args:
        installed: the engines with their interpreters.
        models: the file of each kind of model, and its vocabulary's size.
        results: where figures go.
        repeats: measured rounds.
        threads: of every engine.
        progress: where it is said what is being measured.
    """

    def __init__(
        self,
        installed: Mapping[str, tuple[Peer, str]],
        models: Mapping[str, tuple[Path, int]],
        results: Results,
        *,
        repeats: int,
        threads: int,
        progress: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self._installed = installed
        self._models = models
        self._results = results
        self._repeats = repeats
        self._threads = threads
        self._progress = progress

    def run(self, case: Case) -> None:
        """Measure a case; what fails is noted."""
        if case.fresh:
            self._run_fresh(case)
            return
        with ExitStack() as stack:
            workers = {}
            for name in self._names(case):
                if (worker := self._start(name, case)) is not None:
                    stack.callback(worker.kill)
                    workers[name] = worker
            for step in case.steps:
                self._run_step(case, step, workers)
            for worker in workers.values():
                worker.close()

    def _run_step(self, case: Case, step: Step, workers: dict[str, Worker]) -> None:
        self._progress(f"{case.group}: {step.label or step.call[0]}")
        active = list(workers)
        rounds = step.n_rounds(self._repeats) if step.label else 1
        for i in range(-step.warm_up if step.label else 0, rounds):
            for name in active[::-1] if i % 2 else list(active):
                measured = self._ask(case, step, name, workers)
                if measured is None:
                    active.remove(name)
                elif i >= 0 and step.label:
                    self._keep(case, step, name, measured)

    def _ask(
        self, case: Case, step: Step, name: str, workers: dict[str, Worker]
    ) -> Measured | None:
        """The answer; None if the engine cannot, or failed and is gone."""
        try:
            return _measured(workers[name], step)
        except Unsupported as error:
            self._results.note(f"{name} cannot do: {error}")
        except EngineFailed as error:
            self._fail(name, case, step.label or step.call[0], error)
            workers.pop(name).kill()
        return None

    def _run_fresh(self, case: Case) -> None:
        (step,) = case.steps
        self._progress(f"{case.group}: {step.label}")
        names = self._names(case)
        for i in range(-1, step.n_rounds(self._repeats)):
            for name in names[::-1] if i % 2 else list(names):
                times = self._start_up(case, step, name)
                if times is None:
                    names.remove(name)
                elif i >= 0:
                    self._keep(case, step, name, times)

    def _start_up(self, case: Case, step: Step, name: str) -> Measured | None:
        """What a new process took until its answer; None if it failed."""
        worker = self._start(name, case)
        if worker is None:
            return None
        try:
            if self._ask(case, step, name, {name: worker}) is None:
                return None
            seconds = perf_counter() - worker.started
            times = {**worker.hello["seconds"], "process start to first token": seconds}
            return {part: {"seconds": s, "count": 1} for part, s in times.items()}
        finally:
            worker.kill()

    def _names(self, case: Case) -> list[str]:
        return [name for name in case.engines if name in self._installed]

    def _start(self, name: str, case: Case) -> Worker | None:
        peer, python = self._installed[name]
        path, n_vocab = self._models[case.model]
        settings = {
            **case.settings,
            "model": str(path),
            "n_vocab": n_vocab,
            "n_threads": self._threads,
            "unified": peer.unified,
            "flash": peer.flash,
        }
        try:
            worker = Worker(peer.script, settings, python)
        except EngineFailed as error:
            self._fail(name, case, "start", error)
            return None
        self._results.versions[peer_of(name)] = worker.hello["version"]
        return worker

    def _keep(self, case: Case, step: Step, name: str, measured: Measured) -> None:
        for part, unit in step.units.items():
            if part in measured:
                label = f"{step.label}: {part}" if part else step.label
                self._results.add(case.group, label, unit, name, unit.of(measured[part]))

    def _fail(self, name: str, case: Case, what: str, error: EngineFailed) -> None:
        text = f"{name} failed at {case.group}, {what}: {error}"
        self._results.note(text)
        self._progress(text)


def _measured(worker: Worker, step: Step) -> Measured:
    for question, arguments in step.before:
        worker.ask(question, **arguments)
    question, arguments = step.call
    return worker.ask(question, **arguments)
