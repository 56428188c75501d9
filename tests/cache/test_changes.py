"""Changes happen as a whole or not at all, wherever an exception from outside comes.

``kvcellar.testing.interrupts`` raises only where CPython can, in contexts of real models. Here an
exception comes at lines, which asks for more, and caches stand over rows that tell what they are.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvcellar
from kvcellar.batch import Batch
from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.base import Cache, Savepoint
from kvcellar.cache.changes import Changes, Handle, Undo
from kvcellar.cache.placement import OpenBatch
from kvcellar.cache.transfer import state_get, state_set
from kvcellar.errors import CacheError
from tests.cache import kinds
from tests.cache.kinds import KINDS, N_SEQ, cache_of, check_texts, put, text_of

PACKAGE = Path(kvcellar.__file__).parent
ORACLES = str(PACKAGE / "testing")
Texts = dict[int, list[tuple[int, int]]]


class Interrupt(BaseException):
    """Comes from outside: nobody expects it."""


class Failure(Exception):
    """Something that goes wrong within a block."""


class AtLine:
    """Raises at some of the lines of the package that run within a ``with`` block, by number."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = set(numbers)
        self.n_lines = 0

    def __enter__(self) -> AtLine:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(str(PACKAGE)) or name.startswith(ORACLES):
            return None
        if event == "line":
            self.n_lines += 1
            if self.n_lines - 1 in self.numbers:
                raise Interrupt
        return self._trace


def decode(cache: Cache) -> None:
    put(cache, 1, 6)


def decode_together(cache: Cache) -> None:
    put(cache, [1], 1)
    put(cache, 3, 9)


def rotate_and_compact(cache: Cache) -> None:
    cache.defrag()
    cache.update()


def roll_back(cache: Cache) -> None:
    with cache.transaction() as transaction:
        cache.rewind(0, 4)
        put(cache, 0, 3)
        cache.update()
        transaction.rollback()


def commit(cache: Cache) -> None:
    with cache.transaction():
        cache.seq_cp(0, 3)
        with cache.transaction():
            cache.rewind(3, 4)


def copy_back(cache: Cache) -> None:
    content = state_get(cache, [0, 1])
    cache.seq_rm(1)
    cache.seq_rm(2)
    state_set(cache, content, [2, 1])


VERBS: dict[str, Callable[[Cache], object]] = {
    "remove the end": lambda cache: cache.rewind(0, 5),
    "remove a sequence": lambda cache: cache.seq_rm(1),
    "remove all": lambda cache: cache.seq_rm(-1),
    "share": lambda cache: cache.seq_cp(1, 3),
    "keep": lambda cache: cache.seq_keep(0),
    "move": lambda cache: cache.seq_add(2, -1, -1, 3),
    "cut": lambda cache: cache.seq_cut(0, 1, 3),
    "clear": lambda cache: cache.clear(),
    "checkpoint": lambda cache: cache.checkpoint(0),
    "grow": lambda cache: cache.resize(60),
    "shrink": lambda cache: cache.resize(30),
    "update": rotate_and_compact,
    "decode": decode,
    "decode together": decode_together,
    "roll back": roll_back,
    "commit": commit,
    "copy back": copy_back,
}


def filled(kind: str, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """The same cache each time, with shared and moved text, a hole and a pending shift."""
    monkeypatch.setattr(kinds, "TOKENS", itertools.count(100))
    cache = cache_of(kind, size=40)
    put(cache, 2, 3)
    put(cache, 0, 7)
    cache.seq_cp(0, 1)
    put(cache, 1, 2)
    cache.seq_rm(2)
    put(cache, 2, 1)
    cache.seq_add(2, -1, -1, 2)
    if kind == "f":
        cache.seq_add(1, -1, -1, 2)
    return cache


def texts_of(cache: Cache) -> Texts:
    return {seq: text_of(cache, seq) for seq in range(N_SEQ)}


def steps_of(kind: str, verb: str, monkeypatch: pytest.MonkeyPatch) -> list[Texts]:
    """What the sequences are, before a verb and after each change that it is made of."""
    cache = filled(kind, monkeypatch)
    seen = [texts_of(cache)]
    run = Changes._run

    def watched(self: Changes, *args: Any) -> object:
        result: object = run(self, *args)
        seen.append(texts_of(cache))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Changes, "_run", watched)
        VERBS[verb](cache)
    return seen


def lines_of(kind: str, verb: str, monkeypatch: pytest.MonkeyPatch) -> int:
    cache = filled(kind, monkeypatch)
    with AtLine() as count:
        VERBS[verb](cache)
    return count.n_lines


