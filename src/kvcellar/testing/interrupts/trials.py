"""A stage, interrupted again and again: what came of each trial.

A `Stage` is what an operation is done on: :meth:`Stage.prepare` brings it to where the operation
begins, :meth:`Stage.act` is the operation, :meth:`Stage.verify` proves that nothing is half done.

A trial has a name by which it can be repeated: ``117`` is point 117 of the operation as it goes
when it was done before, ``new117`` point 117 when everything is new, ``117+5`` the first of these
with a second exception five looks later, ``sigint:3`` the third random moment of that kind.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, TypeAlias

from kvcellar.errors import KVCellarError
from kvcellar.testing.interrupts.points import (
    OWN,
    AtPoint,
    Interrupt,
    Point,
    Sent,
    record,
    short,
    spread,
)
from kvcellar.testing.interrupts.signals import KINDS, AtMoment

RAISED: tuple[type[BaseException], ...] = (Interrupt, KeyboardInterrupt, MemoryError)
"""What is raised, point by point in turn."""

NEW = "new"
RENEW = 40
"""Trials after which everything is closed, counted and made again."""


Happened: TypeAlias = Literal["before", "between", "after"]
"""Where an interrupted operation stopped: not begun, after some of its steps, or done."""


class Fault(Exception):
    """Something is half done.

    Attributes:
        kind: what sort of fault, in a word or two.
    """

    def __init__(self, kind: str, detail: object = "") -> None:
        self.kind = kind
        super().__init__(f"{detail}")


class NotApplicable(Exception):
    """The operation cannot be done on that stage, uninterrupted neither."""


class Stage(ABC):
    """What an operation is done on, and interrupted; one process has one at a time."""

    @abstractmethod
    def learn(self) -> None:
        """Do the operation uninterrupted, to know what it does.

        Raises:
            NotApplicable: it cannot be done here.
        """

    @abstractmethod
    def prepare(self) -> None:
        """Bring everything to where the operation begins."""

    @abstractmethod
    def act(self) -> object:
        """Do the operation."""

    @abstractmethod
    def verify(self) -> Happened:
        """Prove that nothing is half done, and say how far the operation got.

        Raises:
            Fault: something is.
        """

    @abstractmethod
    def renew(self, *, broken: bool = False) -> None:
        """Close what there is, and begin with a new one.

        Args:
            broken: whether it is known to be broken; otherwise all has to come back.

        Raises:
            Fault: it does not.
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything."""


def open_stage(name: str) -> Stage:
    """Open the stage that ``module:function:argument`` names."""
    module, function, argument = name.split(":", 2)
    make: Callable[[str], Stage] = getattr(import_module(module), function)
    return make(argument)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which trials a stage goes through.

    Attributes:
        points: how many points at most; None: all of them.
        new: how many points of the operation when everything is new.
        twice: at how many points a second exception follows.
        moments: how many random moments of each kind of signal.
        only: names of trials; if there are any, no others.
        seed: moves the choice.
    """

    points: int | None = 100
    new: int = 20
    twice: int = 20
    moments: int = 5
    only: tuple[str, ...] = ()
    seed: int = 0

    @property
    def needs_points(self) -> bool:
        """Whether a trial needs points of the operation as it goes when it was done before."""
        sampled = self.points != 0 or bool(self.twice)
        return any(name[0].isdigit() for name in self.only) if self.only else sampled

    @property
    def needs_new(self) -> bool:
        """Whether a trial needs points of the operation when everything is new."""
        sampled = self.points is None or bool(self.new)
        return any(name.startswith(NEW) for name in self.only) if self.only else sampled

    def names(self, points: list[Point], new: list[Point]) -> list[str]:
        """Return the names of the trials, in order."""
        if self.only:
            return list(self.only)
        if self.points is None:
            chosen, as_new = list(range(len(points))), list(range(len(new)))
            again = spread(points, self.twice, self.seed)
        else:
            chosen = spread(points, self.points, self.seed)
            again = spread(points, self.twice, self.seed + 1)
            as_new = spread(new, self.new, self.seed)
        rng = random.Random(self.seed)
        return [
            *map(str, chosen),
            *(f"{i}+{int(rng.expovariate(1 / 8))}" for i in again),
            *(f"{kind}:{self.seed + i}" for i in range(self.moments) for kind in KINDS),
            *(f"{NEW}{i}" for i in as_new),
        ]


@dataclass(slots=True)
class Trial:
    """What came of one trial.

    Attributes:
        name: by which it can be repeated.
        outcome: "before", "between", "after", "late" or "fault".
        kind: the kind of fault.
        detail: what is wrong.
        site: where the exception came.
        within: the library's functions around that, the innermost first.
        drifted: whether the exception came elsewhere than planned.
        alone: whether the fault came again on a new stage.
    """

    name: str
    outcome: str
    kind: str = ""
    detail: str = ""
    site: str = ""
    within: str = ""
    drifted: bool = False
    alone: bool = True


