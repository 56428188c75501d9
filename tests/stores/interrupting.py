"""Raise at each line of a piece of work in turn, as Ctrl-C or a lack of memory may.

Also when a function returns, whose result is lost then. Lines that say ``with`` or ``try`` are left
out: nothing can be raised there, and Python does not expect it. (The former are seen again on the
way out, where an exception would keep the statement from ending.)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any

Trace = Callable[[FrameType, str, Any], Any]


class Interrupted(BaseException):
    """What is raised."""


@cache
def _left_out(path: str) -> frozenset[int]:
    tree = ast.parse(Path(path).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.With, ast.Try))]
    return frozenset(line for one in found for line in range(one.lineno, one.body[0].lineno))


class _Tracer:
    """Counts the lines that run in some files, each once, and raises at one of them."""

    def __init__(self, files: tuple[str, ...], at: int) -> None:
        self.files, self.at, self.where = files, at, ""
        self.seen: set[tuple[str, int, str]] = set()

    def enter(self, frame: FrameType, _event: str, _: Any) -> Trace | None:
        return self.line if frame.f_code.co_filename.startswith(self.files) else None

    def line(self, frame: FrameType, event: str, _: Any) -> Trace:
        path = frame.f_code.co_filename
        is_line = event == "line" and frame.f_lineno not in _left_out(path)
        is_end = event == "return" and not frame.f_code.co_flags & CO_GENERATOR
        place = (path, frame.f_lineno, event)
        if (is_line or is_end) and place not in self.seen:
            self.seen.add(place)
            if len(self.seen) == self.at:
                self.where = f"{Path(path).name}:{frame.f_lineno} ({event})"
                sys.settrace(None)
                raise Interrupted(self.where)
        return self.line


def interrupted_at(at: int, work: Callable[[], object], files: tuple[str, ...]) -> str:
    """Do work, interrupted at its ``at``-th line; return where that is, "" if it has fewer."""
    tracer, before = _Tracer(files, at), sys.gettrace()
    sys.settrace(tracer.enter)
    try:
        work()
    except Interrupted:
        assert tracer.where
    finally:
        sys.settrace(before)
    return tracer.where


def each_line(
    prepare: Callable[[], Callable[[], object]], *files: Path, step: int = 1
) -> Iterator[str]:
    """Prepare work, interrupt it at a line, and yield where; until it has no more lines."""
    names, at = tuple(map(str, files)), 1
    while where := interrupted_at(at, prepare(), names):
        yield where
        at += step
    assert at > step, "the work has no line at all in these files"
