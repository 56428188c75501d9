"""How much is tried; nothing else in the tests sets a deadline, a health check or a count.

========  =================================  ============  ==================================
profile   for                                examples      parameters of a test
========  =================================  ============  ==================================
``dev``   the edit loop                      a tenth       at most four sets, evenly spread
``ci``    every change, and plain `pytest`   all           all
``soak``  a night, or a change of a machine  twenty times  all
========  =================================  ============  ==================================

``HYPOTHESIS_PROFILE`` names one, and so does ``--hypothesis-profile``, which wins. A test that
costs more or less than others says how many examples it is worth with `examples`; without, it is
worth a hundred.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings

PER_HUNDRED = {"dev": 10, "ci": 100, "soak": 2000}
FEWEST = 3
"""Examples that a test is left with in ``dev``, if it is worth as many."""

FEW = 4
"""Sets of parameters that a test is left with in ``dev``."""


def load_profiles() -> None:
    """Register the profiles and load the one that the environment names."""
    for name, count in PER_HUNDRED.items():
        settings.register_profile(
            name,
            settings.get_profile("default"),
            max_examples=count,
            derandomize=False,
            deadline=None,  # how long an example takes is up to the machine
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def examples(count: int, *, steps: int | None = None, derandomize: bool = False) -> settings:
    """Settings of a test that is worth ``count`` examples in ``ci``, of up to ``steps`` each."""
    profile = settings()
    return settings(
        max_examples=max(min(count, FEWEST), count * profile.max_examples // 100),
        stateful_step_count=profile.stateful_step_count if steps is None else steps,
        derandomize=derandomize and profile.max_examples <= PER_HUNDRED["ci"],
    )


def spread(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Choose what ``dev`` runs: of every test at most `FEW` sets of parameters."""
    sets: dict[tuple[pytest.Collector | None, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        sets[item.parent, item.name.partition("[")[0]].append(item)
    chosen: set[pytest.Item] = set()
    for same in sets.values():
        n = min(FEW, len(same))
        chosen.update(same[i * len(same) // n] for i in range(n))
    return [item for item in items if item in chosen]