@dataclass(slots=True)
class Trials:
    """Goes through a plan on a stage.

    Attributes:
        stage: what the operation is done on.
        plan: which trials.
        points: those of the operation as it goes when it was done before.
        new: those when everything is new.
        seconds: how long it takes.
        ignored: what Python had to ignore during the last trial.
        is_beyond_repair: whether the stage cannot be renewed, so that another process has to go on.
    """

    stage: Stage
    plan: Plan
    points: list[Point] = field(default_factory=list)
    new: list[Point] = field(default_factory=list)
    seconds: float = 0.0
    ignored: list[str] = field(default_factory=list)
    is_beyond_repair: bool = False
    _since: int = 0

    def learn(self) -> list[str]:
        """Do the operation uninterrupted; return the trials that there will be.

        Raises:
            NotApplicable: it cannot be done.
            Fault: it goes wrong by itself.
        """
        sys.unraisablehook = self._note_ignored
        self.stage.learn()
        self.new = self._record() if self.plan.needs_new else []
        self._warm()
        self.points = self._record() if self.plan.needs_points else []
        return self.plan.names(self.points, self.new)

    def run(self, names: list[str]) -> Iterator[Trial]:
        """Run the trials of these names, until the stage cannot be renewed any more."""
        for name in names:
            trial = self._run(name)
            if trial.outcome == "fault" and self._renewed():
                trial.alone = self._run(name).outcome == "fault"
                self._renewed()
            elif trial.drifted and self._renewed():
                trial = self._run(name)
                if trial.outcome == "fault":
                    self._renewed()
            yield trial
            if self.is_beyond_repair:
                return

    def _renewed(self) -> bool:
        """Throw the stage away and warm a new one; return whether that can be done."""
        try:
            self.stage.renew(broken=True)
            self._warm()
        except Exception:
            self.is_beyond_repair = True
        return not self.is_beyond_repair

    def _warm(self) -> None:
        """Do the operation until it goes as it always will, with all that is kept."""
        self._since = 0
        for _ in range(2):
            self.stage.prepare()
            start = time.perf_counter()
            self.stage.act()
            seconds = time.perf_counter() - start
            self.seconds = min(seconds, self.seconds or seconds)
            self.stage.verify()

    def _record(self) -> list[Point]:
        self.stage.prepare()
        points, error = record(self.stage.act)
        if error is not None:
            raise Fault("fails when traced", repr(error)) from error
        self.stage.verify()
        return points

    def _run(self, name: str) -> Trial:
        trial = Trial(name, "before")
        self.ignored.clear()
        where = "when all was closed, after others"
        try:
            self._since += 1
            if name.startswith(NEW):
                self.stage.renew()
            elif self._since > RENEW:
                self.stage.renew()
                gc.collect()
                self._warm()
            where = "before it was interrupted"
            self.stage.prepare()
            sender, trial.site = self._sender(name)
            sent = sender.send(self.stage.act)
            trial.drifted = sent.drifted or (not sent.asked and not sent.late)
            trial.within = _functions(sent.error)
            trial.site = trial.site or _site_of(sent.error)
            where = ""
            self._judge(sent, sender.kind)
            happened = self.stage.verify()
            trial.outcome = "late" if sent.late else happened
        except Fault as fault:
            trial.outcome, trial.kind, trial.detail = "fault", fault.kind, str(fault)
        except Exception as error:
            trial.outcome, trial.kind = "fault", f"{type(error).__name__} {where or 'afterwards'}"
            trial.detail = f"{error}; {_last_lines(error)}"
        return trial

    def site(self, name: str) -> str:
        """Where an exception of that name is sent, "" if nobody knows."""
        return "" if ":" in name else str(self._point(name))

    def _point(self, name: str) -> Point:
        points = self.new if name.startswith(NEW) else self.points
        number = int(name.removeprefix(NEW).partition("+")[0])
        return points[min(number, len(points) - 1)]  # it may go a shorter way in another process

    def _sender(self, name: str) -> tuple[AtPoint | AtMoment, str]:
        if ":" in name:
            kind, _, seed = name.partition(":")
            return AtMoment.random(kind, int(seed), self.seconds), ""
        point, then = self._point(name), name.partition("+")[2]
        raised = RAISED[(point.call + point.step) % len(RAISED)]
        return AtPoint(point, raised, int(then) if then else None), str(point)

    def _judge(self, sent: Sent, kind: type[BaseException]) -> None:
        """Raise unless the operation ended as one may that an exception of that kind interrupts."""
        if sent.error is None:
            if sent.asked and not sent.late and not self.ignored:
                raise Fault("swallowed", "the operation ended as if nothing had come")
        elif not isinstance(sent.error, kind) and not (
            kind is MemoryError and isinstance(sent.error, KVCellarError)  # it says what for
        ):
            raise Fault("another error", f"{sent.error!r}; {_last_lines(sent.error)}")

    def _note_ignored(self, what: Any) -> None:
        """Python ignores exceptions in callbacks and finalizers; nobody can change that."""
        self.ignored.append(repr(what.exc_value))


def _site_of(error: BaseException | None) -> str:
    """Where an exception was raised first."""
    if error is None:
        return ""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OWN)
    ]
    if not frames:
        return "in the tool"
    return f"{short(frames[-1].filename)}:{frames[-1].lineno} {frames[-1].name}"


def _functions(error: BaseException | None, most: int = 3) -> str:
    """The functions of the package that an exception came from, the innermost first."""
    names: list[str] = []
    trace = None if error is None else error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        file = short(code.co_filename)
        if file.startswith("kvcellar") and not code.co_filename.startswith(OWN):
            name = getattr(code, "co_qualname", code.co_name)
            names.append(f"{file.removeprefix('kvcellar/')} {name}")
        trace = trace.tb_next
    return " < ".join(names[: -most - 1 : -1])


def _last_lines(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{short(f.filename)}:{f.lineno}" for f in reversed(frames))
