"""Locks that a forked process can tell were held by a thread it does not have.

Of all threads only the one that forks lives on in the child. What another was doing stops there in
the middle: its lock stays locked, and what it was changing is neither as before nor as after. Who
waits for such a lock would wait for ever, so taking it is an error that says what happened. Locks
that were free, or held by the thread that forks, work on.
"""

from __future__ import annotations

import os
from _thread import RLock
from functools import lru_cache
from typing import NoReturn
from weakref import WeakSet

from kvcellar.errors import ClosedError


class Turn(RLock):  # type: ignore[misc]  # said to be final, and made to be derived from
    """A reentrant lock, for as long as a thing is used by one thread.

    Its ``with`` is that of the lock itself, in C: an exception cannot come between taking the lock
    and entering the block.
    """

    def __init__(self) -> None:
        _turns().add(self)


class LostTurn(Turn):  # type: ignore[misc]
    """One whose thread was left behind by a fork."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> NoReturn:  # noqa: ARG002
        """Say so.

        Raises:
            ClosedError: always.
        """
        raise ClosedError(
            "another thread was using this when the process was forked, and is not in the child: "
            "make a new context there, or fork while no other thread uses it"
        )

    __enter__ = acquire


@lru_cache(maxsize=1)
def _turns() -> WeakSet[Turn]:
    """All of this process."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_find_lost)
    return WeakSet()


def _find_lost() -> None:
    for turn in list(_turns()):
        if turn.acquire(blocking=False):
            turn.release()
        else:
            turn.__class__ = LostTurn
