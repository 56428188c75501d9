"""Saving and restoring: faults that were reported of others and must not occur here.

The rows of section B7 of the reference data's ``reports.md`` that can be written as operations of
sequences, contexts and a cache of prompts. Left for a server, because there are no slots yet:
which slot a request gets (#28139, #22083), and that a slot is cleared when its user leaves
(ATLAS#87, of which the salts are tested here). Left until they exist: positions with several
components (#20273), and reuse of chunks behind a removal (#12160), of which the expected edits are
tested here by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.errors import CacheFull, SnapshotFileError
from kvcellar.prompts.cache import PromptCache
from kvcellar.prompts.misses import Miss
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.stores.disk import DiskStore
from kvcellar.stores.memory import MemoryStore
from kvcellar.testing.golden import nmse
from kvcellar.testing.uncached import uncached_logits
from tests.prompts.helpers import BLOCK, SIZES, FailingStore, append, failing, n_reused
from tests.runtime.archs import F32, HYBRID, PLAIN, RECURRENT, SAME, WINDOWED, fresh, opened, text

KINDS = [PLAIN[2], WINDOWED[1], HYBRID[1], RECURRENT[1]]
TOKENS = text(1, 70)


@pytest.fixture(params=KINDS)
def context(request: pytest.FixtureRequest, shared: Path) -> Iterator[Context]:
    with opened(shared, request.param, **F32) as made:
        yield made


@pytest.mark.report("llama.cpp#9173", "llama.cpp#14434")
def test_an_empty_sequence_is_saved_and_loaded(context: Context, tmp_path: Path) -> None:
    """#9173, #14434: zero cells are valid, and what is loaded can be used."""
    other = context.sequence(TOKENS)
    context.sequence().save(tmp_path / "empty")
    loaded = context.load(tmp_path / "empty")
    assert (len(loaded), context.cache.seq_count(loaded.seq_id)) == (0, 0)
    loaded.append(TOKENS)
    assert nmse(loaded.logits, fresh(context, TOKENS)) < SAME
    assert other.tokens == TOKENS


def test_nothing_at_all_is_saved_and_loaded(context: Context, tmp_path: Path) -> None:
    """The same for a context without any sequence."""
    context.save(tmp_path / "none")
    assert context.load_all(tmp_path / "none") == ()
    assert (context.sequences, context.cache.used) == ((), 0)


@pytest.mark.report("llama.cpp#9173")
@pytest.mark.parametrize("content", [None, b"", b"ggsq nonsense", b"\x08" + b"\0" * 7 + b"{}"])
def test_a_missing_or_broken_file_leaves_the_target_as_it_was(
    context: Context, tmp_path: Path, content: bytes | None
) -> None:
    """#9173: it did clear the slot."""
    path, sequence, empty = tmp_path / "file", context.sequence(TOKENS), context.sequence()
    if content is not None:
        path.write_bytes(content)
    for load in (sequence.load, empty.load, context.load, context.load_all):
        with pytest.raises(SnapshotFileError, match="file"):
            load(path)
    assert (sequence.tokens, len(empty), len(context.sequences)) == (TOKENS, 0, 2)
    assert nmse(sequence.append([3]).logits, fresh(context, [*TOKENS, 3])) < SAME


@pytest.mark.slow
@pytest.mark.report("llama.cpp#26777", "llama.cpp#25521")
@pytest.mark.parametrize("arch", ["deepseek2-moe", "llama-dense", "jamba-dense"])
def test_restoring_one_sequence_touches_no_other(shared: Path, tmp_path: Path, arch: str) -> None:
    """#26777, #25521: it cleared the compressed K of all."""
    prompts = PromptCache(MemoryStore(), block_size=BLOCK)
    with opened(shared, arch, **F32) as context:
        alive = context.sequence(text(2, 50))
        twin = alive.fork()
        context.sequence(TOKENS).save(tmp_path / "one")
        context.sequences[-1].close()
        append(prompts, context, TOKENS)[2].close()
        one = context.load(tmp_path / "one")
        two = context.sequence()
        for sequence in (one, two):
            if sequence is two:
                prompts.append(sequence, TOKENS)
            for other in (alive, twin):
                expected = fresh(context, [*other.tokens, 5])
                assert nmse(other.append([5]).logits, expected) < SAME
            assert nmse(sequence.logits, fresh(context, TOKENS)) < SAME
            sequence.close()


@pytest.mark.report("llama.cpp#26676", "llama.cpp#28194", "llama.cpp#26004", "ik_llama.cpp#2284")
@pytest.mark.parametrize("arch", [*KINDS, "deepseek2-moe", "gpt-oss-moe"])
def test_after_a_restart_all_that_was_saved_is_reused(
    shared: Path, tmp_path: Path, arch: str
) -> None:
    """#26676, #28194, #26004, ik_llama.cpp#2284: it said so, and computed everything again."""
    saved = []
    for _ in range(2):
        store = DiskStore(tmp_path / "store", fsync=False)
        prompts = PromptCache(store, block_size=BLOCK)
        with opened(shared, arch, **F32) as context:
            hit, logits, sequence = append(prompts, context, TOKENS)
            saved.append((prompts.store(sequence) * BLOCK, hit.n_reused, logits))
        store.close()
    assert [n for _, n, _ in saved] == [0, saved[0][0]] == [0, 64]
    np.testing.assert_array_equal(saved[0][2], saved[1][2])