def interrupt(kind: str, verb: str, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> Cache:
    """The cache after a verb that was interrupted."""
    cache = filled(kind, monkeypatch)
    try:
        with AtLine(*numbers):
            VERBS[verb](cache)
    except Interrupt:
        pass
    return cache


def check_sound(cache: Cache, steps: list[Texts]) -> None:
    """A verb has happened or not, as far as one can see; everything goes on, nothing is lost."""
    cache.changes.settle()
    texts = texts_of(cache)
    assert texts in steps
    assert not cache.in_transaction
    check_texts(cache, texts)
    for seq in range(N_SEQ):
        put(cache, seq, 1)
    after = texts_of(cache)
    assert all(len(after[seq]) == len(texts[seq]) + 1 for seq in range(N_SEQ))
    check_texts(cache, after)
    cache.resize(64)
    cache.clear()
    for part in cache.parts:
        part.check()
        if isinstance(part, AttentionCache):
            assert (part.used, part.table.n_free()) == (0, part.spec.size)
            put(part, 0, 3)


def applies(kind: str, verb: str) -> bool:
    """Whether a cache of that kind does that."""
    return (
        (verb != "cut" or kind == "f")
        and (verb != "shrink" or kind not in ("w", "ws"))
        and (verb != "checkpoint" or kind != "f")
    )


CASES = [(kind, verb) for kind in KINDS for verb in VERBS if applies(kind, verb)]


def check_at(kind: str, verb: str, n_points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a verb at some lines, evenly spread."""
    n_lines, steps = lines_of(kind, verb, monkeypatch), steps_of(kind, verb, monkeypatch)
    assert n_lines > 5
    stride = max(1, n_lines // n_points)
    for number in range((7 * len(verb) + n_points) % stride, n_lines, stride):
        check_sound(interrupt(kind, verb, monkeypatch, number), steps)


@pytest.mark.parametrize(("kind", "verb"), CASES)
def test_a_verb_that_is_interrupted_has_happened_or_not(
    kind: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_at(kind, verb, 6, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "verb"), CASES)
def test_at_more_lines(kind: str, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_at(kind, verb, 10, monkeypatch)


@pytest.mark.parametrize("behind", [1, 2, 5, 13, 34])
@pytest.mark.parametrize("kind", ["f", "fws"])
def test_a_second_exception_while_the_first_is_handled(
    kind: str, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for verb in ("decode", "roll back", "grow", "commit"):
        n_lines, steps = lines_of(kind, verb, monkeypatch), steps_of(kind, verb, monkeypatch)
        for number in range(behind % 7, n_lines, max(1, n_lines // 5)):
            numbers = number, number + behind, number + 2 * behind
            check_sound(interrupt(kind, verb, monkeypatch, *numbers), steps)


# -- changes by themselves


class Value:
    """A number that takes part in changes."""

    def __init__(self, changes: Changes) -> None:
        self.now, self.n_undone = 0, 0
        self.fails = 0
        changes.join(self.remember)

    def remember(self) -> Undo:
        kept = self.now

        def undo() -> None:
            self.n_undone += 1
            if self.fails:
                self.fails -= 1
                raise Interrupt
            self.now = kept

        return undo

    def set(self, now: int, error: type[BaseException] | None = None) -> int:
        self.now = now
        if error is not None:
            raise error
        return now


@pytest.fixture
def changes() -> Changes:
    return Changes()


@pytest.fixture
def value(changes: Changes) -> Iterator[Value]:
    yield Value(changes)
    assert not changes.is_open


def test_a_change_that_fails_is_taken_back(changes: Changes, value: Value) -> None:
    assert changes.run(value.set, 3) == 3
    for error in (Interrupt, CacheError, MemoryError):
        with pytest.raises(error):
            changes.run(value.set, 4, error)
        assert (value.now, changes.is_open) == (3, False)


def test_a_call_within_a_change_is_part_of_it(changes: Changes, value: Value) -> None:
    def outer() -> None:
        changes.run(value.set, 5)
        assert changes.is_open
        raise CacheError("later")

    with pytest.raises(CacheError):
        changes.run(outer)
    assert value.now == 0


def test_what_is_left_over_is_taken_back_by_the_next_call(changes: Changes, value: Value) -> None:
    value.fails = 2  # taking back is interrupted, and once more
    with pytest.raises(Interrupt) as kept:
        changes.run(value.set, 4, CacheError)
    assert value.now == 4
    assert not changes.is_open
    changes.settle()
    assert (value.now, kept.tb is None) == (0, False)  # though the traceback is still there
    value.fails = 2
    with pytest.raises(Interrupt):
        changes.run(value.set, 4, CacheError)
    assert changes.run(lambda: value.now) == 0


def test_a_change_that_goes_forward_is_done_again(changes: Changes, value: Value) -> None:
    tries = [Interrupt, Interrupt, None]

    def add() -> None:
        value.set(value.now + 1, tries.pop(0))

    with pytest.raises(Interrupt):
        changes.run_forward(add)
    assert (value.now, tries) == (1, [])
    tries += [Interrupt, Interrupt, Interrupt, None]
    with pytest.raises(Interrupt) as kept:
        changes.run_forward(add)
    assert (changes.is_open, tries) == (False, [None])
    changes.settle()
    assert (value.now, tries, kept.tb is None) == (2, [], False)


def test_rows_and_objects_come_back_last_first(changes: Changes, value: Value) -> None:
    order: list[str] = []

    def step() -> None:
        changes.remember(partial(order.append, "object"))
        changes.log += [partial(order.append, "row 1"), partial(order.append, "row 2")]
        value.set(1, CacheError)

    with pytest.raises(CacheError):
        changes.run(step)
    assert order == ["row 2", "row 1", "object"]


def test_what_comes_afterwards_waits_for_the_whole(changes: Changes, value: Value) -> None:
    told: list[int] = []

    def inner(error: type[BaseException] | None) -> None:
        changes.run(changes.afterwards, lambda: told.append(value.now))
        value.set(2, error)
        assert not told

    with pytest.raises(CacheError):
        changes.run(inner, CacheError)
    assert not told
    changes.run(inner, None)
    assert told == [2]
    changes.afterwards(lambda: told.append(0))
    assert told == [2, 0]


def test_an_attempt_is_taken_back_alone(changes: Changes, value: Value) -> None:
    rows: list[int] = []

    def attempt(goes: bool) -> bool:
        value.set(9)
        changes.log.append(lambda: rows.append(1))
        return goes

    def step(goes: bool) -> None:
        value.set(1)
        changes.log.append(lambda: rows.append(0))
        assert changes.attempt(partial(attempt, goes)) is goes

    changes.run(step, False)
    assert (value.now, rows) == (1, [1])
    changes.run(step, True)
    assert (value.now, rows) == (9, [1])


def test_what_was_kept_so_far_stays(changes: Changes, value: Value) -> None:
    other = Value(changes)

    def step() -> None:
        value.set(1)
        other.set(1)
        changes.keep_so_far(value.remember)
        value.set(2, CacheError)

    with pytest.raises(CacheError):
        changes.run(step)
    assert (value.now, other.now) == (1, 0)


# -- what outlives a call


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_nobody_can_end_is_released(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled(kind, monkeypatch)
    before = texts_of(cache)
    placement = cache.place(Batch.of([1, 2], 0), 4)
    with pytest.raises(CacheError, match="being decoded"):
        cache.seq_rm(1)
    next(placement.plans())
    del placement
    gc.collect()  # the plan's generator holds it
    assert not cache.is_decoding
    assert texts_of(cache) == before
    check_sound(cache, [before])


@pytest.mark.parametrize("kind", KINDS)
def test_a_transaction_that_nobody_can_end_is_rolled_back(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled(kind, monkeypatch)
    before = texts_of(cache)
    outer, inner = cache.transaction(), cache.transaction()
    cache.rewind(0, 4)
    held = cache.place(Batch.of([1, 2], 3), 4)
    assert (outer.is_open, inner.is_open, held.is_open) == (True,) * 3
    del outer
    cache.changes.settle()
    assert (inner.is_open, held.is_open) == (False, False)
    assert texts_of(cache) == before
    with pytest.raises(CacheError, match="rolled back already"):
        inner.commit()
    check_sound(cache, [before])


def begin_transaction(cache: Cache) -> Handle[Any]:
    return cache.transaction()


def begin_batch(cache: Cache) -> Handle[Any]:
    return cache.place(Batch.of([1, 2], 0), 4)


LASTING = [begin_transaction, begin_batch]


def fail(*_: object) -> None:
    raise Interrupt


@pytest.mark.parametrize("method", ["handle", "leave"])
@pytest.mark.parametrize("begin", LASTING)
@pytest.mark.parametrize("kind", ["f", "fws"])
def test_a_traceback_keeps_nothing_open(
    kind: str,
    begin: Callable[[Cache], Handle[Any]],
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = filled(kind, monkeypatch)
    before = texts_of(cache)

    def work() -> None:
        with begin(cache) as begun:
            assert begun.is_open
            raise Failure

    with monkeypatch.context() as patch:
        for base in (Savepoint, OpenBatch):
            patch.setattr(base, method, fail)
        with pytest.raises(Interrupt) as caught:  # which is kept
            work()
    assert caught.tb is not None
    assert not cache.in_transaction
    assert not cache.is_decoding
    check_sound(cache, [before])


@pytest.mark.parametrize("begin", LASTING)
def test_nor_does_what_was_never_returned(
    begin: Callable[[Cache], Handle[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled("f", monkeypatch)
    before = texts_of(cache)

    def begun() -> object:
        cache.changes.afterwards(fail)
        return begin(cache)

    with pytest.raises(Interrupt) as caught:
        cache.changes.run(begun)
    assert caught.tb is not None
    check_sound(cache, [before])


@pytest.mark.parametrize("begin", LASTING)
def test_a_handle_lasts_however_it_is_entered_and_looked_at(
    begin: Callable[[Cache], Handle[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled("f", monkeypatch)
    handle: Any = begin(cache)
    assert hasattr(handle, "__enter__")
    assert callable(handle.__exit__)
    cache.changes.settle()
    assert handle.is_open
    with ExitStack() as stack:
        inner = stack.enter_context(handle)
        del handle
        cache.changes.settle()
        assert inner.is_open
    assert not inner.is_open
    with begin(cache) as first:
        cache.changes.settle()
        assert first.is_open
    assert not first.is_open
