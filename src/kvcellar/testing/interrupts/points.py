"""Where an exception from outside can come, and how one is sent there.

CPython raises asynchronous exceptions (what a signal handler raises, ``PyThreadState_SetAsyncExc``)
only where it looks at its *eval breaker*: at the entry of a function (and when a generator goes
on), behind a call of something written in C, and where a loop jumps back. Elsewhere none can come:
not between the end of a ``with`` block and the ``__exit__`` of a lock written in C, and not between
the return of a Python function and the next instruction. A tool that raises at lines or at every
instruction would ask code to survive what cannot happen, and would leave C locks held for ever; and
it would miss what comes between two calls in one line.

So nothing is raised here. A first run notes each place that looks at the eval breaker; a later one
asks CPython for the exception just before one of them, and CPython raises it where it would raise a
real one, under the same exception table:

1. The request must not reach the trace function that makes it. It is made by a unary minus whose
   slot is a C function, and neither that instruction nor a return looks at the eval breaker.
2. Two places with no look between them are one: a call and the entry of what it calls.
3. Every Python frame below the operation counts, those of the standard library and of NumPy too:
   ``contextlib`` can be interrupted before it resumes a generator.

A place is found again by its number among the calls and the instructions of that call, so an
operation has to take the same way each time; one that does not is counted as *drifted*.
"""

from __future__ import annotations

import _thread
import ctypes
import dis
import gc
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

Act: TypeAlias = Callable[[], object]
Tracer: TypeAlias = Callable[[FrameType, str, Any], Any]

OWN = str(Path(__file__).parent)
"""Frames of files below are ours; nothing is sent there."""


class Interrupt(BaseException):
    """Nobody's exception: what no handler can expect."""


class Point(NamedTuple):
    """A place in one run of an operation that looks at the eval breaker.

    Attributes:
        call: the number of the frame's entry among all entries below the operation.
        step: the number of the instruction among those of this entry; -1: the entry itself.
        offset: the instruction.
        file: where its code is.
        line: in which line.
        function: in which function.
    """

    call: int
    step: int
    offset: int
    file: str
    line: int
    function: str

    @property
    def site(self) -> tuple[str, int, int]:
        """What different runs of the same instruction have in common."""
        return self.file, self.line, self.offset

    def __str__(self) -> str:
        how = " (entry)" if self.step < 0 else ""
        return f"{short(self.file)}:{self.line} {self.function}{how}"


class Sent(NamedTuple):
    """What became of an exception that was asked for.

    Attributes:
        error: what the operation raised, None if nothing.
        asked: how many were asked for.
        drifted: whether that was elsewhere than planned.
        late: whether it came when the operation had returned.
    """

    error: BaseException | None
    asked: int
    drifted: bool = False
    late: bool = False


class AtPoint:
    """Sends an exception to a point, and perhaps a second one a few looks later.

    Args:
        point: where to.
        kind: what is raised.
        then: how many looks at the eval breaker lie between it and a second one; None: no second.
    """

    def __init__(self, point: Point, kind: type[BaseException], then: int | None = None) -> None:
        self.kind = kind
        self._point = point
        self._left = then
        self._request = Request(ask_here(kind))
        self._n_calls = self._n_steps = self._asked = 0
        self._drifted = False

    def send(self, act: Act) -> Sent:
        """Run the operation and send it."""
        return _caught(act, self._enter, lambda: (self._asked, self._drifted))

    def _enter(self, frame: FrameType, event: str, _: object) -> Tracer | None:
        if event != "call":
            return None
        self._n_calls += 1
        if self._n_calls - 1 != self._point.call:
            return None
        if self._point.step >= 0:
            return _instructions(frame, self._instruction)
        follow = self._arrived(frame, -1)
        _ = -self._request
        return follow

    def _instruction(self, frame: FrameType, event: str, _: object) -> Tracer | None:
        if event == "opcode":
            self._n_steps += 1
            if self._n_steps - 1 == self._point.step:
                follow = self._arrived(frame, frame.f_lasti)
                _ = -self._request
                return follow
        return self._instruction

    def _arrived(self, frame: FrameType, offset: int) -> Tracer | None:
        """Return what traces the handling of the exception, if a second one is to come."""
        point = self._point
        self._drifted = (frame.f_code.co_filename, offset) != (point.file, point.offset)
        self._asked += 1
        if self._left is None:
            sys.settrace(None)
            return None
        looks = Looks(self._count)
        outer: FrameType | None = frame
        while outer is not None and not outer.f_code.co_filename.startswith(OWN):
            outer.f_trace = _instructions(outer, looks.instruction)
            outer = outer.f_back
        sys.settrace(looks.enter)
        return looks.instruction

    def _count(self, *_: object) -> Request | None:
        assert self._left is not None
        self._left -= 1
        if self._left != -1:
            return None
        sys.settrace(None)
        self._asked += 1
        return self._request


class Request:
    """Calls a C function by ``-request``, with no look at the eval breaker before or behind it."""

    __slots__ = ()

    def __new__(cls, ask: Callable[[], object]) -> Request:
        """Make one of a class of its own: slots are looked up in classes."""
        made = type("Request", (Request,), {"__slots__": (), "__neg__": staticmethod(ask)})
        return object.__new__(made)

    def __neg__(self) -> object:
        raise NotImplementedError


