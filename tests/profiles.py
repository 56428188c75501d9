"""How hard Hypothesis looks; nothing else in the tests sets a deadline, a health check or a count.

========  =================================  ============
profile   for                                examples
========  =================================  ============
``dev``   the edit loop                      a tenth
``ci``    every change, and plain `pytest`   all
``soak``  a night, or a change of a machine  twenty times
========  =================================  ============

``HYPOTHESIS_PROFILE`` names one, and so does ``--hypothesis-profile``, which wins. A test that
costs more or less than others says how many examples it is worth with `examples`; without, it is
worth a hundred.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

PER_HUNDRED = {"dev": 10, "ci": 100, "soak": 2000}
FEWEST = 3
"""Examples that a test is left with in ``dev``, if it is worth as many."""


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
