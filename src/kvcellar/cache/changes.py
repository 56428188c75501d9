"""How a change to a cache becomes visible: as a whole, or not at all (invariant 5).

An exception can come from outside at any moment: Ctrl-C, a signal, one that another thread sends,
memory that runs short. It can come in the middle of a ``finally`` as well, and even where a block
that would clean up begins or ends. So nothing relies on code that cleans up:

1. Whatever changes cells, sequences, checkpoints, batches or transactions runs as a *change*.
   Before anything else, a note is made of how to take it back: each participant remembers its
   attributes, and old values of cells are logged before they are written.
2. One assignment drops the note. With that, and no sooner, the change has happened.
3. A note whose call has ended is left over. It is taken back at once where the exception passes,
   else by whatever is called next. Taking back is the same however often it is begun.
4. Some changes, such as a rollback, can only go forward: they are taken back and done again.
5. Rows follow the table. Those of cells that were held when a change began are neither wiped nor
   filled before it ends, unless they have been kept; zeroing comes afterwards.

Calls within a change are part of it. A batch that is being decoded and a transaction outlive the
call that began them; they end by themselves when nobody can end them any more: when their handle
is gone, or the ``with`` block that was to end them, whatever a traceback keeps (:class:`Handle`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial, wraps
from operator import attrgetter
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
)
from weakref import ReferenceType, ref

Undo: TypeAlias = Callable[[], None]
Remember: TypeAlias = Callable[[], Undo]
"""Called when a change or a transaction begins; what it returns is called to take that back."""

P = ParamSpec("P")
R = TypeVar("R")


H = TypeVar("H", bound="Handle[Any]", covariant=True)


class Lasting(ABC, Generic[H]):
    """What outlives the call that began it, until its handle ends it or nobody can any more."""

    _grip: ReferenceType[Leave] | None = None  # None: what it is a part of ends it

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody can end it any more."""
        return self._grip is not None and self._grip() is None

    def grip(self) -> Leave:
        """Return what it lasts as long as."""
        leave: Leave = self.leave  # a bound method, another one each time
        self._grip = ref(leave)
        return leave

    @abstractmethod
    def take_back(self) -> None:
        """Take back what happened since it began."""

    @abstractmethod
    def handle(self) -> H:
        """Return a handle that ends it, but has no grip on it: a ``with`` block has."""

    @abstractmethod
    def leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """End it as a ``with`` block ends, with an exception or without."""


Leave: TypeAlias = Callable[
    ["type[BaseException] | None", "BaseException | None", "TracebackType | None"], None
]


class _Delegated(property):
    """A special method that is an attribute of the instance, so not bound to it; read in C."""

    def __call__(self, handle: object, *args: object) -> object:
        """Call it as a method of the class, as `contextlib.ExitStack` does."""
        return attrgetter(self.name)(handle)(*args)

    def __init__(self, name: str) -> None:
        super().__init__(attrgetter(name))
        self.name = name


class Handle(Generic[H]):
    """What users have of something lasting: a batch that is placed, or a transaction.

    An exception leaves its traceback behind, and that keeps the variables of each function it went
    through, for as long as anyone keeps it: a handle among them says nothing about whether somebody
    can still use it. What a ``with`` statement itself holds of its block, a bound ``__exit__``,
    goes whenever the block is left. So that one is the grip, and it is all that has one:
    ``__enter__`` returns another handle, and neither method has the first one among its variables.
    Only ``handle = …; with handle:`` leaves it in a variable.
    """

    def __init__(self, lasting: Lasting[H], grip: Leave | None = None) -> None:
        self._enter: Callable[[], H] = lasting.handle
        self._leave: Leave = lasting.leave if grip is None else grip

    if TYPE_CHECKING:

        def __enter__(self) -> H: ...

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            traceback: TracebackType | None,
        ) -> None: ...
    else:
        __enter__ = _Delegated("_enter")
        __exit__ = _Delegated("_leave")


