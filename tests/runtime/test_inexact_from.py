"""From which token on K and V are not what a fresh decode of the text would give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cache.transfer import state_get
from kvcellar.runtime.context import Context
from kvcellar.runtime.sequence import Sequence
from kvcellar.testing.golden import nmse
from tests.profiles import examples
from tests.runtime.archs import F32, HYBRID, RECURRENT, WINDOWED, opened, text

TEXT = text(1, 24)


@pytest.fixture(scope="module")
def plain(shared: Path) -> Iterator[Context]:
    with opened(shared, "llama-dense", n_ctx=128, **F32) as made:
        yield made


@pytest.fixture
def sequence(plain: Context) -> Iterator[Sequence]:
    yield plain.sequence(TEXT)
    for one in plain.sequences:
        one.close()


def n_fresh(sequence: Sequence) -> int:
    """Count the rows of K that equal a fresh decode's: the oracle of ``inexact_from``."""
    context = sequence.context
    with context.model.context(n_ctx=128, n_seq_max=1, **F32) as other:  # type: ignore[arg-type]
        fresh = other.sequence(sequence.tokens)
        contents = [
            state_get(cache, [seq_id]).groups[0].rows.k[-1].view(np.float32)
            for cache, seq_id in (
                (other.cache, fresh.seq_id),
                (context.cache, sequence.seq_id),
            )
        ]
    rows = [nmse(b, a) < 1e-8 for a, b in zip(*contents, strict=True)]
    return rows.index(False) if False in rows else len(rows)


def check(sequence: Sequence, inexact_from: int | None) -> None:
    assert sequence.inexact_from == inexact_from
    if len(sequence):
        sequence.compute_pending()
        assert n_fresh(sequence) == (len(sequence) if inexact_from is None else inexact_from)


def test_nothing_is_tainted_that_was_only_appended_and_trimmed(sequence: Sequence) -> None:
    check(sequence, None)
    check(sequence.append(text(2, 5)).trim(9), None)
    check(sequence.append([3]).remove(15, 21), None)


@pytest.mark.parametrize("gap", ["close", "keep"])
def test_removed_from_the_middle(sequence: Sequence, gap: str) -> None:
    sequence.remove(7, 10, gap=gap)  # type: ignore[arg-type]
    check(sequence, 7)
    check(sequence.append([5]), 7)
    check(sequence.remove(12, 13), 7)
    check(sequence.remove(2, 3), 2)


def test_removed_from_the_start(sequence: Sequence) -> None:
    check(sequence.remove(0, 3, gap="keep"), 0)


def test_nothing_removed(sequence: Sequence) -> None:
    check(sequence.remove(7, 7, gap="keep"), None)
    check(sequence.remove(7, 7), None)
    check(sequence.remove(20, 24, gap="keep"), None)


def test_trimmed_back(sequence: Sequence) -> None:
    sequence.remove(7, 10)
    check(sequence.fork().trim(13), 7)
    check(sequence.fork().trim(14), None)
    check(sequence.fork().remove(7, 21), None)
    check(sequence.trim(21).append(text(3, 4)), None)


def test_removed_among_what_waits(sequence: Sequence) -> None:
    for token in text(4, 5):
        sequence.push(token)
    check(sequence.fork().remove(26, 27), None)
    check(sequence.fork().remove(26, 27, gap="keep"), None)  # they stood nowhere yet
    check(sequence.remove(20, 26), None)


def test_shifted(sequence: Sequence) -> None:
    sequence.shift_context(4, 6)
    check(sequence, 4)


def test_grouped(sequence: Sequence) -> None:
    sequence.self_extend(1, 8)
    sequence.self_extend(4, 64)  # no window is full
    check(sequence, None)
    sequence.self_extend(4, 8)
    assert sequence.inexact_from == 1
    assert sequence.positions.tolist()[:6] == [0, 0, 0, 0, 1, 1]
    assert sequence.fork().inexact_from == 1
    assert sequence.trim(20).inexact_from == 1
    assert sequence.trim(2).inexact_from is None  # what shares a position is computed again
    check(sequence.append(TEXT), None)