@pytest.mark.parametrize("arch", KINDS)
def test_a_loaded_file_is_not_computed_again(shared: Path, tmp_path: Path, arch: str) -> None:
    """The same for files: what they hold goes on with the next token alone."""
    with opened(shared, arch) as context:
        sequence = context.sequence(TOKENS)
        sequence.save(tmp_path / "file")
        logits = sequence.append([3]).logits
    with opened(shared, arch) as context:
        loaded = context.load(tmp_path / "file")
        np.testing.assert_array_equal(loaded.append([3]).logits, logits)
        assert (context.timings.prefill_tokens, context.timings.decode_tokens) == (0, 1)


@pytest.mark.report("koboldcpp#2282")
def test_two_models_save_both_into_one_store(shared: Path, tmp_path: Path) -> None:
    """koboldcpp#2282: with a draft model beside the target, one lost its context."""
    for n_expected in (0, 64):
        store = DiskStore(tmp_path, fsync=False)
        prompts = PromptCache(store, block_size=BLOCK)
        with (
            opened(shared, "llama-dense", **F32) as target,
            opened(shared, "qwen2-dense", **F32) as draft,
        ):
            for context in (draft, target):
                hit, logits, _ = append(prompts, context, TOKENS)
                assert hit.n_reused == n_expected
                assert nmse(logits, fresh(context, TOKENS)) < SAME
        store.close()


@pytest.mark.report("ik_llama.cpp#2212")
def test_without_v_it_does_not_matter_how_v_lies(shared: Path, tmp_path: Path) -> None:
    """ik_llama.cpp#2212: a flag was compared that meant nothing."""
    prompts = PromptCache(MemoryStore(), block_size=BLOCK)
    with (
        opened(shared, "deepseek2-moe", flash_attn=True, **F32) as one,
        one.model.context(**SIZES, flash_attn=False) as two,
    ):
        sequence = one.sequence(TOKENS)
        sequence.save(tmp_path / "file")
        assert nmse(two.load(tmp_path / "file").logits, sequence.logits) < SAME
        append(prompts, one, TOKENS)
        hit, logits, _ = append(prompts, two, TOKENS)
        assert hit.n_reused == 64
        assert nmse(logits, sequence.logits) < SAME


@pytest.mark.report("llama.cpp#4005")
def test_loading_an_empty_state_resets(context: Context, tmp_path: Path) -> None:
    """#4005: what had been put in between was still there."""
    sequence = context.sequence()
    sequence.save(tmp_path / "fresh")
    sequence.append(TOKENS)
    sequence.trim(len(sequence)).load(tmp_path / "fresh")
    assert (len(sequence), context.cache.used) == (0, 0)
    sequence.append(text(2, 30))
    assert nmse(sequence.logits, fresh(context, text(2, 30))) < SAME


@pytest.mark.report("llama.cpp#27148")
def test_restored_not_found_and_failed_are_told_apart(context: Context) -> None:
    """#27148: "no match" counted as success, and another user's text was answered."""
    store = FailingStore()
    prompts = PromptCache(store, block_size=BLOCK)
    append(prompts, context, TOKENS)[2].close()
    sequence = context.sequence()
    for asked, n in ((text(2, 70), 0), (TOKENS, 64)):
        hit = prompts.restore(sequence, asked)
        assert (hit.n_reused, sequence.tokens) == (n, asked[:n])
        assert hit.why is not None
        assert hit.why == (Miss("diverged", 0) if n == 0 else Miss("no whole block", 64))
        sequence.trim(len(sequence))
    with failing(store, "get"):
        hit = prompts.restore(sequence, TOKENS)
    assert (hit.n_reused, hit.why) == (0, Miss("store failed", 0))
    assert prompts.trouble is not None
    assert (len(sequence), context.cache.used) == (0, 0)


@pytest.mark.report("llama.cpp#27148")
def test_a_sequence_that_is_used_again_keeps_nothing(context: Context) -> None:
    """#27148: as a slot that somebody else gets."""
    prompts = PromptCache(MemoryStore(), block_size=BLOCK)
    for seed in (3, 4, 3, 5, 4):
        sequence = context.sequence()
        assert sequence.seq_id == 0
        prompts.append(sequence, text(seed, 40))
        assert nmse(sequence.logits, fresh(context, text(seed, 40))) < SAME
        sequence.close()


