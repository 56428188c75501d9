"""What is done to a context that holds text: forking it, shifting it."""

from __future__ import annotations

from _case import BATCHED, LLAMA_CPP, LLAMA_CPP_PLAIN, OURS, Case, Sizes, Step, Unit, settings

KEEP = 4
SHIFTING = (OURS, LLAMA_CPP, LLAMA_CPP_PLAIN)


def cases(sizes: Sizes) -> list[Case]:
    """A case for forks, one for shifts."""
    return [_fork(sizes), _shift(sizes)]


def _fork(sizes: Sizes) -> Case:
    ways, n = sizes.n_seqs, sizes.each
    steps = (
        Step("", ("fill", {"n": n})),
        Step(
            f"fork {n} tokens {ways} ways, and a first token each",
            ("fork", {"ways": ways}),
            {"": Unit.MS, "the copies alone": Unit.US},
        ),
    )
    n_seq_max = ways + 1
    return Case("edits", BATCHED, settings((n + 8) * n_seq_max, 1, n_seq_max), steps)


def _shift(sizes: Sizes) -> Case:
    n, discard = sizes.shifted, sizes.discard
    steps = (
        Step("", ("fill", {"n": n})),
        Step(
            f"shift: discard {discard} of {n}, and the next token",
            ("shift", {"keep": KEEP, "discard": discard}),
            {"": Unit.MS},
            before=(("extend", {"n": n}),),
        ),
    )
    return Case("edits", SHIFTING, settings(n + 8), steps)
