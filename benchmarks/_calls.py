"""Record which functions of a package are called, in order.

A call is one "call" event of ``sys.setprofile`` whose code stands in a file below the package's
folder. So:

1. Functions, methods, properties and lambdas count, and so do comprehensions and generator
   expressions where Python runs them as functions (up to 3.11).
2. Every resumption of a generator counts as a call.
3. Code that has no file does not count (a dataclass's ``__init__``), nor does code of other
   packages, code written in C, or other threads.
4. A hop is a call in another file than that of the call before it; the first call is one.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from types import CodeType, FrameType


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        file: path below the package's folder.
        function: qualified name where Python knows it (from 3.11), else the bare name.
        line: where the function begins.
        depth: how many functions of the package are running around it.
    """

    file: str
    function: str
    line: int
    depth: int


@dataclass(frozen=True)
class Counts:
    """How long a trip is."""

    calls: int
    files: int
    hops: int

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Counts:
        """Count recorded calls."""
        return cls(len(calls), len({call.file for call in calls}), sum(hops(calls)))


def record(package: Path, run: Callable[[], object]) -> list[Call]:
    """Run a function and return the calls that it makes in a package.

    Garbage is collected before and not during the run, so that no finalizer is counted.

    Args:
        package: the package's folder.
        run: what to record.
    """
    calls: list[Call] = []
    prefix = str(package) + os.sep

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            calls.append(_call(frame.f_code, prefix, _depth(frame, prefix)))

    collects, before = gc.isenabled(), sys.getprofile()
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return calls


def hops(calls: Sequence[Call]) -> list[bool]:
    """For each call: whether it is a hop."""
    files = ["", *(call.file for call in calls)]
    return [here != there for here, there in pairwise(files)]


def by_file(calls: Sequence[Call]) -> Iterator[str]:
    """Lines: each file with its calls and hops, its functions below it; most calls first."""
    per_file = Counter(call.file for call in calls)
    arrivals = Counter(call.file for call, hop in zip(calls, hops(calls), strict=True) if hop)
    functions = Counter((call.file, call.function, call.line) for call in calls)
    for file, n_calls in per_file.most_common():
        yield f"{n_calls:5} calls {arrivals[file]:5} hops  {file}"
        for (where, function, line), n in functions.most_common():
            if where == file:
                yield f"{n:5}{'':18}{function}:{line}"


def tree(calls: Sequence[Call]) -> Iterator[str]:
    """Lines: the calls in order, indented by depth, the file where there is a hop.

    Equal calls that follow one another share a line, which says how many they are.
    """
    file = ""
    for call, same in groupby(calls):
        n = len(list(same))
        times = f" x{n}" if n > 1 else ""
        hop = f"  [{call.file}]" if call.file != file else ""
        yield f"{'  ' * call.depth}{call.function}:{call.line}{times}{hop}"
        file = call.file


def _call(code: CodeType, prefix: str, depth: int) -> Call:
    file = code.co_filename[len(prefix) :].replace(os.sep, "/")
    return Call(file, getattr(code, "co_qualname", code.co_name), code.co_firstlineno, depth)


def _depth(frame: FrameType, prefix: str) -> int:
    depth, outer = 0, frame.f_back
    while outer is not None:
        depth += outer.f_code.co_filename.startswith(prefix)
        outer = outer.f_back
    return depth
