"""Exceptions that come at a line of some files, one after the other, as those of signals do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import kvcellar.backends

BACKENDS = str(Path(kvcellar.backends.__file__).parent)


class Interrupt(BaseException):
    """Comes at a line."""


class _Tracer:
    """Counts lines of files below a folder, and raises at some of them."""

    def __init__(self, at: tuple[int, ...] = ()) -> None:
        self.at = set(at)
        self.lines: list[tuple[str, int]] = []

    def __call__(self, frame: FrameType, event: str, _arg: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(BACKENDS) or frame.f_code.co_name == "__del__":
            return None  # what a finaliser raises goes nowhere
        if event == "line":
            n = len(self.lines)
            self.lines.append((name, frame.f_lineno))
            if n in self.at:
                raise Interrupt(f"{name}:{frame.f_lineno}")
        return self


def _traced(work: Callable[[], object], tracer: _Tracer) -> bool:
    """Whether the work was interrupted."""
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        work()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def lines_of(work: Callable[[], object]) -> list[int]:
    """Where each line of the backends that the work passes is passed first, and last."""
    tracer = _Tracer()
    assert not _traced(work, tracer)
    seen = list(enumerate(tracer.lines))
    first = {line: n for n, line in reversed(seen)}
    last = {line: n for n, line in seen}
    return sorted({*first.values(), *last.values()})


def interrupted(
    work: Callable[[], object],
    prepare: Callable[[], object] = lambda: None,
    *,
    twice: bool = False,
    step: int = 1,
) -> Iterator[str]:
    """Do the work again and again, interrupted at another line each time; yields the line.

    Args:
        work: what is interrupted.
        prepare: what is done before, uninterrupted.
        twice: whether another interrupt comes at one of the lines that follow.
        step: how many lines further each time.
    """
    prepare()
    for i, n in enumerate(lines_of(work)[::step]):
        prepare()
        tracer = _Tracer((n, n + 1 + i % 7) if twice else (n,))
        _traced(work, tracer)
        yield str(tracer.lines[n : n + 1])
