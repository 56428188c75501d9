"""Why a prompt could not be reused further: every cause, met as a user would meet it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcellar.prompts.cache import PromptCache
from kvcellar.prompts.misses import Miss
from kvcellar.runtime.context import Context
from kvcellar.stores.base import Absence as Gone
from kvcellar.stores.base import BytesLike, Note
from kvcellar.stores.disk import DiskStore
from kvcellar.stores.memory import MemoryStore
from kvcellar.testing.golden import nmse
from tests.prompts.helpers import BLOCK, append, keys, n_reused, why
from tests.runtime.archs import F32, SAME, WINDOWED, fresh, opened, text

TOKENS = text(1, 70)
N_BLOCKS = len(TOKENS) // BLOCK


@pytest.fixture
def context(shared: Path) -> Iterator[Context]:
    with opened(shared, "llama-dense", n_ctx=1024, n_seq_max=12, **F32) as made:
        yield made


def block_bytes(context: Context) -> int:
    """What the largest block takes."""
    store = MemoryStore()
    append(PromptCache(store, block_size=BLOCK), context, TOKENS)
    return max(entry.n_bytes for entry in store.entries())


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 31, 40, 63])
def test_diverged_at_the_first_token_that_differs(
    context: Context, prompts: PromptCache, n: int
) -> None:
    append(prompts, context, TOKENS)
    other = [*TOKENS[:n], (TOKENS[n] + 1) % 128, *TOKENS[n + 1 :]]
    assert why(prompts, context, other) == ("diverged", n)
    assert n_reused(prompts, context, other) == n // BLOCK * BLOCK


def test_of_several_texts_the_one_that_agrees_longest_counts(
    context: Context, prompts: PromptCache
) -> None:
    for n in (5, 12, 3):
        append(prompts, context, [*TOKENS[:n], *text(n, 30)])
    assert why(prompts, context, TOKENS) == ("diverged", 12)


def test_an_end_that_is_no_block_is_not_stored(context: Context, prompts: PromptCache) -> None:
    append(prompts, context, TOKENS[:40])
    assert why(prompts, context, TOKENS[:40]) == ("no whole block", 32)
    assert why(prompts, context, TOKENS) == ("nothing stored", 32)


def test_ends_of_texts_are_evicted_first(context: Context) -> None:
    size = block_bytes(context)
    store = MemoryStore(3 * size)
    prompts = PromptCache(store, block_size=BLOCK)
    _, logits, _ = append(prompts, context, TOKENS)
    assert why(prompts, context, TOKENS) == ("over budget", 48)
    hit, again, _ = append(prompts, context, TOKENS)
    assert hit == (type(hit))(70, 48, Miss("over budget", 48))
    assert nmse(again, logits) < SAME
    assert store.bytes_used <= 3 * size
    append(prompts, context, text(2, 20))
    assert why(prompts, context, TOKENS) == ("evicted", 32)


class CountingStore(MemoryStore):
    """Counts puts, and touches in steps."""

    n_puts, n_touches = 0, 0

    def put(self, key: str, value: Sequence[BytesLike], note: Note | None = None) -> bool:
        self.n_puts += 1
        return super().put(key, value, note)

    def touch_all(self, keys: Sequence[str]) -> set[str]:
        self.n_touches += 1
        return super().touch_all(keys)


@pytest.mark.parametrize("n_fitting", [1, 2, 3])
def test_a_text_larger_than_the_budget_is_written_once(context: Context, n_fitting: int) -> None:
    """The beginning that fits; each append touches it, and writes nothing."""
    size = block_bytes(context)
    store = CountingStore(n_fitting * size + size // 2)
    prompts = PromptCache(store, block_size=BLOCK)
    for attempt in range(4):
        hit, _, sequence = append(prompts, context, TOKENS)
        assert hit.n_reused == (n_fitting * BLOCK if attempt else 0)
        assert (store.n_puts, len(keys(store))) == (n_fitting, n_fitting)
        sequence.close()
    assert why(prompts, context, TOKENS) == ("over budget", n_fitting * BLOCK)
    assert "the text exceeds the store's budget" in str(Miss("over budget", 0))
    append(prompts, context, text(3, 20))
    append(prompts, context, TOKENS)
    assert n_reused(prompts, context, TOKENS) == n_fitting * BLOCK


def test_blocks_are_touched_in_two_steps_at_most(context: Context) -> None:
    """However many there are; their order is that of the text, the beginning used last."""
    store = CountingStore()
    prompts = PromptCache(store, block_size=BLOCK)
    append(prompts, context, TOKENS)
    longer = TOKENS[:64] + text(2, 100)
    store.n_touches = 0
    sequence = append(prompts, context, longer)[2]
    assert store.n_touches == 2
    starts = [entry.note["start"] for entry in store.entries()]
    assert starts == [BLOCK * i for i in reversed(range(10))]
    prompts.store(sequence)
    assert store.n_touches == 3
    assert [entry.note["start"] for entry in store.entries()] == starts


def test_a_text_in_use_keeps_its_beginning(context: Context) -> None:
    """Reading, storing and finding count from the end on, so that all that is left can be used."""
    prompts = PromptCache(MemoryStore(6 * block_bytes(context)), block_size=BLOCK)
    rng = random.Random(3)
    sequence = context.sequence()
    for i in range(40):
        if i % 8 == 0:
            sequence.close()
            sequence = context.sequence()
        prompts.append(sequence, text(rng.randrange(3), 16 * rng.randrange(1, 4)))
        held = {entry.key: str(entry.note["parent"]) for entry in prompts._store.entries()}
        starts = {entry.key: entry.note["start"] for entry in prompts._store.entries()}
        assert all(starts[key] == 0 or parent in held for key, parent in held.items()), i


def test_a_store_too_small_for_any_block(context: Context) -> None:
    prompts = PromptCache(MemoryStore(100), block_size=BLOCK)
    append(prompts, context, TOKENS)
    hit, logits, sequence = append(prompts, context, TOKENS)
    assert hit.why == Miss("nothing stored", 0)
    assert nmse(logits, fresh(context, TOKENS)) < SAME
    assert prompts.store(sequence) == 0


class ExpiringStore(MemoryStore):
    """Says of all that is not there that its time was over."""

    def why_absent(self, key: str) -> Gone:  # noqa: ARG002
        return "expired"


def test_expired(context: Context) -> None:
    store = ExpiringStore()
    prompts = PromptCache(store, block_size=BLOCK)
    append(prompts, context, TOKENS)
    last = next(entry for entry in store.entries() if entry.note["start"] == 48)
    store.delete(last.key)
    assert why(prompts, context, TOKENS) == ("expired", 48)


@pytest.mark.parametrize("other", ["llama-moe", "qwen2-dense", "mamba-dense"])
def test_other_model(shared: Path, context: Context, prompts: PromptCache, other: str) -> None:
    with opened(shared, other, **F32) as another:
        append(prompts, another, TOKENS)
    assert why(prompts, context, TOKENS) == ("other model", 0)
    append(prompts, context, text(5, 30))  # something else of the same model is there as well
    assert why(prompts, context, TOKENS) == ("other model", 0)
    assert why(prompts, context, text(6, 30)) == ("diverged", 0)


@pytest.mark.parametrize("types", [{"type_k": "f16"}, {"type_v": "q8_0"}])
def test_other_types(context: Context, prompts: PromptCache, types: dict[str, Any]) -> None:
    with context.model.context(n_ctx=256, **{**F32, **types}) as another:
        append(prompts, another, TOKENS)
    assert why(prompts, context, TOKENS) == ("other types", 0)


def test_other_types_count_before_other_models(
    shared: Path, context: Context, prompts: PromptCache
) -> None:
    with opened(shared, "llama-moe") as another, context.model.context(n_ctx=256) as f16:
        for one in (f16, another):
            append(prompts, one, TOKENS)
    assert why(prompts, context, TOKENS) == ("other types", 0)


@pytest.mark.slow
@pytest.mark.parametrize("arch", WINDOWED)
@pytest.mark.parametrize("full_first", [True, False])
def test_windows_kept_in_full_share_blocks_no_longer_than_a_window(
    shared: Path, arch: str, full_first: bool
) -> None:
    """Of longer ones a window that slides has not all rows, and is another shape of cache."""
    tokens = text(4, 300)
    sizes: dict[str, Any] = {"n_ctx": 768, "n_seq_max": 4, "n_ubatch": 16, **F32}
    with (
        opened(shared, arch, swa_full=True, **sizes) as full,
        full.model.context(**sizes) as sliding,
    ):
        one, two = (full, sliding) if full_first else (sliding, full)
        for size in (16, 32):
            prompts = PromptCache(MemoryStore(), block_size=size)
            append(prompts, one, tokens)[2].close()
            hit, logits, sequence = append(prompts, two, tokens)
            assert hit.n_reused == 288
            assert nmse(logits, fresh(full, tokens)) < SAME
            sequence.trim(150).append([5])  # all that is kept can be gone back to
            assert nmse(sequence.logits, fresh(full, [*tokens[:150], 5])) < SAME
            sequence.close()
        prompts = PromptCache(MemoryStore(), block_size=33)
        append(prompts, one, tokens)
        assert why(prompts, two, tokens) == ("other types", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "cause"),
    [
        ("gemma3-dense", "window slid"),
        ("gpt-oss-moe", "window slid"),
        ("jamba-dense", "no checkpoint"),
        ("mamba2-dense", "no checkpoint"),
    ],
)
def test_what_is_not_kept_cannot_be_stored_afterwards(
    shared: Path, prompts: PromptCache, store: MemoryStore, arch: str, cause: str
) -> None:
    """It is said why, until somebody computes the text with the cache of prompts."""
    tokens = text(3, 300)
    with opened(shared, arch, n_ctx=1024, checkpoints=0, **F32) as context:
        sequence = context.sequence(tokens)
        logits = sequence.append([7]).logits
        assert prompts.store(sequence) == 0
        assert (sequence.tokens, keys(store)) == ([*tokens, 7], [])
        assert nmse(sequence.logits, logits) == 0
        assert why(prompts, context, tokens) == (cause, 0)
        hit, _, _ = append(prompts, context, tokens)
        assert hit.why is not None
        assert (hit.why.cause, hit.n_reused) == (cause, 0)
        assert prompts.store(sequence) == 300 // BLOCK
        assert why(prompts, context, tokens) == ("no whole block", 288)


@pytest.mark.parametrize("arch", ["gemma3-dense", "jamba-dense"])
def test_where_checkpoints_are_it_can_be_stored_afterwards(
    shared: Path, prompts: PromptCache, arch: str
) -> None:
    with opened(shared, arch, **F32) as context:
        sequence = context.sequence()
        for start in range(0, 64, BLOCK):
            sequence.append(TOKENS[start : start + BLOCK])
        sequence.append(TOKENS[64:])
        n = prompts.store(sequence)
        assert n == N_BLOCKS
        assert n_reused(prompts, context, TOKENS) == 64


DAMAGE = random.Random(11)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama-dense", "gemma3-dense", "mamba-dense"])
def test_damaged_blocks_are_dropped_computed_and_stored_again(shared: Path, arch: str) -> None:
    with opened(shared, arch, **F32) as context:
        store = MemoryStore()
        prompts = PromptCache(store, block_size=BLOCK)
        _, logits, _ = append(prompts, context, TOKENS)
        by_start = {entry.note["start"]: entry.key for entry in store.entries()}
        for _ in range(12):
            start = BLOCK * DAMAGE.randrange(N_BLOCKS)
            key = by_start[start]
            spoil(store, key)
            assert why(prompts, context, TOKENS) == ("damaged", start)
            assert not store.has(key)
            hit, again, sequence = append(prompts, context, TOKENS)
            assert hit.n_reused == start
            assert nmse(again, logits) < SAME
            assert n_reused(prompts, context, TOKENS) == 64
            sequence.close()


def test_a_block_of_another_text_is_not_believed(
    context: Context, prompts: PromptCache, store: MemoryStore
) -> None:
    """Sound by itself, and at the right place, but under the wrong key."""
    for tokens in (TOKENS, text(7, 70)):
        append(prompts, context, tokens)
    second, other = (key for key in keys(store) if store._held[key][1].note["start"] == 16)
    store._held[second] = store._held[other]
    causes = [why(prompts, context, tokens) for tokens in (TOKENS, text(7, 70))]
    assert sorted(causes) == [("damaged", 16), ("no whole block", 64)]


def spoil(store: MemoryStore, key: str) -> None:
    """Flip a bit, cut, empty, or exchange a value for that of another block."""
    value, entry = store._held[key]
    other = next(held for name, (held, _) in store._held.items() if name != key)
    at = DAMAGE.randrange(len(value))
    flipped = bytearray(value)
    flipped[at] ^= 1 << DAMAGE.randrange(8)
    choice = DAMAGE.choice([bytes(flipped), bytes(flipped), value[:at], b"", other])
    store._held[key] = choice, entry


def test_damaged_files_are_computed_again(context: Context, tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store", fsync=False)
    prompts = PromptCache(store, block_size=BLOCK)
    append(prompts, context, TOKENS)
    for file in sorted((tmp_path / "store" / "values").rglob("*")):
        if file.is_file():
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 4
            file.write_bytes(data)
            break
    cause, start = why(prompts, context, TOKENS)
    assert cause == "damaged"
    hit, logits, _ = append(prompts, context, TOKENS)
    assert hit.n_reused == start
    assert nmse(logits, fresh(context, TOKENS)) < SAME
    assert n_reused(prompts, context, TOKENS) == 64
    store.close()


def test_a_store_that_cannot_be_written_may_be_read(context: Context, tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store", fsync=False)
    append(PromptCache(store, block_size=BLOCK), context, TOKENS)
    store.close()
    store = DiskStore(tmp_path / "store", read_only=True)
    prompts = PromptCache(store, block_size=BLOCK)
    assert n_reused(prompts, context, TOKENS) == 64
    hit, logits, _ = append(prompts, context, TOKENS)  # nothing has to be stored
    assert hit.n_reused == 64
    assert nmse(logits, fresh(context, TOKENS)) < SAME
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama-dense", "gemma3-dense", "jamba-dense"])
def test_another_salt_finds_nothing_and_hears_of_nothing(shared: Path, arch: str) -> None:
    """Neither that a text is there, nor where it goes on otherwise, was evicted, or is marked."""
    with opened(shared, arch, n_ctx=1024, n_seq_max=8, checkpoints=0, **F32) as context:
        size = block_bytes(context)
        for store in (MemoryStore(), MemoryStore(2 * size)):
            mine, yours = (PromptCache(store, block_size=BLOCK, cache_salt=s) for s in ("a", ""))
            append(mine, context, TOKENS)
            mine.store(context.sequence(text(3, 300)))
            with context.model.context(n_ctx=256) as f16:
                append(mine, f16, TOKENS)
            other = [*TOKENS[:20], *text(9, 20)]
            for asked in (TOKENS, other, text(3, 300)):
                assert why(yours, context, asked) == ("nothing stored", 0)
            append(yours, context, TOKENS[:40])
            assert n_reused(mine, context, TOKENS[:40]) == (32 if store.max_bytes is None else 0)
            for sequence in context.sequences:
                sequence.close()


@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK])
def test_a_text_that_fills_no_block_is_told_from_an_end_that_fills_none(
    context: Context, prompts: PromptCache, n: int
) -> None:
    for _ in range(2):
        hit, _, sequence = append(prompts, context, TOKENS[:n])
        sequence.close()
        if n < BLOCK:
            assert hit.why == Miss("shorter than a block", 0, BLOCK)
            told = f"0 of {n} tokens reused: the text is shorter than one block of {BLOCK} tokens"
            assert str(hit) == told
        else:
            assert hit.why == Miss("no whole block", 0)
