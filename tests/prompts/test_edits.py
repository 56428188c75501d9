"""What edits left in a cache is never stored as if the text had been computed; nor other types."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.errors import LibraryError, OptionError
from kvcellar.prompts.cache import PromptCache
from kvcellar.prompts.misses import Miss
from kvcellar.runtime.context import Context
from kvcellar.runtime.sequence import Sequence
from kvcellar.stores.memory import MemoryStore
from kvcellar.testing.golden import nmse
from tests.prompts.helpers import BLOCK, append, keys, n_reused, why
from tests.runtime.archs import F32, SAME, fresh, opened, text

TOKENS = text(1, 70)
Edit = Callable[[Sequence, Path], object]


@pytest.fixture(scope="module")
def context(shared: Path) -> Iterator[Context]:
    with opened(shared, "llama-dense", n_ctx=1024, n_seq_max=12, **F32) as made:
        yield made


@pytest.fixture(autouse=True)
def _emptied(context: Context) -> Iterator[None]:
    yield
    for sequence in context.sequences:
        sequence.close()


def _cut(sequence: Sequence, _: Path) -> None:
    sequence.remove(20, 25)


def _leave_a_gap(sequence: Sequence, _: Path) -> None:
    sequence.remove(33, 36, gap="keep")


def _shift(sequence: Sequence, _: Path) -> None:
    assert sequence.shift_context(keep=17) > 0


def _extend(sequence: Sequence, _: Path) -> None:
    sequence.self_extend(2, 20)


def _move(sequence: Sequence, _: Path) -> None:
    sequence.context.cache.seq_add(sequence.seq_id, 40, -1, 3)


def _load_behind(sequence: Sequence, folder: Path) -> None:
    other = sequence.context.sequence(text(2, 40))
    other.save(folder / "other")
    other.close()
    sequence.trim(35).load(folder / "other", positions=35)


def _load_elsewhere(sequence: Sequence, folder: Path) -> None:
    sequence.save(folder / "whole")
    sequence.trim(len(sequence)).load(folder / "whole", positions=5)


def _load_the_end(sequence: Sequence, folder: Path) -> None:
    """At the positions where a text would begin, but computed behind other tokens."""
    sequence.save(folder / "whole")
    sequence.trim(len(sequence)).load(folder / "whole", start=10, positions=0)


def _load_other_types(sequence: Sequence, folder: Path) -> None:
    sequence.save(folder / "small", type_k="q8_0", type_v="q8_0")
    sequence.trim(len(sequence)).load(folder / "small", convert=True)


def _decode_embeddings(sequence: Sequence, _: Path) -> None:
    n_embd = sequence.context.model.spec.n_embd
    sequence.trim(20)
    rows = np.ones((4, n_embd), np.float32)
    sequence.context.decode(Batch.of_embeddings(rows, sequence.seq_id))


EDITS: list[tuple[Edit, int]] = [
    (_cut, 20),
    (_leave_a_gap, 33),
    (_shift, 17),
    (_extend, 0),
    (_move, 40),
    (_load_behind, 35),
    (_load_elsewhere, 0),
    (_load_the_end, 0),
    (_load_other_types, 0),
    (_decode_embeddings, 50),
]


@pytest.mark.parametrize(
    ("edit", "n_clean"), EDITS, ids=lambda x: getattr(x, "__name__", str(x)).strip("_")
)
@pytest.mark.parametrize("by", ["store", "append", "fork"])
def test_nothing_is_stored_behind_an_edit(
    context: Context, prompts: PromptCache, tmp_path: Path, edit: Edit, n_clean: int, by: str
) -> None:
    sequence = context.sequence(TOKENS)
    edit(sequence, tmp_path)
    if by == "append":
        prompts.append(sequence, text(3, 20))
    else:
        edited = sequence.fork() if by == "fork" else sequence
        assert prompts.store(edited) == n_clean // BLOCK
    found = sequence.tokens
    hit, logits, _ = append(prompts, context, [token for token in found if token >= 0])
    assert hit.n_reused == n_clean // BLOCK * BLOCK
    assert nmse(logits, fresh(context, [token for token in found if token >= 0])) < SAME


def test_what_is_computed_behind_an_older_text_is_clean_again(
    context: Context, prompts: PromptCache
) -> None:
    sequence = context.sequence(TOKENS)
    sequence.remove(40, 45)
    sequence.trim(len(sequence) - 40).append(text(3, 30))
    assert prompts.store(sequence) == 4
    hit, logits, _ = append(prompts, context, sequence.tokens)
    assert hit.n_reused == 64
    assert nmse(logits, fresh(context, sequence.tokens)) < SAME


def test_an_edit_that_was_taken_back_was_none(context: Context, prompts: PromptCache) -> None:
    sequence = context.sequence(TOKENS)
    with context.cache.transaction() as attempt:
        sequence.remove(20, 25)
        attempt.rollback()
    assert prompts.store(sequence) == 4


@pytest.mark.parametrize("arch", ["llama-dense", "gemma3-dense", "jamba-dense"])
def test_what_was_restored_can_be_taken_back(
    shared: Path, prompts: PromptCache, store: MemoryStore, arch: str
) -> None:
    """The blocks that were stored meanwhile stay: they are right all the same."""
    with opened(shared, arch, **F32) as context:
        append(prompts, context, TOKENS)
        sequence = context.sequence()
        with context.cache.transaction() as attempt:
            assert prompts.append(sequence, TOKENS + TOKENS).n_reused == 64
            attempt.rollback()
        context.cache.check()
        assert (len(sequence), len(keys(store))) == (0, 8)
        hit = prompts.append(sequence, TOKENS + TOKENS)
        assert hit.n_reused == 128
        assert nmse(sequence.logits, fresh(context, TOKENS + TOKENS)) < SAME


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["jamba-dense", "mamba-dense"])
def test_what_is_computed_again_after_an_edit_is_stored(
    shared: Path, prompts: PromptCache, arch: str
) -> None:
    """A state knows nothing of removed tokens, so there is nothing to be wrong about."""
    with opened(shared, arch, **F32) as context:
        sequence = context.sequence(TOKENS)
        sequence.remove(20, 25)
        prompts.append(sequence, text(3, 40))
        hit, logits, _ = append(prompts, context, sequence.tokens)
        assert nmse(sequence.logits, fresh(context, sequence.tokens)) < SAME
        assert nmse(logits, sequence.logits) < SAME
        assert hit.n_reused < len(sequence)


def test_forks_and_trimmed_texts_are_stored(context: Context, prompts: PromptCache) -> None:
    sequence = context.sequence(TOKENS)
    fork = sequence.fork().trim(30).append(text(4, 30))
    assert prompts.store(fork) == 4
    assert n_reused(prompts, context, TOKENS) == 32
    assert prompts.store(sequence) == 4
    for one in (fork, sequence):
        hit, logits, _ = append(prompts, context, one.tokens)
        assert hit.n_reused == 64
        assert nmse(logits, one.logits) < SAME


# -- types


SMALL: dict[str, Any] = {"type_k": "q8_0", "type_v": "q4_0"}


def test_other_types_are_smaller_and_less_exact(context: Context, store: MemoryStore) -> None:
    prompts, exact = PromptCache(store, block_size=BLOCK, **SMALL), MemoryStore()
    _, logits, _ = append(prompts, context, TOKENS)
    append(PromptCache(exact, block_size=BLOCK), context, TOKENS)
    assert store.bytes_used < exact.bytes_used * 0.6
    hit, restored, _ = append(prompts, context, TOKENS)
    assert hit.n_reused == 64
    assert SAME < nmse(restored, logits) < 0.05
    assert why(PromptCache(store, block_size=BLOCK), context, TOKENS) == ("other types", 0)


def test_what_lost_in_other_types_is_not_stored_as_exact(
    context: Context, store: MemoryStore
) -> None:
    small = PromptCache(store, block_size=BLOCK, **SMALL)
    exact = PromptCache(store, block_size=BLOCK)
    append(small, context, TOKENS)
    _, _, sequence = append(small, context, TOKENS)
    fork = sequence.fork()
    for one in (sequence, fork):
        assert exact.store(one) == 0
        exact.append(one, text(5, 30))
        assert n_reused(exact, context, TOKENS) == 0
    assert small.store(fork) == 6
    sequence.trim(len(sequence))
    exact.append(sequence, TOKENS)
    assert exact.store(sequence) == 4
    assert nmse(sequence.logits, fresh(context, TOKENS)) < SAME


def test_one_type_for_contexts_of_several(context: Context, store: MemoryStore) -> None:
    """What is stored as f16 fits contexts of f32 and of f16, and of f16 it is exact."""
    as_f16 = PromptCache(store, block_size=BLOCK, type_k="f16", type_v="f16")
    plain = PromptCache(store, block_size=BLOCK)
    with context.model.context(n_ctx=512, n_ubatch=16) as small:
        _, logits, _ = append(plain, small, TOKENS)
        hit, again, _ = append(as_f16, small, TOKENS)
        assert hit.n_reused == 64
        np.testing.assert_array_equal(again, logits)
        hit, other, _ = append(as_f16, context, TOKENS)
        assert hit.n_reused == 64
        assert 0 < nmse(other, logits) < 1e-4
        assert plain.store(context.sequences[-1]) == 0


def test_compressed_blocks_are_found_by_all(context: Context, store: MemoryStore) -> None:
    pytest.importorskip("zstandard")
    packed = PromptCache(store, block_size=BLOCK, compress=True)
    _, logits, _ = append(packed, context, [3] * 70)
    for prompts in (packed, PromptCache(store, block_size=BLOCK)):
        hit, again, _ = append(prompts, context, [3] * 70)
        assert hit.n_reused == 64
        assert nmse(again, logits) < SAME


def test_without_the_library_compressed_blocks_are_left_alone(
    context: Context, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is computed, and those who have the library find them still."""
    pytest.importorskip("zstandard")
    packed = PromptCache(store, block_size=BLOCK, compress=True)
    _, logits, _ = append(packed, context, [3] * 70)
    held = list(store.entries())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        hit, again, _ = append(PromptCache(store, block_size=BLOCK), context, [3] * 70)
    assert hit.n_reused == 0
    assert hit.why == Miss("compressed", 0)
    assert "kvcellar[zstd]" in str(hit.why)
    np.testing.assert_array_equal(again, logits)
    assert [entry.key for entry in store.entries()] == [entry.key for entry in held]
    assert append(packed, context, [3] * 70)[0].n_reused == 64


