"""One sequence: prefill, and decode at several lengths.

The longest context is computed once; shorter ones are what is left after rewinding it.
"""

from __future__ import annotations

from _case import SINGLE, Case, Sizes, Step, Unit, settings


def cases(sizes: Sizes) -> list[Case]:
    """One case for all of it."""
    steps: list[Step] = []
    for i, n in enumerate(sizes.prefill):
        first = i == 0
        steps.append(
            Step(
                f"prefill of {n}",
                ("fill", {"n": n}),
                {"": Unit.RATE},
                rounds="all" if first else "few",
                warm_up=first,
            )
        )
    longest, shortest = max(sizes.lengths), min(sizes.lengths)
    steps.append(Step("", ("extend", {"n": longest})))
    for n in sorted(sizes.lengths, reverse=True):
        units = {"": Unit.RATE}
        if n == shortest:
            units["outside the graph"] = Unit.MS
        before = (("rewind", {"n": n}),)
        steps.append(Step(f"decode at {n}", ("decode", {"steps": sizes.steps}), units, before))
    return [Case("lengths", SINGLE, settings(longest + sizes.steps + 1), tuple(steps))]