def test_forks_know_it(sequence: Sequence) -> None:
    before = sequence.fork()
    sequence.remove(7, 10)
    check(sequence.fork(), 7)
    check(before, None)


def test_a_rollback_takes_it_back(sequence: Sequence) -> None:
    with sequence.context.cache.transaction() as transaction:
        sequence.remove(7, 10)
        assert sequence.inexact_from == 7
        transaction.rollback()
    check(sequence, None)
    sequence.remove(9, 10)
    with sequence.context.cache.transaction() as transaction:
        known = sequence.trim(20).inexact_from
        assert known is None
        transaction.rollback()
    check(sequence, 9)


def test_it_is_saved(sequence: Sequence, tmp_path: Path) -> None:
    path, context = tmp_path / "text", sequence.context
    sequence.remove(7, 10).save(path)
    sequence.close()
    check(context.load(path), 7)
    for stop, inexact_from in ((8, 7), (7, None), (0, None)):
        loaded = context.load(path, stop=stop)
        assert loaded.inexact_from == inexact_from
        loaded.close()
    first = context.sequences[0]
    first.save(path, stop=7)
    check(context.load(path), None)
    first.save(path, start=3)
    assert context.load(path).inexact_from == 0


@pytest.mark.parametrize("arch", [*HYBRID, *RECURRENT])
def test_what_is_computed_again_is_fresh(shared: Path, arch: str) -> None:
    with opened(shared, arch, **F32) as context:
        sequence = context.sequence(TEXT)
        assert sequence.remove(7, 10).inexact_from is None
        assert sequence.append([5]).inexact_from is None
        sequence.shift_context(4, 6)
        assert sequence.append([5]).inexact_from is None


@pytest.mark.parametrize("arch", WINDOWED)
def test_windows(shared: Path, arch: str) -> None:
    with opened(shared, arch, **F32) as context:
        sequence = context.sequence(text(1, 400))
        sequence.remove(390, 393)
        in_place = context.cache.seq_count(sequence.seq_id) == 397
        assert sequence.inexact_from == (390 if in_place else None)
        assert in_place
        sequence.remove(380, 381, gap="keep")
        assert sequence.inexact_from == 380
        assert sequence.append([3]).remove(5, 6).inexact_from == 5
        sequence.trim(300)  # the window is gone there: all is computed again
        assert context.cache.seq_count(sequence.seq_id) == 0
        assert sequence.fork().append([3]).inexact_from is None
        sequence.remove(50, 60, gap="keep")
        assert sequence.inexact_from == 50
        assert sequence.trim(1).append([3]).inexact_from == 50  # what is behind the gap still is
        assert sequence.positions.tolist()[49:51] == [49, 60]


EDITS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 3), st.integers(0, 99)),
    st.tuples(st.just("push"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("trim"), st.integers(0, 6), st.just(0)),
    st.tuples(st.sampled_from(["close", "keep"]), st.integers(0, 20), st.integers(0, 4)),
)


@examples(20)
@given(edits=st.lists(EDITS, max_size=6))
def test_it_is_never_too_late(plain: Context, edits: list[tuple[str, int, int]]) -> None:
    sequence = plain.sequence(TEXT[:8])
    try:
        for edit, a, b in edits:
            size = len(sequence)
            if edit == "append":
                sequence.append(text(b, a))
            elif edit == "push":
                sequence.push(a)
            elif edit == "trim":
                sequence.trim(min(a, size))
            else:
                start = min(a, size)
                sequence.remove(start, min(start + b, size), gap=edit)  # type: ignore[arg-type]
        if len(sequence):
            sequence.compute_pending()
            known = len(sequence) if sequence.inexact_from is None else sequence.inexact_from
            assert known <= n_fresh(sequence)
    finally:
        sequence.close()
