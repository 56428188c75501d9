"""What a model computed in one context goes on in another, with the same logits, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.cache.content import join
from kvcellar.cache.sliding import SlidingCache
from kvcellar.cache.transfer import state_get, state_set
from kvcellar.errors import SnapshotMismatch
from kvcellar.runtime.context import Context
from kvcellar.testing.golden import nmse
from kvcellar.types import Float32Array
from tests.runtime.archs import ARCHS, F32, SAME, WINDOWED, opened, text

PREFIX, TAILS = text(1, 70), [text(2, 9), text(3, 4), text(4, 20)]
TYPES = [("qwen3-dense", "q4_0"), ("gemma3-dense", "q8_0")]


@contextmanager
def pair(shared: Path, arch: str, backend: str = "ggml", **options: Any) -> Iterator[list[Context]]:
    """Two contexts of a model, the second of another size and for more sequences."""
    with opened(shared, arch, backend, **options) as one:
        two = one.model.context(**{"n_ctx": 768, "n_seq_max": 6, "n_ubatch": 16, **options})
        with two:
            yield [one, two]


def fill(context: Context) -> int:
    """Three sequences that share a text longer than any window; returns its length."""
    slides = any(isinstance(part, SlidingCache) for part in context.cache.parts)
    prefix = text(1, 300) if slides else PREFIX  # windows have 256 cells
    context.decode(Batch.of(prefix, 0))
    for seq in (1, 2):
        context.cache.seq_cp(0, seq)
    for seq, tail in enumerate(TAILS):
        context.decode(Batch.of(tail, seq))
    for part in context.cache.parts:
        assert not isinstance(part, SlidingCache) or len(part.seq_evicted(0)) > 0
    return len(prefix)


def go_on(context: Context, seq_ids: Sequence[int]) -> list[Float32Array]:
    """Logits of a few further tokens: of all sequences at once, then of each by itself."""
    batch = Batch()
    for i, seq in enumerate(seq_ids):
        batch.add(5 + i, context.cache.seq_pos_max(seq) + 1, seq, logits=True)
    together = context.decode(batch)
    return [together, *(context.decode(Batch.of(text(9, 3), seq)) for seq in seq_ids)]


def occupy(context: Context) -> None:
    """Leave holes, so that what is loaded has to be scattered."""
    for _ in range(5):
        context.decode(Batch.of(text(7, 3), 4))
        context.decode(Batch.of(text(8, 3), 5))
    context.cache.seq_rm(5)


@pytest.mark.parametrize("arch", ARCHS)
def test_logits_are_the_same_bits_in_another_context(shared: Path, arch: str) -> None:
    with pair(shared, arch) as (one, two):
        fill(one)
        state_set(two.cache, state_get(one.cache, [0, 1, 2]), [3, 0, 1])
        two.cache.check()
        for a, b in zip(go_on(one, [0, 1, 2]), go_on(two, [3, 0, 1]), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("arch", [*WINDOWED, "llama-dense", "jamba-dense", "mamba2-dense"])
def test_scattered_among_others_logits_differ_by_no_more_than_sums_do(
    shared: Path, arch: str
) -> None:
    with pair(shared, arch, **F32) as (one, two):
        fill(one)
        occupy(two)
        before = two.cache.seq_tokens(4).tolist()
        state_set(two.cache, state_get(one.cache, [0, 1, 2]), [3, 0, 1])
        for a, b in zip(go_on(one, [0, 1, 2]), go_on(two, [3, 0, 1]), strict=True):
            assert nmse(a, b) < SAME
        assert two.cache.seq_tokens(4).tolist() == before


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "kind"), TYPES)
@pytest.mark.parametrize("kernel", [False, None])
def test_quantised_rows_come_along_as_they_are(
    shared: Path, arch: str, kind: str, kernel: bool | None
) -> None:
    with pair(shared, arch, type_k=kind, type_v=kind, kernel=kernel) as (one, two):
        fill(one)
        state_set(two.cache, state_get(one.cache, [2, 0]), [0, 1])
        for a, b in zip(go_on(one, [2, 0]), go_on(two, [0, 1]), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("arch", ["llama-dense", "gemma2-dense", "jamba-dense"])
@pytest.mark.parametrize("scattered", [False, True])
def test_v_that_lies_across_comes_along(shared: Path, arch: str, scattered: bool) -> None:
    with pair(shared, arch, flash_attn=False, **F32) as (one, two):
        one.decode(Batch.of(PREFIX, 0))
        one.decode(Batch.of(TAILS[0], 0))
        if scattered:
            occupy(two)
        state_set(two.cache, state_get(one.cache, [0]), [1])
        for a, b in zip(go_on(one, [0]), go_on(two, [1]), strict=True):
            if scattered or arch in WINDOWED:  # sums over cells have another order then
                assert nmse(a, b) < SAME
            else:
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("arch", ["gemma3-dense", "lfm2-dense"])
def test_the_numpy_backend_takes_in_what_it_gave(shared: Path, arch: str) -> None:
    with pair(shared, arch, "numpy") as (one, two):
        one.decode(Batch.of(PREFIX[:30], 0))
        one.cache.seq_cp(0, 1)
        one.decode(Batch.of(TAILS[1], 1))
        two.decode(Batch.of(TAILS[0], 2))
        state_set(two.cache, state_get(one.cache, [0, 1]), [1, 0])
        for a, b in zip(go_on(one, [0, 1]), go_on(two, [1, 0]), strict=True):
            assert nmse(a, b) < SAME


@pytest.mark.parametrize("arch", ["llama-dense", "gemma3-dense", "falcon-h1-dense", "mamba-dense"])
def test_going_back_and_on_after_a_load(shared: Path, arch: str) -> None:
    with pair(shared, arch) as (one, two):
        n = fill(one)
        state_set(two.cache, state_get(one.cache, [2]), [5])
        assert one.cache.rewind(2, n) == two.cache.rewind(5, n) == n
        for a, b in zip(go_on(one, [2]), go_on(two, [5]), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("arch", WINDOWED)
def test_full_windows_give_to_small_ones_but_do_not_take(shared: Path, arch: str) -> None:
    with (
        opened(shared, arch, swa_full=True) as one,
        one.model.context(n_ctx=512, n_seq_max=4, n_ubatch=16) as two,
    ):
        one.decode(Batch.of(PREFIX, 0))
        one.decode(Batch.of(PREFIX, 0))
        state_set(two.cache, state_get(one.cache, [0]), [1])
        logits = go_on(two, [1])
        two.decode(Batch.of(text(3, 300), 2))
        with pytest.raises(SnapshotMismatch, match="swa_full"):
            state_set(one.cache, state_get(two.cache, [2]), [1])
        for a, b in zip(go_on(one, [0]), logits, strict=True):
            assert nmse(a, b) < SAME


def test_moved_texts_go_on_at_their_new_positions(shared: Path) -> None:
    with pair(shared, "llama-dense", **F32) as (one, two):
        one.decode(Batch.of(PREFIX, 0))
        state_set(two.cache, state_get(one.cache, [0]), [1], shift=5)
        one.cache.seq_add(0, -1, -1, 5)
        for a, b in zip(go_on(one, [0]), go_on(two, [1]), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "arch", ["llama-dense", "deepseek2-moe", "gemma3-dense", "gpt-oss-moe", "jamba-dense"]
)
def test_pieces_saved_while_a_text_grew_go_on_as_the_whole(shared: Path, arch: str) -> None:
    with pair(shared, arch, **F32) as (one, two):
        tokens, pieces, at = text(1, 300), [], 0
        for n in (20, 7, 1, 272):
            one.decode(Batch.of(tokens[at : at + n], 0))
            one.decode(Batch.of(TAILS[2], 1))
            at += n
            pieces.append(state_get(one.cache, [0], at - n, at))
        evicted = [len(group.evicted[0][0]) > 0 for piece in pieces for group in piece.groups]
        assert any(evicted) == (arch in WINDOWED)
        joined = join(pieces, [group.window for group in one.memory_spec.groups])
        state_set(two.cache, joined, [1])
        assert joined.groups[0].text_of(0)[1].tolist() == tokens
        state_set(two.cache, state_get(one.cache, [0]), [2])
        logits = go_on(one, [0])
        for seq in (1, 2):
            for a, b in zip(logits, go_on(two, [seq]), strict=True):
                assert nmse(a, b) < SAME
