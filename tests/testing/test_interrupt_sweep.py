"""A sample of what ``python -m kvcellar.testing.interrupts`` does as a whole.

Every model with three operations, every operation on one model or two: some points, and real
signals at random moments.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from random import Random

import pytest

from kvcellar.testing.interrupts.__main__ import STAGE, n_processors
from kvcellar.testing.interrupts.operations import OPERATIONS, SCENES
from kvcellar.testing.interrupts.signals import KINDS
from kvcellar.testing.interrupts.trials import Plan
from kvcellar.testing.interrupts.workers import Result, run_stages

SPARSE = Plan(points=3, new=1, twice=2, moments=5)
N_OPERATIONS = 3
"""For each model."""


def run(models: Path, names: list[str], plan: Plan) -> list[Result]:
    return run_stages([f"{STAGE}{models}|{name}" for name in names], plan)


def report(results: list[Result]) -> str:
    """The faults; but two exceptions may leave a save's folder, which a later save removes."""
    return "\n".join(
        f"{result.stage.rpartition('|')[2]} --at {trial.name}: {trial.kind}: {trial.detail:.200}"
        for result in results
        for trial in result.faults
        if not (trial.kind == "files left" and trial.name.startswith("twice"))
    )


@pytest.mark.slow
@pytest.mark.alone
def test_no_interrupt_leaves_anything_half_done(shared: Path) -> None:
    operations = list(OPERATIONS)
    Random(1).shuffle(operations)
    turns = cycle(operations)
    chosen = [[f"{scene}/{next(turns)}" for _ in range(N_OPERATIONS)] for scene in SCENES]
    assert {name.rpartition("/")[2] for names in chosen for name in names} == OPERATIONS.keys()
    with ThreadPoolExecutor(n_processors()) as pool:
        parts = pool.map(lambda names: run(shared / "models", names, SPARSE), chosen)
        results = [result for part in parts for result in part]
    assert not report(results)
    trials = [trial for result in results for trial in result.trials]
    n_done = sum(not result.skipped for result in results)
    assert n_done > len(SCENES)
    n_signals = sum(":" in trial.name for trial in trials)
    assert n_signals == n_done * SPARSE.moments * len(KINDS)
    assert {trial.outcome for trial in trials} >= {"before", "between", "after"}


@pytest.mark.slow
def test_nor_where_there_are_no_reference_data(tmp_path: Path) -> None:
    names = [f"ggml/tiny/{operation}" for operation in ("append", "remove", "load", "close")]
    results = run(tmp_path, names, Plan(points=30, new=5, twice=5, moments=5))
    assert not report(results)
    assert all(len(result.trials) > 30 for result in results)
