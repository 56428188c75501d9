"""Sequences that are computed together get the logits that each gets alone (invariant 8).

Several reports are about exactly this: #29002 (LFM2's convolution), #28019 (states after a
rollback), ik_llama.cpp#2260 (the graph kept another sequence's state), #16278 (unequal lengths).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcellar.batch import Batch
from kvcellar.runtime.context import Context
from kvcellar.testing.golden import nmse
from kvcellar.types import Float32Array
from tests.runtime.archs import ARCHS, F32, HYBRID, RECURRENT, SAME, check_logits, opened, text

LENGTHS = (45, 3, 20)  # the first is longer than the windows
TEXTS = [text(seed, n + 4) for seed, n in enumerate(LENGTHS)]


def alone(context: Context, tokens: list[int], n: int) -> list[Float32Array]:
    """Logits after the first n tokens of a text, and after each that follows."""
    rows = [context.decode(Batch.of(tokens[:n]))[-1]]
    rows += [context.decode(Batch.of([token]))[-1] for token in tokens[n:]]
    context.cache.seq_rm(0)
    return rows


def together(context: Context) -> list[list[Float32Array]]:
    """The same for all texts at once: prompts token by token in turn, then a token of each."""
    prompts = Batch()
    for i in range(max(LENGTHS)):
        for seq, n in enumerate(LENGTHS):
            if i < n:
                prompts.add(TEXTS[seq][i], seq_ids=seq, logits=i == n - 1)
    order = sorted(range(3), key=lambda seq: (LENGTHS[seq], seq))  # by where their logits stand
    rows = dict(zip(order, ([row] for row in context.decode(prompts)), strict=True))
    for i in range(4):
        step = Batch()
        for seq, n in enumerate(LENGTHS):
            step.add(TEXTS[seq][n + i], seq_ids=seq, logits=True)
        for seq, row in enumerate(context.decode(step)):
            rows[seq].append(row)
    return [rows[seq] for seq in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ggml", "numpy"])
@pytest.mark.parametrize("arch", ARCHS)
def test_logits_are_those_of_each_alone(shared: Path, arch: str, backend: str) -> None:
    with opened(shared, arch, backend, **F32) as context:
        wanted = [alone(context, tokens, n) for tokens, n in zip(TEXTS, LENGTHS, strict=True)]
        context.cache.clear()
        for seq, rows in enumerate(together(context)):
            for i, (got, row) in enumerate(zip(rows, wanted[seq], strict=True)):
                assert nmse(got, row) < SAME, (seq, i)
        context.cache.check()


@pytest.mark.parametrize("arch", [*HYBRID, *RECURRENT])
def test_sequences_take_turns_token_by_token(shared: Path, arch: str) -> None:
    a, b = text(7, 12), text(8, 12)
    with opened(shared, arch, **F32) as context:
        for i in range(12):
            context.decode(Batch.of([a[i]], 0))
            context.decode(Batch.of([b[i]], 1))
        check_logits(context, context.decode(Batch.of([5], 1))[-1], [*b, 5])
        check_logits(context, context.decode(Batch.of([6], 0))[-1], [*a, 6])


@pytest.mark.report("ik_llama.cpp#1696")
@pytest.mark.parametrize("arch", [*HYBRID, *RECURRENT])
def test_a_new_text_starts_from_zeros(shared: Path, arch: str) -> None:
    """ik_llama.cpp#1696: the next request inherited the state of one that was removed."""
    with opened(shared, arch, n_seq_max=1, **F32) as context:
        context.decode(Batch.of(text(1, 20)))
        assert context.cache.seq_rm(0, 0, -1)
        check_logits(context, context.decode(Batch.of(text(2, 9)))[-1], text(2, 9))
        context.cache.clear(data=False)
        check_logits(context, context.decode(Batch.of(text(3, 9)))[-1], text(3, 9))


@pytest.mark.parametrize("arch", ARCHS)
def test_forks_go_their_own_ways(shared: Path, arch: str) -> None:
    with opened(shared, arch, **F32) as context:
        parent = context.sequence(text(1, 40))
        children = [parent.fork() for _ in range(3)]
        batch = Batch()
        for i, child in enumerate(children):
            batch.add(10 + i, seq_ids=child.seq_id, logits=True)
        for i, row in enumerate(context.decode(batch)):
            check_logits(context, row, [*text(1, 40), 10 + i])
        parent.append([9])
        check_logits(context, parent.logits, [*text(1, 40), 9])
