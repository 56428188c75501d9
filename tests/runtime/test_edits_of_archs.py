"""After any edits and decodes, what a sequence knows equals a fresh decode of its tokens.

Over models with states, with windows that slide, and with both kinds of checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.batch import Batch
from kvcellar.runtime.context import Context
from kvcellar.types import Float32Array
from tests.profiles import examples
from tests.runtime.archs import F32, HYBRID, RECURRENT, WINDOWED, check_logits, opened, text

ARCHS = (*HYBRID, *RECURRENT, *WINDOWED)
N_SEQ = 3


@pytest.fixture(scope="module", params=ARCHS)
def context(request: pytest.FixtureRequest, shared: Path) -> Iterator[Context]:
    sizes = {"n_seq_max": N_SEQ, "n_ubatch": 8, "checkpoints": 4}
    with opened(shared, request.param, "ggml", **sizes, **F32) as made:
        yield made


WHICH = st.integers(0, N_SEQ - 1)
EDITS = st.one_of(
    st.tuples(st.sampled_from(["append", "rollback"]), WHICH, st.integers(1, 30)),
    st.tuples(st.sampled_from(["trim", "remove"]), WHICH, st.integers(1, 6) | st.integers(1, 30)),
    st.tuples(st.sampled_from(["fork", "step", "logits"]), WHICH, WHICH),
)


class Play:
    """Sequences of a context beside plain lists of tokens."""

    def __init__(self, context: Context, seed: int) -> None:
        self.context = context
        self.n_texts = seed
        self.tokens = [self.new(5 + 20 * i) for i in range(N_SEQ)]
        # In two batches, so that there is something to go back to.
        halves = [len(tokens) // 2 for tokens in self.tokens]
        self.sequences = [
            context.sequence(tokens[:half]).append(tokens[half:])
            for tokens, half in zip(self.tokens, halves, strict=True)
        ]
        self.exact = [sys.maxsize] * N_SEQ
        """How many tokens were computed with just those before them: moved rows were not."""

    def new(self, n: int) -> list[int]:
        self.n_texts += 1
        return text(self.n_texts, n)

    def do(self, edit: str, which: int, n: int) -> None:
        sequence, tokens = self.sequences[which], self.tokens[which]
        if edit == "append":
            added = self.new(n)
            sequence.append(added)
            tokens += added
        elif edit == "trim":
            n = min(n, len(tokens))
            sequence.trim(n)
            del tokens[len(tokens) - n :]
            self.note_what_waits(which)
        elif edit == "remove":
            self.remove(which, n)
        elif edit == "rollback":
            with self.context.cache.transaction() as t:
                sequence.append(self.new(n))
                sequence.trim(n // 2 + 1)
                other = self.sequences[(which + 1) % N_SEQ]
                other.trim(len(other) // 2)
                t.rollback()
        elif edit == "fork" and which != n:
            self.sequences[n].close()
            self.sequences[n], self.tokens[n] = sequence.fork(), list(tokens)
            self.exact[n] = self.exact[which]
        elif edit == "step":
            self.step()
        elif edit == "logits" and tokens:
            self.check(which, sequence.logits)

    def remove(self, which: int, n: int) -> None:
        sequence, tokens = self.sequences[which], self.tokens[which]
        n = min(n, len(tokens))
        start = len(tokens) - n if n % 3 == 0 else (len(tokens) - n) // 2
        sequence.remove(start, start + n)
        del tokens[start : start + n]
        if not self.note_what_waits(which) and start < len(tokens):
            assert not self.context.cache.has_states
            self.exact[which] = min(self.exact[which], start)

    def note_what_waits(self, which: int) -> int:
        """How many tokens will be computed again; then they are exact."""
        n_held = self.context.cache.seq_count(self.sequences[which].seq_id)
        if n_held <= self.exact[which]:
            self.exact[which] = sys.maxsize
        return len(self.tokens[which]) - n_held

    def step(self) -> None:
        """A token of each sequence in one batch, below the sequences, then one more of each."""
        batch = Batch()
        for sequence, tokens in zip(self.sequences, self.tokens, strict=True):
            if tokens:
                assert len(sequence.logits)  # what waits is computed
            batch.add(7, seq_ids=sequence.seq_id)
        self.context.decode(batch)
        for sequence, tokens in zip(self.sequences, self.tokens, strict=True):
            sequence.append([8])
            tokens += [7, 8]

    def check(self, which: int, logits: Float32Array) -> None:
        tokens = self.tokens[which]
        if len(tokens) <= self.exact[which]:
            check_logits(self.context, logits, tokens)

    def finish(self) -> None:
        self.context.cache.check()
        for which, sequence in enumerate(self.sequences):
            assert sequence.tokens == self.tokens[which]
            assert sequence.positions.tolist() == list(range(len(sequence)))
            sequence.append([5])
            self.tokens[which].append(5)
            self.check(which, sequence.logits)
            sequence.close()
        assert self.context.cache.used == 0


@pytest.mark.slow
@examples(15)
@given(seed=st.integers(0, 1000), edits=st.lists(EDITS, min_size=1, max_size=8))
def test_what_a_sequence_knows_is_a_fresh_decode(
    context: Context, seed: int, edits: list[tuple[str, int, int]]
) -> None:
    context.cache.clear()
    for left in context.sequences:
        left.close()
    play = Play(context, seed)
    for edit in edits:
        play.do(*edit)
    play.finish()