@pytest.mark.report("llama.cpp#22083")
def test_prompts_that_take_turns_in_one_sequence_are_each_computed_once(context: Context) -> None:
    """#22083: a header in common sent them all to one slot, where each drove out the last."""
    prompts, header = PromptCache(MemoryStore(), block_size=BLOCK), text(6, 20)
    reused = []
    for seed in (7, 8, 7, 8, 7):
        hit, _, sequence = append(prompts, context, header + text(seed, 50))
        reused.append(hit.n_reused)
        sequence.close()
    assert reused == [0, 16, 64, 64, 64]


@pytest.mark.report("llama.cpp#12160")
def test_what_was_behind_a_removal_is_used_again(shared: Path) -> None:
    """#12160: of abcdefghj only d, g and what the prompt lacks may go; abefhj is left."""
    a, b, c, d, e, f, g, h, j = range(1, 10)
    path = shared / "models" / "llama-dense.gguf"
    with (
        Model.from_gguf(path, backend="numpy") as model,
        model.context(n_ctx=32, type_k="f32", type_v="f32") as context,
    ):
        cache = context.cache
        sequence = context.sequence([a, b, c, d, e, f, g, h, j])
        assert cache.seq_rm(sequence.seq_id, 2, 4)
        cache.seq_add(sequence.seq_id, 4, 6, -2)
        assert cache.seq_rm(sequence.seq_id, 4, 7)
        cache.seq_add(sequence.seq_id, 7, 9, -3)
        assert sequence.tokens == [a, b, e, f, h, j]
        assert sequence.positions.tolist() == list(range(6))
        by_edits = context.sequence([a, b, c, d, e, f, g, h, j]).remove(6, 7).remove(2, 4)
        assert by_edits.tokens == sequence.tokens
        assert nmse(by_edits.append([5]).logits, sequence.append([5]).logits) < SAME
        computed = uncached_logits(model.architecture, [a, b, e, f, h, j, 5])[-1]
        assert nmse(sequence.logits, computed) > SAME  # which is why it is tainted:
        assert by_edits.inexact_from == 2


@pytest.mark.report("llama.cpp#12160")
def test_what_was_moved_is_never_found_as_if_it_were_computed(llama: Context) -> None:
    """#12160 again: reuse behind a removal is an approximation, and stays in its sequence."""
    prompts = PromptCache(MemoryStore(), block_size=BLOCK)
    sequence = llama.sequence(TOKENS).remove(20, 30)
    assert prompts.store(sequence) == 1
    assert n_reused(prompts, llama, sequence.tokens) == 16


@pytest.mark.report("llama.cpp#8359", "llama.cpp#9238")
@pytest.mark.parametrize("arch", ["llama-dense", "jamba-dense"])
def test_a_prompt_as_long_as_the_context_is_refused_not_cut(shared: Path, arch: str) -> None:
    """#8359, #9238: it was halved, so that no beginning was left in common with anything."""
    prompts, whole = PromptCache(MemoryStore(), block_size=BLOCK), text(9, 65)
    with opened(shared, arch, n_ctx=64, **F32) as context:
        for _ in range(2):
            sequence = context.sequence()
            with pytest.raises(CacheFull):
                prompts.append(sequence, whole)
            assert (len(sequence), context.cache.used) == (0, 0)
            sequence.close()
        _, logits, sequence = append(prompts, context, whole[:64])
        assert nmse(logits, fresh(context, whole[:64])) < SAME
        sequence.close()
        assert n_reused(prompts, context, whole[:64]) == 48


@pytest.mark.slow
@pytest.mark.report("ollama#18264", "llama.cpp#18072")
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_budget_in_bytes_is_kept(context: Context, tmp_path: Path, kind: str) -> None:
    """ollama#18264, #18072: it grew to 8 GiB unseen."""
    unlimited = MemoryStore()
    append(PromptCache(unlimited, block_size=BLOCK), context, TOKENS)[2].close()
    budget = unlimited.bytes_used + 1000
    store = MemoryStore(budget) if kind == "memory" else DiskStore(tmp_path, budget, fsync=False)
    prompts = PromptCache(store, block_size=BLOCK)
    seen = 0
    for seed in range(10):
        append(prompts, context, text(seed, 70))[2].close()
        assert store.bytes_used == sum(entry.n_bytes for entry in store.entries()) <= budget
        seen = max(seen, store.bytes_used)
    assert seen > budget / 2
    store.close()


@pytest.mark.report("ATLAS#87")
def test_a_session_has_a_salt(context: Context) -> None:
    """ATLAS#87: what another session had said was there."""
    store = MemoryStore()
    alice, bob = (PromptCache(store, block_size=BLOCK, cache_salt=name) for name in ("a", "b"))
    append(alice, context, TOKENS)[2].close()
    hit, logits, sequence = append(bob, context, TOKENS)
    assert (hit.n_reused, hit.why) == (0, Miss("nothing stored", 0))
    assert nmse(logits, fresh(context, TOKENS)) < SAME
    sequence.close()
    assert n_reused(alice, context, TOKENS) == n_reused(bob, context, TOKENS) == 64