class Changes:
    """The change that is being made to one cache and to what lives in it.

    Attributes:
        log: called in reverse order, what puts back rows and cells that were written.
        lasting: batches and transactions that are open, the innermost last.
    """

    def __init__(self) -> None:
        self.log: list[Callable[[], object]] = []
        self.lasting: list[Lasting[Any]] = []
        self._participants: list[Remember] = [self._remember_lasting]
        self._note: _Note | None = None

    def join(self, remember: Remember) -> None:
        """Let an object that changes alter take part in all of them."""
        self._participants.append(remember)

    @property
    def is_open(self) -> bool:
        """Whether a change is being made; one that was left over is not."""
        note = self._note
        return note is not None and note.call() is not None

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function as a change, or as a part of the one that is being made."""
        if self.is_open:
            return function(*args, **kwargs)
        self.settle()
        return self._run(None, partial(function, *args, **kwargs))

    def run_forward(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The same, but what was begun is done again rather than left undone."""
        if self.is_open:
            return function(*args, **kwargs)
        self.settle()
        step = partial(function, *args, **kwargs)
        return self._run(step, step)

    def settle(self) -> None:
        """Take back what was left over and what has been abandoned, if no change is being made."""
        if self._note is not None and not self.is_open:
            self._take_back()
        while self._note is None and self.lasting and self._has_abandoned():
            self._run(self._end_abandoned, self._end_abandoned)

    def attempt(self, step: Callable[[], bool]) -> bool:
        """Do a part of the change; if it says False, only that part is taken back."""
        undos, mark = [remember() for remember in self._participants], len(self.log)
        if step():
            return True
        for undo in [*undos, *self.log[mark:]][::-1]:
            undo()
        return False

    def remember(self, undo: Undo) -> None:
        """Note how an object that only this change alters is put back."""
        if self._note is not None:
            self._note.objects.append(undo)

    def afterwards(self, step: Callable[[], None]) -> None:
        """Call something once the change has happened, at once if there is none."""
        if self.is_open and self._note is not None:
            self._note.afterwards.append(step)
        else:
            step()

    def keep_so_far(self, remember: Remember) -> None:
        """Keep what has happened to a participant in this change, whatever becomes of the rest.

        Rotating rows and moving them to other cells says the same in another way.
        """
        note, n_kept = self._note, len(self.log)
        if note is not None:
            undos = list(note.start[0])
            undos[self._participants.index(remember)] = remember()
            note.start = undos, n_kept
            self.log[:n_kept] = [_nothing] * n_kept  # rows that are kept take memory

    @property
    def is_fresh(self) -> bool:
        """Whether nothing is logged that could be taken back."""
        note = self._note
        return len(self.log) == (0 if note is None else note.start[1])

    # -- steps

    def _run(self, forward: Callable[[], object] | None, step: Callable[[], R]) -> R:
        call, result = _Call(), None
        try:
            self.log.clear()
            undos = [remember() for remember in self._participants]
            note = self._note = _Note(ref(call), undos, forward)
            result = step()
            self._note = None  # it has happened
            self.log.clear()
            for follow in note.afterwards:
                follow()
        except BaseException:
            del call, result  # it has ended, though a traceback may keep this frame
            self._take_back()
            raise
        return result

    def _take_back(self) -> None:
        try:
            self._undo()
        except BaseException:  # the second exception from outside in a moment
            self._undo()
            raise

    def _undo(self) -> None:
        note = self._note
        if note is None:
            return
        undos, n_kept = note.start
        for undo in [*note.objects, *undos, *self.log[n_kept:]][::-1]:
            undo()
        if note.forward is not None:
            call = _Call()
            note.call = ref(call)  # what follows is part of the change
            try:
                note.forward()
            finally:
                del call
        self._note = None

    def _remember_lasting(self) -> Undo:
        return partial(self.lasting.__setitem__, slice(None), list(self.lasting))

    def _has_abandoned(self) -> bool:
        return any(one.is_abandoned for one in self.lasting)

    def _end_abandoned(self) -> None:
        for one in reversed(self.lasting):
            if one.is_abandoned:
                one.take_back()
                return


class _Call:
    """Lives as long as the call that makes a change."""

    __slots__ = ("__weakref__",)


class _Note:
    """How a change is taken back, and by whom it is made."""

    __slots__ = ("afterwards", "call", "forward", "objects", "start")

    def __init__(
        self,
        call: ReferenceType[Any],
        undos: list[Undo],
        forward: Callable[[], object] | None,
    ) -> None:
        self.call = call
        self.start = undos, 0  # what participants were, and how much of the log is kept
        self.forward = forward
        self.objects: list[Undo] = []
        self.afterwards: list[Callable[[], None]] = []


def _nothing() -> None:
    """Stand in the place of what need not be taken back."""


class Changing(Protocol):
    """What has changes."""

    @property
    def changes(self) -> Changes:
        """Those of its cache."""


C = TypeVar("C", bound=Changing)


def atomic(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Make a method happen as a whole or not at all."""

    @wraps(method)
    def whole(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.changes.run(method, self, *args, **kwargs)

    return whole


def forward(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Make a method that was begun happen as a whole, at the latest by the next call."""

    @wraps(method)
    def whole(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.changes.run_forward(method, self, *args, **kwargs)

    return whole
