"""The verbs on a full table of cells, where nothing is computed; a tiny model fills it."""

from __future__ import annotations

from _case import LLAMA_CPP_POOL, OURS, Case, Sizes, Step, Unit, settings

VERBS = ("seq_cp", "seq_rm", "seq_add", "seq_pos_max")


def cases(sizes: Sizes) -> list[Case]:
    """One case; one id stays free to copy to."""
    n_seqs = sizes.cell_seqs
    each = sizes.cells // n_seqs
    return [
        Case(
            "verbs",
            (OURS, LLAMA_CPP_POOL),
            {**settings(sizes.cells, n_seqs), "n_seq_max": n_seqs + 1},
            (
                Step("", ("fill", {"n": each})),
                Step(
                    f"verbs, {sizes.cells} cells",
                    ("verbs", {"calls": sizes.calls}),
                    dict.fromkeys(VERBS, Unit.US),
                ),
            ),
            model="tiny",
        )
    ]
