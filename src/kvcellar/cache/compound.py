"""A transaction over several caches at once: all of them are kept as they are, or taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from kvcellar.cache.base import Cache
from kvcellar.cache.transaction import Remember
from kvcellar.cache.undoable import Undoable
from kvcellar.errors import CacheError


class CompoundHost(Protocol):
    """What a compound transaction needs of the cache that it belongs to."""

    @property
    def is_decoding(self) -> bool:
        """Whether a batch has been placed and neither committed nor released."""

    def abandon(self) -> None:
        """Release what that batch took."""


class CompoundTransaction(Undoable):
    """A transaction on each part; see :mod:`kvcellar.cache.transaction` for what that keeps."""

    def __init__(self, journal: CompoundJournal, watchers: Sequence[Remember]) -> None:
        self._journal = journal
        self._state: Literal["open", "committed", "rolled back"] = "open"
        self._parts: list[Undoable] = []
        try:
            for part in journal.parts:
                self._parts.append(part.transaction())
            self._undos = [remember() for remember in watchers]
        except BaseException:
            self._roll_back_parts()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or rolled back."""
        return self._state == "open"

    def commit(self) -> None:
        """Keep what happened in every part; see :meth:`Undoable.commit`."""
        journal = self._journal
        if self._state != "open":
            raise CacheError(f"this transaction is {self._state} already")
        if journal.open[-1] is not self:
            raise CacheError("a transaction within this one is open: end that one first")
        if journal.host.is_decoding:
            raise CacheError("a batch is being decoded: commit or release its placement first")
        for transaction in self._parts:
            transaction.commit()
        self._end("committed")

    def rollback(self) -> None:
        """Take back what happened in every part; see :meth:`Undoable.rollback`."""
        journal = self._journal
        if self._state == "committed":
            raise CacheError("this transaction is committed and cannot be taken back")
        if self._state == "rolled back":
            return
        journal.host.abandon()
        while journal.open[-1] is not self:
            journal.open[-1].rollback()
        self._roll_back_parts()
        self._end("rolled back")
        for undo in reversed(self._undos):
            undo()

    def _roll_back_parts(self) -> None:
        for transaction in reversed(self._parts):
            transaction.rollback()

    def _end(self, state: Literal["committed", "rolled back"]) -> None:
        self._state = state
        self._journal.open.pop()


class CompoundJournal:
    """The open transactions of a cache of several parts, the innermost last."""

    def __init__(self, host: CompoundHost, parts: Sequence[Cache]) -> None:
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
