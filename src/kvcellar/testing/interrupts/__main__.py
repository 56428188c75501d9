"""The command line: which stages and trials, side by side; a table, and the distinct causes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from kvcellar.testing.interrupts.operations import OPERATIONS, SCENES
from kvcellar.testing.interrupts.trials import Plan, Trial
from kvcellar.testing.interrupts.workers import Result, run_stages

STAGE = "kvcellar.testing.interrupts.operations:open_context_stage:"
OUTCOMES = ("before", "between", "after", "late", "fault")
MODELS = Path("../shared/models")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 1 if anything was half done."""
    args = _parser().parse_args(argv)
    wanted = [f"{only.rstrip('/')}/" for only in args.only or []] or [""]
    found = [name for name, one in SCENES.items() if (args.models / one.file).exists()]
    if len(found) < len(SCENES):
        left = ", ".join(name for name in SCENES if name not in found)
        print(f"not in {args.models}: the models of {left}", file=sys.stderr)
    names = [
        f"{scene}/{operation}"
        for scene in found
        for operation in OPERATIONS
        if any(f"{scene}/{operation}/".startswith(only) for only in wanted)
        and (not args.operations or operation in args.operations.split(","))
    ]
    if not names:
        print(f"--only {args.only}: no such name; they are scene/operation", file=sys.stderr)
        return 2
    plan = Plan(
        points=None if args.all else args.points,
        new=args.new,
        twice=args.twice,
        moments=args.moments,
        only=tuple(args.at or ()),
        seed=args.seed,
    )
    progress = Progress(len(names), quiet=args.json or not sys.stderr.isatty())

    def run(some: list[str]) -> list[Result]:
        stages = [f"{STAGE}{args.models}|{name}" for name in some]
        results = run_stages(stages, plan, progress.trial, args.deadline, tell)
        for name, result in zip(some, results, strict=True):
            result.stage = name
        return results

    def tell(result: Result) -> None:
        if args.json:
            stage = result.stage.rpartition("|")[2]
            print(json.dumps({**asdict(result), "stage": stage}), flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        parts = pool.map(run, split(names, args.jobs))
        results = [result for part in parts for result in part]
    results.sort(key=lambda result: names.index(result.stage))
    progress.clear()
    if not args.json:
        print_table(results)
        print_causes(results)
    return int(any(result.faults for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcellar.testing.interrupts",
        description="Interrupt operations wherever CPython can, and prove that none is half done.",
    )
    add = parser.add_argument
    add("--models", type=Path, default=MODELS, help="folder of the tiny models")
    add("--only", action="append", help="names of stages, or what they begin with")
    add("--operations", default="", help="these operations only, with commas between")
    add("--at", action="append", help="the trial of this name only")
    add("--points", type=int, default=100, help="points of an operation, evenly spread")
    add("--all", action="store_true", help="all points, however often they are passed")
    add("--new", type=int, default=20, help="points of an operation in a new context")
    add("--twice", type=int, default=20, help="points with a second exception behind the first")
    add("--moments", type=int, default=5, help="real signals of each kind at random moments")
    add("--seed", type=int, default=0, help="moves points and moments")
    add("--jobs", type=int, default=n_processors(), help="processes side by side")
    add("--deadline", type=float, default=30.0, help="seconds that a trial may take")
    add("--json", action="store_true", help="a line of JSON for each stage as it is done")
    return parser


def split(names: Sequence[str], n: int) -> list[list[str]]:
    """Divide stages among processes; a model's stay together, if there are enough models."""
    scenes: dict[str, list[str]] = {}
    for name in names:
        scenes.setdefault(name.rpartition("/")[0], []).append(name)
    if len(scenes) >= n:
        return list(scenes.values())
    return [list(names[i::n]) for i in range(min(n, len(names)))]


def n_processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Progress:
    """One line that says how far it is."""

    def __init__(self, n_stages: int, *, quiet: bool) -> None:
        self._n_stages, self._quiet = n_stages, quiet
        self._n_trials = self._n_faults = 0
        self._start = time.monotonic()

    def trial(self, trial: Trial) -> None:
        """Count one."""
        self._n_trials += 1
        self._n_faults += trial.outcome == "fault"
        if self._n_trials % 20 == 0:
            self._show()

    def _show(self) -> None:
        if not self._quiet:
            seconds = time.monotonic() - self._start
            line = (
                f"{self._n_trials} interrupts on {self._n_stages} stages, "
                f"{self._n_faults} faults, {seconds:.0f} s"
            )
            print(f"\r{line:100.100}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave an empty line."""
        if not self._quiet:
            print(f"\r{'':100}\r", end="", file=sys.stderr, flush=True)


def print_table(results: Sequence[Result]) -> None:
    """A row for each operation on each model."""
    shown = [result for result in results if not result.skipped]
    width = max((len(result.stage) for result in shown), default=10)
    print(f"{'':{width}} {'points':>7} {'tried':>6}", *(f"{one:>7}" for one in OUTCOMES))
    for result in shown:
        counts = [result.count(outcome) for outcome in OUTCOMES]
        kinds = Counter(trial.kind for trial in result.faults)
        told = ", ".join(f"{kind} {n}" for kind, n in kinds.most_common())
        numbers = " ".join(f"{n or '.':>7}" for n in counts)
        tried = len(result.trials)
        print(f"{result.stage:{width}} {result.n_points:7} {tried:6} {numbers}  {told}".rstrip())
    trials = [trial for result in shown for trial in result.trials]
    counts = [sum(trial.outcome == outcome for trial in trials) for outcome in OUTCOMES]
    drifted = sum(trial.drifted for trial in trials)
    numbers = " ".join(f"{n or '.':>7}" for n in counts)
    print(f"{'all':{width}} {'':7} {len(trials):6} {numbers}  ({drifted} drifted)")
    skipped = [result.stage for result in results if result.skipped]
    if skipped:
        print(f"cannot be done: {', '.join(skipped)}")


def print_causes(results: Sequence[Result], most: int = 40) -> None:
    """What was found, by kind and by the function that was interrupted; how to repeat it."""
    found = Counter[tuple[str, str]]()
    example: dict[tuple[str, str], tuple[str, Trial]] = {}
    for result in results:
        for trial in result.faults:
            cause = trial.kind, trial.within or trial.site
            found[cause] += 1
            if cause not in example or (trial.alone and not example[cause][1].alone):
                example[cause] = result.stage, trial
    for (kind, within), n in found.most_common(most):
        stage, trial = example[kind, within]
        also = "" if trial.alone else " (only after others)"
        print(f"\n{n:4} {kind}: {within or 'somewhere'}{also}")
        print(f"     at {trial.site}: {' '.join(trial.detail.split()):.300}")
        print(f"     --only {stage} --at {trial.name}")
    if len(found) > most:
        print(f"\nand {len(found) - most} more causes: see --json")


if __name__ == "__main__":
    sys.exit(main())
