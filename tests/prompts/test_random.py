"""Whatever is appended, forked, trimmed and edited: a cache of prompts changes no logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.prompts.cache import PromptCache
from kvcellar.runtime.context import Context
from kvcellar.stores.memory import MemoryStore
from kvcellar.testing.golden import nmse
from tests.profiles import examples
from tests.prompts.helpers import n_computed
from tests.runtime.archs import F32, SAME, check_logits, opened

N_SEQ = 3
SIZE = 4
ALPHABET = 3  # texts have much in common

TEXTS = st.lists(st.integers(1, ALPHABET), min_size=1, max_size=14)
STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, N_SEQ - 1), TEXTS),
    st.tuples(st.just("anew"), st.integers(0, N_SEQ - 1), TEXTS),
    st.tuples(st.sampled_from(["fork", "trim", "remove", "shift", "store", "push"]),
              st.integers(0, N_SEQ - 1), TEXTS),
)  # fmt: skip
BUDGETS = st.sampled_from([None, 0, 9_000, 20_000])


@pytest.fixture(scope="module", params=["llama-dense", "gemma3-dense", "jamba-dense"])
def context(request: pytest.FixtureRequest, shared: Path) -> Iterator[Context]:
    with opened(shared, request.param, n_seq_max=N_SEQ, n_ubatch=8, **F32) as made:
        yield made


class Play:
    """Sequences over one cache of prompts, and what their texts have to be."""

    def __init__(self, context: Context, budget: int | None) -> None:
        self.context = context
        self.prompts = PromptCache(MemoryStore(budget), block_size=SIZE)
        self.sequences = [context.sequence() for _ in range(N_SEQ)]
        self.tokens: list[list[int]] = [[] for _ in range(N_SEQ)]

    def do(self, step: str, which: int, new: list[int]) -> None:
        sequence, tokens = self.sequences[which], self.tokens[which]
        start = len(new) % (len(tokens) + 1)
        if step == "anew":
            sequence.trim(len(sequence))
            self.tokens[which] = []
            self.append(which, new)
        elif step == "append":
            self.append(which, new)
        elif step == "fork":
            other = new[0] % N_SEQ
            if other != which:
                self.sequences[other].close()
                self.sequences[other] = sequence.fork()
                self.tokens[other] = list(tokens)
        elif step == "trim":
            sequence.trim(len(tokens) - start)
            del tokens[start:]
        elif step == "remove":
            sequence.remove(start, min(start + 2, len(tokens)))
            del tokens[start : start + 2]
        elif step == "shift":
            self.shift(which)
        elif step == "store" and tokens:
            n = self.prompts.store(sequence)
            assert n <= len(tokens) // SIZE
        elif step == "push":
            sequence.push(new[0])
            tokens.append(new[0])

    def shift(self, which: int) -> None:
        sequence, tokens = self.sequences[which], self.tokens[which]
        if self.context.cache.seq_count(sequence.seq_id) > 2:
            n = sequence.shift_context(1)
            del tokens[1 : 1 + n]

    def append(self, which: int, new: list[int]) -> None:
        """The logits are those of a fresh decode, unless K and V were moved within the cache."""
        sequence, tokens = self.sequences[which], self.tokens[which]
        before, n_held = n_computed(self.context), self.context.cache.seq_count(sequence.seq_id)
        hit = self.prompts.append(sequence, new)
        n_new = len(tokens) + len(new) - (n_held + hit.n_reused)
        assert n_computed(self.context) - before == n_new
        assert hit.n_reused % SIZE == 0
        assert hit.n_reused < hit.n_tokens == len(new)
        tokens += new
        if sequence.inexact_from is None:
            check_logits(self.context, sequence.logits, tokens)
        else:
            assert not self.context.cache.has_states

    def finish(self) -> None:
        """Texts are right, and what is stored of each is what a fresh decode gives."""
        self.context.cache.check()
        for sequence, tokens in zip(self.sequences, self.tokens, strict=True):
            assert sequence.tokens == tokens
            sequence.close()
        for tokens in self.tokens:
            with self.context.sequence() as sequence:
                self.prompts.append(sequence, [*tokens, 1])
                check_logits(self.context, sequence.logits, [*tokens, 1])
        assert self.context.cache.used == 0


@pytest.mark.slow
@examples(20)
@given(budget=BUDGETS, steps=st.lists(STEPS, min_size=1, max_size=12))
def test_a_cache_of_prompts_changes_no_logits(
    context: Context, budget: int | None, steps: list[tuple[str, int, list[int]]]
) -> None:
    for left in context.sequences:
        left.close()
    context.cache.clear()
    play = Play(context, budget)
    for step in steps:
        play.do(*step)
    play.finish()


def test_texts_over_so_small_an_alphabet_have_logits_that_differ(context: Context) -> None:
    """So a mix-up would be seen."""
    found = []
    for other in ([1, 2, 3, 1, 2], [1, 2, 3, 2, 2], [2, 2, 3, 1, 2], [1, 2, 3, 1]):
        with context.sequence(other) as sequence:
            found.append(np.array(sequence.logits))
    for i, one in enumerate(found):
        assert all(nmse(one, other) > 10 * SAME for other in found[:i])
