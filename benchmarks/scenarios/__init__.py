"""The scenarios, a file a group; each makes its cases for sizes."""

from __future__ import annotations

from collections.abc import Callable

from _case import Case, Sizes

from scenarios import edits, kv_types, lengths, sequences, start_up, verbs

Maker = Callable[[Sizes], list[Case]]


def makers() -> dict[str, Maker]:
    """What makes the cases of each group, in the order of the report."""
    return {
        "lengths": lengths.cases,
        "sequences": sequences.cases,
        "edits": edits.cases,
        "verbs": verbs.cases,
        "kv-types": kv_types.cases,
        "start-up": start_up.cases,
    }
