"""What every transaction is: something to be kept or taken back, usable in a with block.

Transactions nest: what an inner one commits, the outer one can still take back. Ending an outer
one by a rollback ends those within it; it cannot be committed while one is open. That much is the
same for every cache, and :class:`Nested` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Protocol, TypeAlias, TypeVar

from kvcellar.errors import CacheError

U = TypeVar("U", bound="Undoable")

Undo: TypeAlias = Callable[[], None]
Remember: TypeAlias = Callable[[], Undo]
"""Called when a transaction begins; what it returns is called if that is rolled back."""


class NestHost(Protocol):
    """What every transaction needs of its cache."""

    @property
    def is_decoding(self) -> bool:
        """Whether a batch has been placed and neither committed nor released."""

    def abandon(self) -> None:
        """Release what that batch took."""


class Undoable(Protocol):
    """What happens to a cache from here on, to be kept or taken back.

    As a context manager it commits when the block ends, and rolls back when it ends by an
    exception. After a :meth:`rollback` within the block, the rest of it stands on its own.
    """

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or rolled back."""

    def commit(self) -> None:
        """Keep what happened; an outer transaction can still take it back.

        Raises:
            CacheError: it has ended already, an inner one is open, or a batch is being decoded.
        """

    def rollback(self) -> None:
        """Take back what happened, what inner transactions committed included.

        A batch that is being decoded is released. A second time does nothing.

        Raises:
            CacheError: it was committed.
        """

    def __enter__(self: U) -> U:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            if self.is_open:
                self.rollback()
            return
        try:
            if self.is_open:
                self.commit()
        except BaseException:
            self.rollback()
            raise


class Nested(Undoable):
    """A transaction within those that are open.

    Args:
        host: the cache.
        nest: the open transactions, the innermost last; whoever makes this one appends it.
        watchers: those outside of the cache that take part.
    """

    def __init__(
        self, host: NestHost, nest: Sequence[Nested], watchers: Sequence[Remember] = ()
    ) -> None:
        self._host = host
        self._nest = nest
        self._undos = [remember() for remember in watchers]
        self._state: Literal["open", "committed", "rolled back"] = "open"

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or rolled back."""
        return self._state == "open"

    def commit(self) -> None:
        """Keep what happened; see :meth:`Undoable.commit`."""
        if self._state != "open":
            raise CacheError(f"this transaction is {self._state} already")
        if self._nest[-1] is not self:
            raise CacheError("a transaction within this one is open: end that one first")
        if self._host.is_decoding:
            raise CacheError("a batch is being decoded: commit or release its placement first")
        self._keep()
        self._state = "committed"
        self._ended(kept=True)

    def rollback(self) -> None:
        """Take back what happened; see :meth:`Undoable.rollback`."""
        if self._state == "committed":
            raise CacheError("this transaction is committed and cannot be taken back")
        if self._state == "rolled back":
            return
        self._host.abandon()
        while self._nest[-1] is not self:
            self._nest[-1].rollback()
        self._take_back()
        self._state = "rolled back"
        self._ended(kept=False)
        for undo in reversed(self._undos):
            undo()

    # -- what each kind does besides

    def _keep(self) -> None:
        """What has to be done before it counts as committed."""

    def _take_back(self) -> None:
        """Let everything be as it was."""
        raise NotImplementedError

    def _ended(self, *, kept: bool) -> None:
        """Leave the nest; what was kept may still be taken back by an outer one."""
        raise NotImplementedError
