"""A transaction over several caches at once: all of them are kept as they are, or taken back."""

from __future__ import annotations

from collections.abc import Sequence

from kvcellar.cache.base import Cache
from kvcellar.cache.undoable import Nested, NestHost, Remember, Undoable


class CompoundTransaction(Nested):
    """A transaction on each part; see :mod:`kvcellar.cache.transaction` for what that keeps."""

    def __init__(self, journal: CompoundJournal, watchers: Sequence[Remember]) -> None:
        super().__init__(journal.host, journal.open, watchers)
        self._journal = journal
        self._parts: list[Undoable] = []
        try:
            for part in journal.parts:
                self._parts.append(part.transaction())
        except BaseException:
            self._take_back()
            raise

    def _keep(self) -> None:
        for transaction in self._parts:
            transaction.commit()

    def _take_back(self) -> None:
        for transaction in reversed(self._parts):
            transaction.rollback()

    def _ended(self, *, kept: bool) -> None:  # noqa: ARG002
        self._journal.open.pop()


class CompoundJournal:
    """The open transactions of a cache of several parts, the innermost last."""

    def __init__(self, host: NestHost, parts: Sequence[Cache]) -> None:
        self.host = host
        self.parts = tuple(parts)
        self.open: list[CompoundTransaction] = []
        self.watchers: list[Remember] = []

    def begin(self, *, watched: bool = True) -> CompoundTransaction:
        """A new transaction within those that are open.

        Args:
            watched: whether those outside of the cache take part; within a verb they need not.
        """
        transaction = CompoundTransaction(self, self.watchers if watched else ())
        self.open.append(transaction)
        return transaction
