"""A prompt that was computed once is restored, block by block, and goes on as it would have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.errors import BatchError, ClosedError, OptionError
from kvcellar.prompts.blocks import SPELLED
from kvcellar.prompts.cache import CacheHit, PromptCache
from kvcellar.prompts.misses import Miss
from kvcellar.runtime.context import Context
from kvcellar.stores.memory import MemoryStore
from kvcellar.testing.golden import nmse
from tests.prompts.helpers import BLOCK, append, keys, n_computed, n_reused, why
from tests.runtime.archs import ARCHS, F32, SAME, WINDOWED, fresh, opened, text

LONG = 70  # four blocks and six tokens


@pytest.fixture(scope="module")
def context(shared: Path) -> Iterator[Context]:
    """A context of a model that attends in every layer."""
    with opened(shared, "llama-dense", **F32) as made:
        yield made


@pytest.fixture(autouse=True)
def _emptied(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "context" in request.fixturenames:
        context: Context = request.getfixturevalue("context")
        for sequence in context.sequences:
            sequence.close()
        assert context.cache.used == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_a_restored_prompt_has_the_logits_of_the_run_that_stored_it(
    shared: Path, prompts: PromptCache, arch: str
) -> None:
    tokens = text(1, LONG)
    with (
        opened(shared, arch, n_seq_max=2) as one,
        one.model.context(n_ctx=512, n_seq_max=2, n_ubatch=16) as two,
    ):
        first, logits, sequence = append(prompts, one, tokens)
        assert (first.n_tokens, first.n_reused) == (LONG, 0)
        assert first.why == Miss("nothing stored", 0)
        again, restored, other = append(prompts, two, tokens)
        assert again == CacheHit(LONG, 64, Miss("no whole block", 64))
        np.testing.assert_array_equal(restored, logits)
        np.testing.assert_array_equal(sequence.append([3]).logits, other.append([3]).logits)
        assert other.tokens == [*tokens, 3]


@pytest.mark.parametrize("arch", WINDOWED)
def test_windows_that_slid_are_restored(shared: Path, prompts: PromptCache, arch: str) -> None:
    tokens = text(2, 300)
    with opened(shared, arch, n_ctx=1024, **F32) as context:
        _, logits, _ = append(prompts, context, tokens)
        hit, restored, sequence = append(prompts, context, tokens)
        assert hit.n_reused == 288
        assert nmse(restored, logits) < SAME
        assert nmse(sequence.append(text(3, 9)).logits, fresh(context, tokens + text(3, 9))) < SAME


@pytest.mark.parametrize("arch", ["llama-dense", "gemma3-dense", "jamba-dense", "mamba-dense"])
@pytest.mark.parametrize(
    ("n", "n_restored"), [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)]
)
def test_whole_blocks_are_reused_and_the_last_token_is_computed(
    shared: Path, prompts: PromptCache, arch: str, n: int, n_restored: int
) -> None:
    tokens = text(4, n)
    with opened(shared, arch, **F32) as context:
        append(prompts, context, tokens)
        hit, logits, _ = append(prompts, context, tokens)
        short = Miss("shorter than a block", 0, BLOCK)
        ended = short if n < BLOCK else Miss("no whole block", n_restored)
        assert hit == CacheHit(n, n_restored, ended)
        assert nmse(logits, fresh(context, tokens)) < SAME


@pytest.mark.parametrize("arch", ["llama-dense", "gemma3-dense", "falcon-h1-dense"])
def test_the_longest_beginning_in_common_is_restored(
    shared: Path, prompts: PromptCache, arch: str
) -> None:
    one, two = text(5, 50), text(5, 50)
    two[40] = (two[40] + 1) % 128
    with opened(shared, arch, **F32) as context:
        append(prompts, context, one)
        hit, logits, _ = append(prompts, context, two)
        assert hit == CacheHit(50, 32, Miss("diverged", 40))
        assert nmse(logits, fresh(context, two)) < SAME
        longer, logits, _ = append(prompts, context, two + one)
        assert longer.n_reused == 48
        assert nmse(logits, fresh(context, two + one)) < SAME


def test_what_is_shared_is_stored_once(
    context: Context, prompts: PromptCache, store: MemoryStore
) -> None:
    for seed in range(3):
        append(prompts, context, text(1, 32) + text(seed, 16))
    assert len(keys(store)) == 2 + 3


def test_blocks_behind_one_that_is_not_there_are_not_used(
    context: Context, prompts: PromptCache, store: MemoryStore
) -> None:
    tokens = text(6, 64)
    _, logits, _ = append(prompts, context, tokens)
    third = next(entry for entry in store.entries() if entry.note["start"] == 32)
    store.delete(third.key)
    hit, restored, _ = append(prompts, context, tokens)
    assert hit == CacheHit(64, 32, Miss("nothing stored", 32))
    assert nmse(restored, logits) < SAME
    assert n_reused(prompts, context, tokens) == 48


@pytest.mark.parametrize("arch", ["qwen3-dense", "gemma3-dense", "lfm2-dense"])
def test_a_text_that_grows_is_stored_as_it_grows(
    shared: Path, prompts: PromptCache, arch: str
) -> None:
    tokens = text(7, 75)
    with opened(shared, arch, **F32) as context:
        sequence = context.sequence()
        for start, stop in [(0, 7), (7, 20), (20, 21), (21, 60), (60, 75)]:
            hit = prompts.append(sequence, tokens[start:stop])
            assert (hit.n_tokens, hit.n_reused) == (stop - start, 0)
            assert (hit.why is None) == (start > 0)
        hit, logits, _ = append(prompts, context, tokens)
        assert hit.n_reused == 64
        assert nmse(logits, sequence.logits) < SAME


@pytest.mark.parametrize("arch", ["llama-dense", "gemma3-dense", "jamba-dense"])
def test_tokens_that_wait_are_part_of_the_text(
    shared: Path, prompts: PromptCache, arch: str
) -> None:
    tokens = text(8, 40)
    with opened(shared, arch, **F32) as context:
        sequence = context.sequence()
        prompts.append(sequence, tokens[:30])
        sequence.push(tokens[30])
        prompts.append(sequence, tokens[31:])
        assert sequence.tokens == tokens
        hit, logits, _ = append(prompts, context, tokens)
        assert hit.n_reused == 32
        assert nmse(logits, fresh(context, tokens)) < SAME


@pytest.mark.parametrize("arch", ["llama-dense", "deepseek2-moe"])
def test_storing_afterwards(shared: Path, prompts: PromptCache, arch: str) -> None:
    """Of a model that only attends, whatever is in the cache can be stored at any time."""
    tokens = text(9, 50)
    with opened(shared, arch, **F32) as context:
        sequence = context.sequence(tokens[:20])
        assert prompts.store(sequence) == 1
        for token in tokens[20:]:
            sequence.append([token])
        sequence.push(3)
        assert prompts.store(sequence) == 3
        assert prompts.store(sequence) == 3
        hit, logits, _ = append(prompts, context, tokens)
        assert hit.n_reused == 48
        assert nmse(logits, fresh(context, tokens)) < SAME


def test_scattered_cells_are_stored_and_restored(context: Context, prompts: PromptCache) -> None:
    tokens = text(10, 60)
    holes, sequence = context.sequence(), context.sequence()
    for i in range(0, 60, 5):
        holes.append([1])
        sequence.append(tokens[i : i + 5])
    holes.close()
    sequence.trim(10).append(tokens[50:])  # in cells that lie before the others
    assert prompts.store(sequence) == 3
    hit, logits, _ = append(prompts, context, tokens)
    assert hit.n_reused == 48
    assert nmse(logits, sequence.logits) < SAME


def test_restoring_touches_nobody_else(context: Context, prompts: PromptCache) -> None:
    append(prompts, context, text(11, 40))
    other = context.sequence(text(12, 21))
    fork = other.fork()
    append(prompts, context, text(11, 40))
    for sequence in (other, fork):
        logits = sequence.append([9]).logits
        assert nmse(logits, fresh(context, [*text(12, 21), 9])) < SAME


def test_restore_alone_leaves_the_rest_to_be_appended(
    context: Context, prompts: PromptCache
) -> None:
    tokens = text(13, 40)
    append(prompts, context, tokens)
    before, sequence = n_computed(context), context.sequence()
    hit = prompts.restore(sequence, tokens)
    assert (hit.n_reused, n_computed(context)) == (32, before)
    sequence.append(tokens[32:])
    assert nmse(sequence.logits, fresh(context, tokens)) < SAME
    with pytest.raises(OptionError, match=f"sequence {sequence.seq_id} is not empty"):
        prompts.restore(sequence, tokens)
    assert sequence.tokens == tokens


def test_logits_of_what_was_restored_can_be_had(context: Context, prompts: PromptCache) -> None:
    """The last restored token is then computed once more."""
    tokens = text(14, 40)
    append(prompts, context, tokens)
    sequence = context.sequence()
    prompts.restore(sequence, tokens)
    before = n_computed(context)
    assert nmse(sequence.logits, fresh(context, tokens[:32])) < SAME
    assert n_computed(context) == before + 1


@pytest.mark.slow
def test_text_is_tokenised_as_a_sequence_does(smollm2_path: Path, prompts: PromptCache) -> None:
    from kvcellar.runtime.model import Model

    prompt = "Once upon a time there was a cellar in which nothing was ever computed twice."
    with Model.from_gguf(smollm2_path, n_threads=1) as model, model.context(n_ctx=64) as context:
        tokens = model.tokenizer.encode(prompt, add_special=True)
        append(prompts, context, prompt)
        assert n_reused(prompts, context, tokens) == (len(tokens) - 1) // BLOCK * BLOCK


def test_what_cannot_be_a_prompt_is_refused(
    context: Context, prompts: PromptCache, store: MemoryStore
) -> None:
    sequence = context.sequence()
    for bad, named in [([], "empty"), ([1] * 20 + [128], "128"), ([-1], "-1"), ([2**40], "1099")]:
        with pytest.raises(BatchError, match=named):
            prompts.append(sequence, bad)
        assert len(sequence) == 0
    for bad in ([2**40], [-(2**40)]):
        with pytest.raises(BatchError):
            prompts.restore(sequence, bad)
    assert prompts.restore(sequence, []) == CacheHit(0, 0, Miss("shorter than a block", 0, BLOCK))
    assert keys(store) == []
    sequence.close()
    for verb in (prompts.append, prompts.restore):
        with pytest.raises(ClosedError):
            verb(sequence, [1, 2])


@pytest.mark.parametrize("size", [0, -1, 4097, 1.5, True])
def test_block_sizes_that_cannot_be_are_refused(store: MemoryStore, size: int) -> None:
    with pytest.raises(OptionError, match="block_size"):
        PromptCache(store, block_size=size)


def test_the_largest_block_fits_into_a_note(store: MemoryStore) -> None:
    """Whatever ids its tokens have."""
    from kvcellar.prompts.misses import BlockRef, note_of

    tokens = [2**31 - 1] * PromptCache(store, block_size=4096).block_size
    note = note_of(BlockRef("0" * 64, "0" * 64, 2**31, tokens, "0" * 64, "0" * 16), "😀" * SPELLED)
    assert store.put("a", [b"1"], note)


@pytest.mark.parametrize("size", [1, 5, 64])
def test_blocks_of_other_sizes(context: Context, store: MemoryStore, size: int) -> None:
    prompts, tokens = PromptCache(store, block_size=size), text(15, 33)
    append(prompts, context, tokens)
    hit, logits, _ = append(prompts, context, tokens)
    assert hit.n_reused == 32 // size * size
    assert nmse(logits, fresh(context, tokens)) < SAME
    assert why(PromptCache(store, block_size=7), context, tokens) == ("nothing stored", 0)


def test_it_says_what_it_did(context: Context, prompts: PromptCache) -> None:
    hit, _, sequence = append(prompts, context, text(16, 20))
    assert str(hit) == "0 of 20 tokens reused: nothing is stored from token 0 on"
    assert str(prompts.append(sequence, [1, 2])) == "0 of 2 tokens reused"
