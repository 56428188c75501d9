"""What every transaction is: something to be kept or taken back, usable in a with block."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, TypeVar

U = TypeVar("U", bound="Undoable")


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