def test_a_path_is_no_store() -> None:
    for path in ("prompts", Path("prompts"), None):
        with pytest.raises(OptionError, match="open_store"):
            PromptCache(path)  # type: ignore[arg-type]


def test_types_and_libraries_that_are_not_there(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said before anything is computed."""
    for kind in ("type_k", "type_v"):
        wrong: dict[str, Any] = {kind: "q7_9"}
        with pytest.raises((OptionError, ValueError), match="q7_9"):
            PromptCache(store, **wrong)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(LibraryError, match="zstd"):
        PromptCache(store, compress=True)


@pytest.mark.parametrize("arch", ["llama-dense", "gemma3-dense", "jamba-dense"])
@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 800, "n_seq_max": 4},
        {"n_ubatch": 8, "n_seq_max": 4},
        {"flash_attn": False, "n_seq_max": 4},
        {"kernel": False, "n_seq_max": 4},
    ],
    ids=str,
)
def test_contexts_that_differ_in_how_but_not_in_what(
    shared: Path, prompts: PromptCache, arch: str, options: dict[str, Any]
) -> None:
    with opened(shared, arch, **F32) as one:
        _, logits, _ = append(prompts, one, TOKENS)
        with one.model.context(**{"n_ctx": 512, **F32, **options}) as two:
            hit, again, _ = append(prompts, two, TOKENS)
            assert hit.n_reused == 64
            assert nmse(again, logits) < SAME


def test_backends_share_what_they_stored(shared: Path, prompts: PromptCache) -> None:
    with (
        opened(shared, "llama-dense", **F32) as one,
        opened(shared, "llama-dense", "numpy", **F32) as two,
    ):
        _, logits, _ = append(prompts, one, TOKENS[:36])
        hit, again, _ = append(prompts, two, TOKENS[:36])
        assert hit.n_reused == 32
        assert nmse(again, logits) < SAME
