"""A new process each time: import, load, and from its start to the first token."""

from __future__ import annotations

from _case import LLAMA_CPP, OPENVINO, OURS, TRANSFORMERS, Case, Sizes, Step, Unit, settings

PROMPT = 16
ENGINES = (OURS, LLAMA_CPP, OPENVINO, TRANSFORMERS)  # too short for settings to matter


def cases(sizes: Sizes) -> list[Case]:
    """One case, of a size that is always the same."""
    del sizes
    parts = ("import", "load", "process start to first token")
    step = Step(
        "start-up", ("fill", {"n": PROMPT}), dict.fromkeys(parts, Unit.SECONDS), warm_up=True
    )
    return [Case("start-up", ENGINES, settings(512), (step,), fresh=True)]
