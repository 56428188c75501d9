"""Threads that use one context take turns, whatever they do."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.errors import CacheFull
from kvcellar.runtime.context import Context
from kvcellar.runtime.sequence import Sequence
from tests.runtime.archs import F32, fresh, opened, text

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    """Let threads interrupt each other a thousand times as often as they do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def together(*works: Callable[[], object]) -> None:
    """Run each in a thread of its own; the first error of any is raised."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_edits_wait_for_what_others_compute(shared: Path) -> None:
    """And afterwards every sequence goes on as its own text does."""
    with opened(shared, "llama-dense", n_ctx=256, n_seq_max=8, **F32) as context:
        texts = [context.sequence() for _ in range(3)]

        def work(number: int, sequence: Sequence) -> None:
            for i in range(25):
                sequence.append(text(100 * number + i, 20))
                sequence.trim(5).remove(0, len(sequence) - 10)
                with sequence.fork() as child:
                    child.append([1]).self_extend(2, 4)
                sequence.shift_context(2, 3)
                assert len(sequence.tokens) == len(sequence.positions) == 7

        together(*(lambda n=n, s=s: work(n, s) for n, s in enumerate(texts)))
        context.cache.check()
        for sequence in texts:
            sequence.trim(len(sequence)).append(text(5, 9))
            np.testing.assert_allclose(sequence.logits, fresh(context, text(5, 9)), atol=1e-4)


def test_a_refused_load_takes_back_nothing_of_others(shared: Path, tmp_path: Path) -> None:
    with opened(shared, "llama-dense", n_ctx=512, **F32) as large:
        large.sequence(text(1, 400)).save(tmp_path / "large.kv")
    with opened(shared, "llama-dense", n_ctx=256, n_seq_max=8, **F32) as context:
        base, done = context.sequence(text(2, 30)), threading.Event()

        def load() -> None:
            while not done.is_set():
                with pytest.raises(CacheFull):
                    context.load(tmp_path / "large.kv")

        def edit() -> None:
            try:
                for _ in range(500):
                    with base.fork() as child:
                        child.trim(10)
                        assert (len(child), len(base)) == (20, 30)
            finally:
                done.set()

        together(load, edit)
        context.cache.check()
        assert context.cache.used == 30


def test_a_fork_that_fails_takes_no_id(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(shared, "llama-dense", n_seq_max=2) as context:
        base = context.sequence(text(1, 5))

        def fail(*_: int) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(context.cache, "seq_cp", fail)
            with pytest.raises(KeyboardInterrupt):
                base.fork()
        assert context.sequences == (base,)
        assert _goes_on(context, base.fork())


def _goes_on(context: Context, sequence: Sequence) -> bool:
    expected = fresh(context, [*text(1, 5), 9])
    return bool(np.allclose(sequence.append([9]).logits, expected, atol=1e-2))
