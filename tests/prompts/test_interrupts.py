"""A cache of prompts is interrupted at each of its lines: it did what it should, or nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

import kvcellar.prompts
from kvcellar.prompts.cache import PromptCache
from kvcellar.runtime.context import Context
from kvcellar.runtime.sequence import Sequence
from kvcellar.stores.memory import MemoryStore
from kvcellar.testing.golden import nmse
from tests.prompts.helpers import BLOCK
from tests.runtime.archs import F32, SAME, fresh, opened, text
from tests.stores.interrupting import each_line

SOURCE = Path(kvcellar.prompts.__file__).parent
TOKENS = text(1, 60)
BEGUN = 20

Work = Callable[[PromptCache, Sequence], object]
WORKS: dict[str, tuple[list[int], Work]] = {
    "append": (
        [],
        lambda prompts, sequence: prompts.append(sequence, TOKENS, on_piece=lambda _: None),
    ),
    "append more": (
        TOKENS[:BEGUN],
        lambda prompts, sequence: prompts.append(sequence, TOKENS[BEGUN:]),
    ),
    "restore": ([], lambda prompts, sequence: prompts.restore(sequence, TOKENS)),
    "store": (TOKENS, lambda prompts, sequence: prompts.store(sequence)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unclosed file:ResourceWarning")  # closed when it is collected
@pytest.mark.parametrize(
    ("work", "arch"),
    [
        ("append", "jamba-dense"),
        ("append more", "llama-dense"),
        ("restore", "llama-dense"),
        ("store", "jamba-dense"),
    ],
)
def test_what_is_interrupted_can_be_done_again(shared: Path, arch: str, work: str) -> None:
    """By the same sequence; what is stored by then is whole, and starts with the text's start."""
    before, act = WORKS[work]
    with opened(shared, arch, **F32) as context:
        logits = fresh(context, TOKENS)
        state: list[tuple[PromptCache, Sequence]] = []
        stored = MemoryStore()
        with context.sequence() as first:
            PromptCache(stored, block_size=BLOCK).append(first, [*TOKENS[:40], 5])

        def prepare() -> Callable[[], object]:
            for _, sequence in state:
                sequence.close()
            prompts = PromptCache(_copy(stored), block_size=BLOCK)
            state[:] = [(prompts, context.sequence(before) if before else context.sequence())]
            return lambda: act(*state[0])

        for where in each_line(prepare, SOURCE):
            prompts, sequence = state[0]
            n_done = len(sequence)
            assert n_done in (len(before), 32 if work == "restore" else len(TOKENS)), where
            assert sequence.tokens == TOKENS[:n_done], where
            assert context.cache.used == n_done, where
            context.cache.check()
            _assert_stored(prompts, context, where)
            if n_done < len(TOKENS):
                prompts.append(sequence, TOKENS[n_done:])
            assert sequence.tokens == TOKENS, where
            assert nmse(sequence.logits, logits) < SAME, where
        gc.collect()


def _copy(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    for entry in list(store.entries()):
        copy.put(entry.key, [store.get(entry.key) or b""], entry.note)
    return copy


def _assert_stored(prompts: PromptCache, context: Context, where: str) -> None:
    """The blocks that were there are there, and what is restored is the text."""
    with context.sequence() as sequence:
        hit = prompts.restore(sequence, TOKENS)
        assert 32 <= hit.n_reused <= 48, where
        assert sequence.tokens == TOKENS[: hit.n_reused], where