_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)


def ask_here(kind: type[BaseException]) -> Callable[[], object]:
    """Return what asks for an exception in this thread, for Ctrl-C's as a signal does."""
    if kind is KeyboardInterrupt and threading.current_thread() is threading.main_thread():
        return _thread.interrupt_main
    return ask_thread(threading.get_ident(), kind)


def ask_thread(thread: int, kind: type[BaseException]) -> Callable[[], object]:
    """Return what asks for an exception in another thread; it is a C function."""
    return partial(_set_async_exc, thread, kind)


class Looks:
    """Follows a run and tells of every look at the eval breaker.

    Args:
        tell: called before each with the number of the entry, of the instruction, and the frame;
            what it returns is asked for.
    """

    def __init__(self, tell: Callable[[int, int, FrameType], Request | None]) -> None:
        self._tell = tell
        self._n_calls = 0
        self._just_called = False

    def enter(self, frame: FrameType, event: str, _: object) -> Tracer | None:
        """Note an entry."""
        if event != "call":
            return None
        call, just_called = self._n_calls, self._just_called
        self._n_calls, self._just_called = call + 1, False
        if frame.f_code.co_filename.startswith(OWN):
            return None
        looks, step = places(frame.f_code), 0

        def instruction(frame: FrameType, event: str, _: object) -> Tracer:
            nonlocal step
            if event == "opcode":
                step += 1
                self._just_called = frame.f_lasti in looks
                if self._just_called and (request := self._tell(call, step - 1, frame)):
                    _ = -request
            return instruction

        _instructions(frame, instruction)
        if not just_called and (request := self._tell(call, -1, frame)):  # rule 2
            _ = -request
        return instruction

    def instruction(self, frame: FrameType, event: str, _: object) -> Tracer:
        """Note an instruction of a frame that was entered before."""
        if event == "opcode":
            self._just_called = frame.f_lasti in places(frame.f_code)
            if self._just_called and (request := self._tell(-1, -1, frame)):
                _ = -request
        return self.instruction


def record(act: Act) -> tuple[list[Point], BaseException | None]:
    """Run an operation; return the points that it passes, and what it raises."""
    points: list[Point] = []

    def note(call: int, step: int, frame: FrameType) -> None:
        code, offset = frame.f_code, frame.f_lasti if step >= 0 else -1
        name = getattr(code, "co_qualname", code.co_name)
        points.append(Point(call, step, offset, code.co_filename, frame.f_lineno, name))

    sent = _caught(act, Looks(note).enter, lambda: (0, False))
    return points, sent.error


def spread(points: Sequence[Point], most: int, offset: int = 0) -> list[int]:
    """Choose points: the first, second and last of each site, or evenly among those, by number."""
    by_site: dict[tuple[str, int, int], list[int]] = {}
    for i, point in enumerate(points):
        by_site.setdefault(point.site, []).append(i)
    chosen = sorted({i for same in by_site.values() for i in (*same[:2], same[-1])})
    if len(chosen) <= most:
        return chosen
    # an offset of its own for each seed, so that several runs pass all of them
    return [chosen[(i * len(chosen) + offset % len(chosen)) // most] for i in range(most)]


def short(file: str) -> str:
    """Return a path from its package on."""
    parts = Path(file).parts
    for name in ("kvcellar", "site-packages"):
        if name in parts:
            at = len(parts) - 1 - parts[::-1].index(name)
            return "/".join(parts[at + (name == "site-packages") :])
    return "/".join(parts[-2:])


_PLACES: dict[CodeType, frozenset[int]] = {}


def places(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions that look at the eval breaker."""
    if (found := _PLACES.get(code)) is None:
        found = frozenset(
            one.offset for one in dis.get_instructions(code) if _looks(one.opname, one)
        )
        _PLACES[code] = found
    return found


def _looks(name: str, one: dis.Instruction) -> bool:
    if name.startswith("CALL_INTRINSIC") or "NO_INTERRUPT" in name:
        return False
    if name.startswith("CALL"):
        return True
    is_back = isinstance(one.argval, int) and one.argval <= one.offset
    return "JUMP" in name and ("BACKWARD" in name or is_back)


def _instructions(frame: FrameType, tracer: Tracer) -> Tracer:
    """Have a tracer called before each instruction of a frame."""
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    return tracer


def _caught(act: Act, enter: Tracer, told: Callable[[], tuple[int, bool]]) -> Sent:
    """Run an operation under a tracer; garbage is left alone, so that runs are alike."""
    error: BaseException | None = None
    was = gc.isenabled()
    gc.disable()
    try:
        sys.settrace(enter)
        try:
            act()
        finally:
            sys.settrace(None)
    except BaseException as caught:
        error = caught
    late = error is None and _is_pending()
    if was:
        gc.enable()
    asked, drifted = told()
    return Sent(error, asked, drifted, late)


def _is_pending() -> bool:
    """Whether an exception was asked for that did not come yet; it comes here."""
    try:
        for _ in range(3):
            _look()
    except BaseException:
        return True
    return False


def _look() -> None:
    """Look at the eval breaker."""
