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

A place is found again by its number, so an operation has to take the same way each time; one that
does not is counted as *drifted*. Up to Python 3.11 a trace function follows an operation, from 3.12
on `sys.monitoring`, where a location that looks at nothing tells of itself only once. From 3.13 on,
CPython looks before it tells of an entry: the exception comes at the next place then.
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
from typing import Any, NamedTuple, Protocol, TypeAlias

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
        if sys.version_info >= (3, 12):
            watch: Watch = MonitoredLooks(self._monitored)
        else:
            watch = Traced(self._enter)
        return _caught(act, watch, lambda: (self._asked, self._drifted))

    def _monitored(self, look: Look) -> Request | None:
        if self._asked:
            return self._count(look)
        if look.number != self._point.call:
            return None
        self._asked += 1
        self._drifted = look.site != self._point.site
        return self._request

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
        looks = TracedLooks(self._count)
        outer: FrameType | None = frame
        while outer is not None and not outer.f_code.co_filename.startswith(OWN):
            outer.f_trace = _instructions(outer, looks.instruction)
            outer = outer.f_back
        looks.start()
        return looks.instruction

    def _count(self, _: Look) -> Request | None:
        if self._left is None:
            return None
        self._left -= 1
        if self._left != -1:
            return None
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


class Look(NamedTuple):
    """A look at the eval breaker that is about to come.

    Attributes:
        number: how many were before.
        call: the number of the entry of the frame among all; -1: before anything was followed.
        step: the number of the instruction among those of this entry; -1: the entry itself.
        code: what runs.
        offset: the instruction; -1: the entry.
    """

    number: int
    call: int
    step: int
    code: CodeType
    offset: int

    @property
    def site(self) -> tuple[str, int, int]:
        """What different runs of the same instruction have in common."""
        return self.code.co_filename, line_of(self.code, self.offset), self.offset


Tell: TypeAlias = Callable[[Look], "Request | None"]
"""Called before each look; what it returns is asked for."""


class Watch(Protocol):
    """Follows what runs between start and stop."""

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End."""


class Traced:
    """Has a trace function called."""

    def __init__(self, enter: Tracer) -> None:
        self._enter = enter

    def start(self) -> None:
        """Begin."""
        sys.settrace(self._enter)

    def stop(self) -> None:
        """End."""
        sys.settrace(None)


class TracedLooks(Traced):
    """Tells of every look of this thread, by a trace function."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(self._note_entry)
        self._tell = tell
        self._n_calls = self._n_looks = 0
        self._just_called = False

    def _note_entry(self, frame: FrameType, event: str, _: object) -> Tracer | None:
        if event != "call":
            return None
        call, just_called = self._n_calls, self._just_called
        self._n_calls, self._just_called = call + 1, False
        code, step = frame.f_code, 0
        if code.co_filename.startswith(OWN):
            return None
        looks = places(code)

        def instruction(frame: FrameType, event: str, _: object) -> Tracer:
            nonlocal step
            if event == "opcode":
                step += 1
                offset = frame.f_lasti
                self._just_called = offset in looks
                if self._just_called and (request := self._look(call, step - 1, code, offset)):
                    _ = -request
            return instruction

        _instructions(frame, instruction)
        if not just_called and (request := self._look(call, -1, code, -1)):  # rule 2
            _ = -request
        return instruction

    def instruction(self, frame: FrameType, event: str, _: object) -> Tracer:
        """Note an instruction of a frame that was entered before."""
        if event == "opcode":
            code, offset = frame.f_code, frame.f_lasti
            self._just_called = offset in places(code)
            if self._just_called and (request := self._look(-1, -1, code, offset)):
                _ = -request
        return self.instruction

    def _look(self, call: int, step: int, code: CodeType, offset: int) -> Request | None:
        self._n_looks += 1
        return self._tell(Look(self._n_looks - 1, call, step, code, offset))


if sys.version_info >= (3, 12):
    MONITORING = sys.monitoring
    EVENTS = MONITORING.events
    TOOL = MONITORING.PROFILER_ID

    class MonitoredLooks:
        """Tells of every look of this thread, by what CPython tells tools."""

        def __init__(self, tell: Tell) -> None:
            self._tell = tell
            self._thread = threading.get_ident()
            self._n_looks = 0
            self._just_called = False

        def start(self) -> None:
            """Begin."""
            MONITORING.use_tool_id(TOOL, "kvcellar interrupts")
            for event in (EVENTS.PY_START, EVENTS.PY_RESUME):
                MONITORING.register_callback(TOOL, event, self._entry)
            MONITORING.register_callback(TOOL, EVENTS.INSTRUCTION, self._instruction)
            MONITORING.set_events(TOOL, EVENTS.PY_START | EVENTS.PY_RESUME | EVENTS.INSTRUCTION)

        def stop(self) -> None:
            """End."""
            MONITORING.set_events(TOOL, 0)
            MONITORING.free_tool_id(TOOL)

        def _entry(self, code: CodeType, offset: int) -> object:  # noqa: ARG002
            just_called, self._just_called = self._just_called, False
            if code.co_filename.startswith(OWN) or threading.get_ident() != self._thread:
                return None
            if not just_called and (request := self._look(-1, code, -1)):  # rule 2
                _ = -request
            return None

        def _instruction(self, code: CodeType, offset: int) -> object:
            if code.co_filename.startswith(OWN) or offset not in places(code):
                return MONITORING.DISABLE
            if threading.get_ident() == self._thread:
                self._just_called = True
                if request := self._look(0, code, offset):
                    _ = -request
            return None

        def _look(self, step: int, code: CodeType, offset: int) -> Request | None:
            number = self._n_looks
            self._n_looks += 1
            return self._tell(Look(number, number, step, code, offset))

    AllLooks = MonitoredLooks
else:
    AllLooks = TracedLooks


def record(act: Act) -> tuple[list[Point], BaseException | None]:
    """Run an operation; return the points that it passes, and what it raises."""
    points: list[Point] = []

    def note(look: Look) -> None:
        code, line = look.code, line_of(look.code, look.offset)
        name = getattr(code, "co_qualname", code.co_name)
        points.append(Point(look.call, look.step, look.offset, code.co_filename, line, name))

    sent = _caught(act, AllLooks(note), lambda: (0, False))
    return points, sent.error


def line_of(code: CodeType, offset: int) -> int:
    """Return the line of an instruction, of an entry the first."""
    lines = (line for start, end, line in code.co_lines() if start <= offset < end)
    return next(lines, None) or code.co_firstlineno


def spread(points: Sequence[Point], most: int, offset: int = 0) -> list[int]:
    """Choose points: the first, second and last of each site, or evenly among those, by number."""
    by_site: dict[tuple[str, int, int], list[int]] = {}
    for i, point in enumerate(points):
        by_site.setdefault(point.site, []).append(i)
    chosen = sorted({i for same in by_site.values() for i in (*same[:2], same[-1])})
    if len(chosen) <= most:
        return chosen
    # an offset of its own for each seed, so that several runs pass all of them
    start = offset * most % len(chosen)
    return [chosen[(i * len(chosen) + start) // most] for i in range(most)]


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


def _caught(act: Act, watch: Watch, told: Callable[[], tuple[int, bool]]) -> Sent:
    """Run an operation and follow it; garbage is left alone, so that runs are alike."""
    error: BaseException | None = None
    was = gc.isenabled()
    gc.disable()
    try:
        watch.start()
        try:
            act()
        finally:
            watch.stop()
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
