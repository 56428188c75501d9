"""Several sequences in one batch, each with a text of its own or behind a shared prefix."""

from __future__ import annotations

from _case import BATCHED, Case, Sizes, Step, Unit, settings


def cases(sizes: Sizes) -> list[Case]:
    """A case without sharing and one with it."""
    n, each, own = sizes.n_seqs, sizes.each, sizes.own
    names = {
        f"{n} sequences of {each}": {"n": each},
        f"{n} sequences of {own} behind a shared {each}": {"n": each, "own": own},
    }
    return [
        Case("sequences", BATCHED, settings(_cells(sizes), n), tuple(_steps(name, fill, sizes)))
        for name, fill in names.items()
    ]


def _cells(sizes: Sizes) -> int:
    """Enough for all without sharing, so that the pools of an engine that cannot share do."""
    return sizes.n_seqs * (sizes.each + sizes.own + sizes.batched_steps)


def _steps(name: str, fill: dict[str, int], sizes: Sizes) -> list[Step]:
    length = sum(fill.values())
    return [
        Step(f"prefill, {name}", ("fill", fill), {"": Unit.SECONDS}, rounds="once", warm_up=False),
        Step(
            f"decode, {name}",
            ("decode", {"steps": sizes.batched_steps}),
            {"": Unit.RATE},
            before=(("rewind", {"n": length}),),
        ),
    ]
